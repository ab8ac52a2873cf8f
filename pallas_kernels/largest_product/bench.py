"""``python -m pallas_kernels.largest_product.bench``: microseconds of the argmax of logits, by rows and dtype.

The dtype "copy" compares a bf16 head, one with an 8-bit copy beside it, and drafts from the copy.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.largest_product import (
    LARGEST_PRODUCT,
    approximate_largest,
    largest_product,
    mosaic,
    reference,
    screen_of,
    screened_largest,
)
from pallas_kernels.lib import timing
from pallas_kernels.registry import Device

DTYPES = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn}
Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    "reference": reference.largest_product,
    "mosaic": mosaic.largest_product,
}
CALLS, TURNS = 4, 4


def lowered(function: Function, arguments: tuple[Any, ...]) -> Any:
    """A program that calls a function for each x, one after another."""
    # Without this option XLA would merge all calls into one product, since they share the weight.
    options = {"xla_gpu_dot_merger_threshold_mb": 0}
    program = jax.jit(lambda *a: [function(x, *a[1:]) for x in a[0]], compiler_options=options)
    return program.lower(*arguments)


def in_turns(functions: dict[str, Function], arguments: tuple[Any, ...]) -> dict[str, tuple[list[float], Any]]:
    """Seconds of calls of each function, and its last result; in turns, since a card becomes slower as it warms up."""
    lower: dict[Any, Callable[[], Any]] = {
        name: functools.partial(lowered, function, arguments) for name, function in functions.items()
    }
    programs = timing.compile_all(lower)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name in (*functions,) * TURNS:
        times[name].append(timing.seconds(programs[name], arguments, CALLS, budget=0.02))
    return {name: (times[name], program(*arguments)[-1]) for name, program in programs.items()}


def measure_copy(rows: int, vocabulary: int, width: int) -> dict[str, Any]:
    """Time a bf16 head, the same by way of its 8-bit copy, and the copy alone."""
    keys = jax.random.split(jax.random.key(0), CALLS + 1)
    normal = jax.jit(lambda key, rows: jax.random.normal(key, (rows, width), jnp.bfloat16), static_argnums=1)
    weight = normal(keys[0], vocabulary)
    arguments = [normal(key, rows) for key in keys[1:]], weight, screen_of(weight)
    functions: dict[str, Function] = {
        "head": lambda x, weight, screen: largest_product(x, weight),
        "by the copy": screened_largest,
        "draft": lambda x, weight, screen: approximate_largest(x, screen),
    }
    results = in_turns(functions, arguments)
    row: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "width": width, "dtype": "copy"}
    row |= {f"{name} us": round(statistics.median(times) * 1e6, 1) for name, (times, _) in results.items()}
    tokens = {name: index for name, (_, (index, _)) in results.items()}
    same = {name: round(float((tokens[name] == tokens["head"]).mean()), 4) for name in functions}
    return row | {"same token": same["by the copy"], "same draft": same["draft"]}


def measure(rows: int, vocabulary: int, width: int, name: str) -> dict[str, Any]:
    """Time XLA's product and argmax and the kernel."""
    dtype = DTYPES[name]
    keys = jax.random.split(jax.random.key(0), CALLS + 1)
    normal = jax.jit(
        lambda key, rows: jax.random.normal(key, (rows, width), jnp.bfloat16).astype(dtype), static_argnums=1
    )
    xs, weight = [normal(key, rows) for key in keys[1:]], normal(keys[0], vocabulary)
    arguments = xs, weight, jnp.linspace(0.5, 1.5, vocabulary) if name == "e4m3" else None
    results = in_turns(FUNCTIONS, arguments)
    times = {function: seconds for function, (seconds, _) in results.items()}
    (xla_index, xla_value), (index, value) = (result for _, result in results.values())
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
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=[*DTYPES, "copy"])
    parser.add_argument("--json", default="largest_product.json", help="where the rows go")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.dtypes:
        for count in args.rows:
            size = count, args.vocabulary, args.width
            rows.append(measure_copy(*size) if name == "copy" else measure(*size, name))
            print(*rows[-1].values(), flush=True)
    timing.save(args.json, rows)
    print(timing.table(rows))


if __name__ == "__main__":
    main()
