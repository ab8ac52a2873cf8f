"""``python -m pallas_kernels.largest_product.bench``: microseconds of the argmax of logits, by rows and dtype."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.largest_product import LARGEST_PRODUCT, mosaic, reference
from pallas_kernels.lib import timing
from pallas_kernels.registry import Device

DTYPES = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.largest_product,
    "mosaic": mosaic.largest_product,
}
CALLS, TURNS = 4, 4


def measure(rows: int, vocabulary: int, width: int, name: str) -> dict[str, Any]:
    """Time XLA's product and argmax and the kernel, in turns, since both become slower as the card warms up."""
    dtype = DTYPES[name]
    keys = jax.random.split(jax.random.key(0), CALLS + 1)
    normal = jax.jit(
        lambda key, rows: jax.random.normal(key, (rows, width), jnp.bfloat16).astype(dtype), static_argnums=1
    )
    xs, weight = [normal(key, rows) for key in keys[1:]], normal(keys[0], vocabulary)
    arguments = xs, weight, jnp.linspace(0.5, 1.5, vocabulary) if name == "e4m3" else None

    def lower(function: Callable[..., Any]) -> Any:
        # Without this option XLA would merge all calls into one product, since they share the weight.
        options = {"xla_gpu_dot_merger_threshold_mb": 0}
        program = jax.jit(lambda *a: [function(x, *a[1:]) for x in a[0]], compiler_options=options)
        return program.lower(*arguments)

    programs = timing.compile_all({name: functools.partial(lower, f) for name, f in FUNCTIONS.items()})
    times: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for function in (*FUNCTIONS,) * TURNS:
        times[function].append(timing.seconds(programs[function], arguments, CALLS, budget=0.02))
    (xla_index, xla_value), (index, value) = (program(*arguments)[-1] for program in programs.values())
    row: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "width": width, "dtype": name}
    for function in FUNCTIONS:
        seconds = statistics.median(times[function])
        row |= {f"{function} us": round(seconds * 1e6, 1)}
        row |= {f"{function} TFLOP/s": round(2e-12 * rows * vocabulary * width / seconds)}
    ratios = [xla / kernel for xla, kernel in zip(*times.values(), strict=True)]
    return row | {
        "ratio": round(statistics.median(ratios), 3),
        "same token": round(float((xla_index == index).mean()), 4),
        "error": float(f"{float(jnp.abs(xla_value - value).max() / jnp.abs(xla_value).max()):.1e}"),
        "picked": LARGEST_PRODUCT.choose((xs[0], weight), Device.default()).name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 128, 240, 256, 960, 1024])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--json", default="largest_product.json", help="where the rows go")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.dtypes:
        for count in args.rows:
            rows.append(measure(count, args.vocabulary, args.width, name))
            print(*rows[-1].values(), flush=True)
    timing.save(args.json, rows)
    print(timing.table(rows))


if __name__ == "__main__":
    main()
