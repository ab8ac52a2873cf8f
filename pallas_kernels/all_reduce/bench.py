"""``python -m pallas_kernels.all_reduce.bench``: microseconds of a sum over all GPUs, also with addition and norm."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels import Peers
from pallas_kernels.lib import timing

CALLS = 288  # four rounds of a model of 36 layers: starting a program on four devices takes the host 0.4 ms
EPS = 1e-6
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("tp")


def program(mesh: Mesh, implementation: Any, *, with_norm: bool) -> Any:
    """``CALLS`` sums, each of which waits for the one before; the additions between them are timed too."""

    def on_each(x: Any, ys: Any, weight: Any, peers: Any) -> Any:
        h = x
        for y in ys[:, 0]:
            part = y + 0.001 * h
            if with_norm:
                x, h = pallas_kernels.all_reduce_add_norm(
                    x, part, weight, EPS, "tp", peers, implementation=implementation
                )
            elif implementation == "none":
                h = part
            else:
                h = pallas_kernels.all_reduce(part, "tp", peers, implementation=implementation)
            x, h = jax.lax.optimization_barrier((x, h))
        return x, h

    specs = (WHOLE, PartitionSpec(None, "tp"), WHOLE, SPLIT)
    return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=WHOLE, check_vma=False))


def measure(mesh: Mesh, peers: Peers, rows: int, width: int) -> list[dict[str, Any]]:
    """Time the kernel and the library, alone and with addition and norm, and the addition between the calls alone."""

    def random(seed: int, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        array = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return jax.device_put(array, NamedSharding(mesh, spec))

    ys = random(0, (CALLS, mesh.size, rows, width), PartitionSpec(None, "tp"))
    arguments = (random(1, (rows, width), WHOLE), ys, random(2, (width,), WHOLE), peers)
    kinds = [(implementation, norm) for norm in (False, True) for implementation in ("library", "mosaic")]
    lowered: dict[Any, Callable[[], Any]] = {
        kind: functools.partial(program(mesh, kind[0], with_norm=kind[1]).lower, *arguments)
        for kind in [("none", False), *kinds]
    }
    results = []
    for (implementation, norm), compiled in timing.compile_all(lowered).items():
        time = timing.seconds(compiled, arguments, CALLS, budget=0.05)
        case = {"devices": mesh.size, "rows": rows, "width": width, "implementation": implementation, "norm": norm}
        results.append(case | {"us": round(time * 1e6, 2)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--widths", nargs="+", type=int, default=[4096])
    parser.add_argument("--json", default="all_reduce.json", help="where the rows go")
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    peers = Peers.of(mesh, 2 * max(args.widths))
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        for width in args.widths:
            for row in measure(mesh, peers, rows, width):
                results.append(row)
                print(*row.values(), flush=True)
    timing.save(args.json, results)
    print(timing.table(results))


if __name__ == "__main__":
    main()
