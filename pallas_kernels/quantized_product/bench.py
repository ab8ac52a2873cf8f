"""``python -m pallas_kernels.quantized_product.bench``: microseconds and bytes a second of products with few bits.

Each product is checked against the reference first. `--sweep` times every configuration of the Triton kernel instead of
the default one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.lib import timing
from pallas_kernels.quantized_product import mosaic, mosaic_plan, reference, triton, wide, wide_plan
from pallas_kernels.quantized_product.samples import BYTES, GROUP, KINDS, SHAPES, operands
from pallas_kernels.quantized_product.triton import Config


def configs(kind: str, tokens: int, inputs: int) -> Iterator[Config]:
    """The configurations to sweep over."""
    block = max(16, min(128, 1 << (tokens - 1).bit_length()))
    splits, depths = (1, 2, 4, 8) if tokens <= 64 else (1,), (64, 128) if kind == "fp8" else (128,)
    for rows, stages, warps, parts, depth in itertools.product((64, 128, 256), (3, 4, 6, 8), (4, 8), splits, depths):
        if inputs // GROUP % parts == 0:
            yield Config(rows, block, stages, warps, parts, depth)


def measure(kind: str, weight_name: str, tokens: int, *, sweep: bool, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of the table, one for each implementation and configuration."""
    shape = SHAPES[weight_name]
    _, *weight = jax.eval_shape(lambda: operands(kind, shape, 1, 0))
    weight_bytes = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(weight))
    calls = max(2, min(16, BYTES // weight_bytes))
    data = [operands(kind, shape, tokens, seed) for seed in range(calls)]
    chosen = triton.default_config(*data[0][:3], may_split=True)
    every: list[tuple[str, Any]] = [("triton", config) for config in configs(kind, tokens, shape[1]) if sweep]
    every = every or [("triton", chosen)]
    of_operands, two_sided = data[0][:3], functools.partial(wide_plan.default_config, is_two_sided=True)
    on_hopper: dict[str, tuple[Any, ...]] = {
        "mosaic": (mosaic.quantized_product, mosaic_plan.refusal, mosaic_plan.default_config),
        "mosaic_wide": (wide.quantized_product, wide.refusal, wide_plan.default_config),
        "mosaic_two_sided": (wide.two_sided_product, wide.two_sided_refusal, two_sided),
    }
    for implementation, (_, refusal, config_of) in on_hopper.items():
        if _compat.compute_capability() == (9, 0) and refusal(*data[0], jnp.bfloat16) is None:
            every.append((implementation, config_of(*of_operands)))
    functions = {"triton": triton.quantized_product} | {name: function for name, (function, *_) in on_hopper.items()}

    def lower(name: str, config: Any) -> Any:
        run = functools.partial(functions[name], dtype=jnp.bfloat16, may_split=True, config=config)
        return jax.jit(lambda data: [run(*one) for one in data]).lower(data)

    programs = timing.compile_all({pair: functools.partial(lower, *pair) for pair in every})
    wanted = jax.jit(functools.partial(reference.quantized_product, dtype=jnp.float32))(*data[-1])
    rows = []
    for (implementation, config), program in programs.items():
        try:
            found = program(data)[-1].astype(jnp.float32)
            seconds = timing.seconds(program, (data,), calls, budget=0.02)
        except (RuntimeError, ValueError, TypeError) as refused:  # a configuration that this card cannot hold
            print(
                f"{kind} {weight_name} {tokens} {implementation} {config}: {str(refused).splitlines()[0][:120]}",
                flush=True,
            )
            continue
        found = found.sum(0) if found.ndim == 3 else found
        error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
        rows.append(
            {
                "kind": kind,
                "weight": f"{weight_name} {list(shape)}",
                "tokens": tokens,
                "us": round(seconds * 1e6, 1),
                "GB/s": round(weight_bytes / seconds / 1e9),
                "of copy": round(weight_bytes / seconds / bandwidth, 2),
                "TFLOP/s": round(2e-12 * tokens * shape[0] * shape[1] / seconds),
                "error": float(f"{error:.1e}"),
                "implementation": implementation,
                "config": list(dataclasses.astuple(config)),
                "default": implementation != "triton" or config == chosen,
            }
        )
    return sorted(rows, key=lambda row: row["us"])


def plain(name: str, tokens: int) -> dict[str, Any]:
    """XLA's product with the weight in bfloat16, to compare with."""
    outputs, inputs = shape = SHAPES[name]
    calls = max(2, min(16, BYTES // (2 * outputs * inputs)))
    keys = jax.random.split(jax.random.key(0), 2 * calls)
    xs = [jax.random.normal(key, (tokens, inputs), jnp.bfloat16) for key in keys[:calls]]
    weights = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[calls:]]
    dimensions = (((1,), (1,)), ((), ()))
    run: Callable[..., Any] = jax.jit(
        lambda xs, ws: [jax.lax.dot_general(x, w, dimensions) for x, w in zip(xs, ws, strict=True)]
    )
    return {"weight": name, "tokens": tokens, "us": round(timing.seconds(run, (xs, weights), calls, 0.02) * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--sweep", action="store_true", help="time every configuration, and print the fastest five")
    parser.add_argument("--plain", action="store_true", help="time XLA's product in bfloat16, too")
    parser.add_argument("--json", default="quantized_product.json", help="where the rows go")
    args = parser.parse_args()
    bandwidth, every = timing.copy_bandwidth(), []
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    for name, tokens in itertools.product(args.shapes, args.tokens):
        if args.plain:
            print("bf16", *plain(name, tokens).values(), flush=True)
        for kind in args.kinds:
            rows = measure(kind, name, tokens, sweep=args.sweep, bandwidth=bandwidth)
            every += rows
            kept = [row for i, row in enumerate(rows) if i < 5 or row["default"]]
            print("\n".join(" ".join(map(str, row.values())) for row in kept), flush=True)
    timing.save(args.json, every, copy_gb_s=round(bandwidth / 1e9))


if __name__ == "__main__":
    main()
