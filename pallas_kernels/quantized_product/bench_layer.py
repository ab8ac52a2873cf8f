"""``python -m pallas_kernels.quantized_product.bench_layer``: products with few bits and what goes on with them.

Microseconds of each kernel by a profiler: of the input projection with the product of gates, in one kernel and apart,
of the output projection and down with addition and norm, which sums their parts, of gate and up with their activation.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import add_norm, quantized_product_beside, quantized_swiglu, split_quantized_product
from pallas_kernels.lib import timing
from pallas_kernels.quantized_product.layout import FewBits
from pallas_kernels.quantized_product.samples import BYTES, KINDS, SHAPES, operands

GATES = 96  # rows of their weight in Qwen3.6-27B


class Call(NamedTuple):
    """Operands of a layer: tokens [T, I], weights [O, I] and [96, I], a residual stream [T, O] and a norm [O]."""

    x: Array
    weight: FewBits
    gates: Array
    residual: Array
    norm: Array


def call_of(kind: str, shape: tuple[int, int], tokens: int, seed: int) -> Call:
    """Random operands."""
    x, *weight = operands(kind, shape, tokens, seed)
    keys = jax.random.split(jax.random.key(seed), 3)
    others = (GATES, shape[1]), (tokens, shape[0]), (shape[0],)
    arrays = (jax.random.normal(key, other, jnp.bfloat16) for key, other in zip(keys, others, strict=True))
    return Call(x, FewBits(*weight), *arrays)


def in_proj(call: Call, *, implementation: Literal["apart"] | None = None) -> Any:
    """The input projection of Gated DeltaNet, and its gates."""
    return quantized_product_beside(call.x, *call.weight, call.gates, implementation=implementation)


def added(call: Call) -> Any:
    """A product, its sum with the residual stream, and the norm of that."""
    return add_norm(call.residual, split_quantized_product(call.x, *call.weight), call.norm, 1e-6)


def gate_up(call: Call) -> Any:
    """Hidden units of an MLP."""
    parts: Any = (part if part is None else part.reshape(1, 2, -1, part.shape[-1]) for part in call.weight)
    return quantized_swiglu(call.x, *parts)


CASES: dict[str, tuple[str, Callable[[Call], Any]]] = {
    "in_proj": ("in_proj", in_proj),
    "in_proj, apart": ("in_proj", functools.partial(in_proj, implementation="apart")),
    "out": ("out", added),
    "down": ("down", added),
    "gate_up": ("gate_up", gate_up),
}


def measure(kind: str, name: str, tokens: int) -> dict[str, Any]:
    """A row of the table: microseconds of each kernel of a case."""
    weight_name, step = CASES[name]
    one = functools.partial(call_of, kind, SHAPES[weight_name], tokens)
    size = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(jax.eval_shape(lambda: one(0).weight)))
    calls = [one(seed) for seed in range(max(2, min(16, BYTES // size)))]

    def run(calls: list[Call]) -> list[Any]:
        results: list[Any] = []
        for call in calls:  # one after another: what a barrier gives depends on all that it takes
            ready, results = jax.lax.optimization_barrier((call, results))
            results = [*results, step(ready)]
        return results

    times = timing.kernel_times(jax.jit(run), (calls,))
    return {"kind": kind, "case": name, "tokens": tokens, "kernels": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--json", default="quantized_layer.json", help="where the rows go")
    args = parser.parse_args()
    rows = []
    for name, kind, tokens in itertools.product(args.cases, args.kinds, args.tokens):
        rows.append(measure(kind, name, tokens))
        print(*rows[-1].values(), flush=True)
    timing.save(args.json, rows)


if __name__ == "__main__":
    main()
