"""Products of few tokens on Pallas' Triton backend, as a piece of kernels that go on with them.

A program multiplies some rows of the weight by all tokens, along all inputs: nothing is split, so the weight streams
through once and nothing has to be summed up afterwards. Rows of the weight are the first operand of the MMA, tokens the
second, which is 16 wide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, tokens_of, too_small


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        rows: of the weight that a program takes (of each of its parts).
        depth: inputs of a step.
        num_stages: steps in flight.
        num_warps: of a program.
    """

    rows: int
    depth: int
    num_stages: int
    num_warps: int = 4


def slower(x: Any, weight: Any) -> str | None:
    """Why XLA's product is measured faster than these (product/BENCH.md), or None."""
    tokens = tokens_of(x)
    if not 0 < tokens <= MAX_STREAM_TOKENS:
        return f"It was measured faster for 1 to {MAX_STREAM_TOKENS} tokens; these are {tokens}."
    if x.dtype == jnp.float8_e4m3fn:
        return "It is for 16-bit weights: over fp8 it was slower than XLA's product in rounds (product/BENCH.md)."
    return too_small(weight)


def refusal(x: Any, width: int, rows: int, config: Config) -> str | None:
    """Why these kernels cannot multiply x by a weight [rows, width], or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Triton product takes bf16 and f16; this is {x.dtype}."
    if tokens_of(x) > MAX_STREAM_TOKENS:
        return f"The Triton product is for up to {MAX_STREAM_TOKENS} tokens; these are {tokens_of(x)}."
    if width % config.depth or rows % config.rows:
        return (
            f"The Triton product needs a width that {config.depth} divides, and rows that {config.rows} divides; "
            f"these are {width} and {rows}."
        )
    return None


def products(
    x: Any, weight: Any, rows: Sequence[jax.Array], depth: int, part: tuple[Any, int] = (0, 1)
) -> list[jax.Array]:
    """Inside a kernel: the product of each set of rows of the weight with all tokens, float32 [row, token].

    Args:
        x: reference to the tokens [T, D].
        weight: reference to the weight [O, D].
        rows: numbers of rows of the weight, one array for each product.
        depth: inputs of a step.
        part: which of how many parts of the inputs.
    """
    token, exists = tokens(x)

    def step(k: Any, sums: Any) -> Any:
        column = (k * depth + jnp.arange(depth, dtype=jnp.int32))[None, :]
        inputs = pltriton.load(x.at[token[:, None], column], mask=exists[:, None], other=0.0).T
        tiles = [pltriton.load(weight.at[row[:, None], column]) for row in rows]
        return [total + pltriton.dot(tile, inputs) for total, tile in zip(sums, tiles, strict=True)]

    zeros = [jnp.zeros((len(row), MAX_STREAM_TOKENS), jnp.float32) for row in rows]
    number, parts = part
    steps = x.shape[1] // depth // parts
    first = number * steps
    sums: list[jax.Array] = lax.fori_loop(first, first + steps, step, zeros)
    return sums


def store(values: jax.Array, out: Any, column: jax.Array, part: Any = None) -> None:
    """Write values [column, token] to ``out`` [token, column], or to one of its parts [part, token, column]."""
    token = jnp.arange(MAX_STREAM_TOKENS, dtype=jnp.int32)
    exists = token < out.shape[-2]
    leading = () if part is None else (jnp.full_like(token, part)[None, :],)
    target = out.at[(*leading, token[None, :], column[:, None])]
    pltriton.store(target, values.astype(out.dtype), mask=jnp.broadcast_to(exists[None, :], values.shape))


def tokens(x: Any) -> tuple[jax.Array, jax.Array]:
    """Numbers of the tokens of an MMA operand, and which of them x has."""
    token = jnp.arange(MAX_STREAM_TOKENS, dtype=jnp.int32)
    return token, token < x.shape[0]
