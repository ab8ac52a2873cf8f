"""``python -m pallas_kernels.add_norm.bench``: microseconds of a residual addition and the norm of its sum."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.add_norm import triton
from pallas_kernels.lib import timing

CALLS = 72  # two a layer, 36 layers: with few calls the benchmark would measure the host's dispatch of a program
EPS = 1e-6
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


def program(add_norm: Callable[..., Any]) -> Any:
    """``CALLS`` additions to one stream, each of another array, and all normed rows.

    Every sum waits for the norm of the one before, as in a model: else XLA would fuse all of them into one kernel.
    """

    def run(x: Any, ys: Any, weight: Any) -> Any:
        normed = []
        for y in ys:
            x, h = add_norm(x, y, weight, EPS)
            x, h = jax.lax.optimization_barrier((x, h))
            normed.append(h)
        return x, normed

    return jax.jit(run)


def measure(rows: int, width: int, name: str, num_warps: Sequence[int]) -> list[dict[str, Any]]:
    """Time XLA's own kernels and ours, and ours with other numbers of warps than its default too."""
    ys = list(jax.random.normal(jax.random.key(0), (CALLS, rows, width), DTYPES[name]))
    arguments = (ys[-1], ys, jnp.ones((width,), DTYPES[name]))
    functions: dict[str, Callable[..., Any]] = {
        implementation: functools.partial(pallas_kernels.add_norm, implementation=implementation)
        for implementation in ("reference", "triton")
    }
    functions |= {f"triton, {n} warps": functools.partial(triton.add_norm, num_warps=n) for n in num_warps}
    lowered: dict[Any, Callable[[], Any]] = {
        key: functools.partial(program(f).lower, *arguments) for key, f in functions.items()
    }
    size = 4 * rows * width * ys[0].dtype.itemsize
    results = []
    for implementation, compiled in timing.compile_all(lowered).items():
        time = timing.seconds(compiled, arguments, CALLS, budget=0.05)
        case = {"rows": rows, "width": width, "dtype": name, "implementation": implementation}
        results.append(case | {"us": round(time * 1e6, 2), "GB/s": round(size / time / 1e9)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 1024])
    parser.add_argument("--widths", nargs="+", type=int, default=[4096])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--warps", nargs="*", type=int, default=[], help="try the kernel with these, too")
    parser.add_argument("--json", default="add_norm.json", help="where the rows go")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        for width in args.widths:
            for name in args.dtypes:
                for row in measure(rows, width, name, args.warps):
                    results.append(row)
                    print(*row.values(), flush=True)
    timing.save(args.json, results)
    print(timing.table(results))


if __name__ == "__main__":
    main()
