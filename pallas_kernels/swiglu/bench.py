"""``python -m pallas_kernels.swiglu.bench``: microseconds of the first half of an MLP, by model and tokens."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lib import timing
from pallas_kernels.registry import Device
from pallas_kernels.swiglu import SWIGLU, mosaic, reference, triton, weight_first

MODELS = {  # D, F
    "qwen3-0.6b": (1024, 3072),
    "qwen3-1.7b": (2048, 6144),
    "qwen3-4b": (2560, 9728),
    "qwen3-8b": (4096, 12288),
    "qwen3-14b": (5120, 17408),
    "qwen3-32b": (5120, 25600),
}
PARTS = 16
BYTES = 3 << 29  # of different weights in a program: many times the size of L2
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.swiglu,
    "mosaic": mosaic.swiglu,
    "weight_first": weight_first.swiglu,
    "triton": triton.swiglu,
}
TURNS = 4


def operands(model: str, tokens: int, calls: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Random tokens and weights, different ones for each call; products have a deviation of 1."""
    D, F = MODELS[model]

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(deviation)

    keys = jax.random.split(jax.random.key(0), 2 * calls)
    xs = [normal(key, (tokens, D), 1) for key in keys[:calls]]
    return xs, [normal(key, (PARTS, 2, F // PARTS, D), D**-0.5) for key in keys[calls:]]


def error(out: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    """Relative error of the last tokens, norm over norm, against float32."""
    last = x[-64:].astype(jnp.float32)
    wanted = reference.swiglu(last, weight.astype(jnp.float32))
    difference = jnp.linalg.norm(out[-64:].astype(jnp.float32) - wanted)
    return float(difference / jnp.linalg.norm(wanted))


def measure(model: str, tokens: int) -> dict[str, Any]:
    """Time all implementations in turns, since they become slower as the card warms up; None where one refuses."""
    D, F = MODELS[model]
    calls = max(2, min(12, BYTES // (4 * D * F), (1 << 30) // (2 * tokens * F)))
    xs, weights = operands(model, tokens, calls)

    def lower(function: Callable[..., Any]) -> Any:
        program = jax.jit(lambda xs, weights: [function(*pair) for pair in zip(xs, weights, strict=True)])
        return program.lower(xs, weights)

    compiled = timing.compile_all({name: functools.partial(lower, f) for name, f in FUNCTIONS.items()})
    programs = {name: program for name, program in compiled.items() if not isinstance(program, str)}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for name in (*programs,) * TURNS:
        times[name].append(timing.seconds(programs[name], (xs, weights), calls, budget=0.02))
    results: dict[str, Any] = {}
    for name in FUNCTIONS:
        us = error_of = ratio = None
        if name in programs:
            us = round(statistics.median(times[name]) * 1e6, 1)
            error_of = float(f"{error(programs[name](xs, weights)[-1], xs[-1], weights[-1]):.1e}")
            pairs = zip(times["reference"], times[name], strict=True)
            ratio = round(statistics.median(xla / kernel for xla, kernel in pairs), 3)
        results |= {f"{name} us": us, f"{name} error": error_of, f"{name} ratio": ratio}
    picked = SWIGLU.choose((xs[0], weights[0]), Device.default()).name
    return {"model": model, "tokens": tokens} | results | {"picked": picked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 512, 1024, 8192])
    parser.add_argument("--json", default="swiglu.json", help="where the rows go")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for tokens in args.tokens:
            rows.append(measure(model, tokens))
            print(*rows[-1].values(), flush=True)
    timing.save(args.json, rows)
    print(timing.table(rows))


if __name__ == "__main__":
    main()
