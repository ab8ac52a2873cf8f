"""Products of few tokens, on Pallas' Triton backend, for kernels that go on with them: the weight streams through once.

A program multiplies some rows of the weight by all tokens, along all inputs: nothing is split, so nothing has to be
summed up behind it. Rows of the weight are the first operand, tokens the second, which has to be no wider than 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

MOST_TOKENS = 16
LEAST_BYTES = 1 << 25  # of a weight: smaller ones were not measured


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of the weight that a program takes (of each of its parts), inputs of a step, warps, steps in flight."""

    rows: int
    depth: int
    num_stages: int
    num_warps: int = 4


def tokens_of(x: Any) -> int:
    """How many rows there are."""
    return x.size // x.shape[-1] if x.shape[-1] else 0


def is_fastest(x: Any, weight: Any) -> bool:
    """Whether such products are faster here than XLA's, by the measurements in product/BENCH.md."""
    return 0 < tokens_of(x) <= MOST_TOKENS and is_large(weight)


def is_large(weight: Any) -> bool:
    """Whether it is as large as those that were measured."""
    least = LEAST_BYTES // 2 if weight.dtype == jnp.float8_e4m3fn else LEAST_BYTES
    return bool(weight.size * weight.dtype.itemsize >= least)


def refusal(x: Any, width: int, rows: int, config: Config) -> str | None:
    """Why a product of so many inputs with so many rows cannot be made so, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Triton product takes bf16 and f16; this is {x.dtype}."
    if tokens_of(x) > MOST_TOKENS:
        return f"The Triton product is for up to {MOST_TOKENS} tokens; these are {tokens_of(x)}."
    if width % config.depth or rows % config.rows:
        return (
            f"The Triton product needs a width that {config.depth} divides, and rows that {config.rows} divides; "
            f"these are {width} and {rows}."
        )
    return None


def products(x: Any, weight: Any, rows: Sequence[jax.Array], depth: int) -> list[jax.Array]:
    """Of each of some rows of the weight with each token, float32 [row, token], inside a kernel."""
    token, real = tokens(x)

    def step(k: Any, sums: Any) -> Any:
        column = (k * depth + jnp.arange(depth, dtype=jnp.int32))[None, :]
        given = pltriton.load(x.at[token[:, None], column], mask=real[:, None], other=0.0).T
        tiles = [pltriton.load(weight.at[row[:, None], column]) for row in rows]
        return [total + pltriton.dot(tile, given) for total, tile in zip(sums, tiles, strict=True)]

    zeros = [jnp.zeros((len(row), MOST_TOKENS), jnp.float32) for row in rows]
    found: list[jax.Array] = lax.fori_loop(0, x.shape[1] // depth, step, zeros)
    return found


def store(found: jax.Array, out: Any, column: jax.Array) -> None:
    """Write what is [column, token]."""
    token, real = tokens(out)
    place = out.at[token[None, :], column[:, None]]
    pltriton.store(place, found.astype(out.dtype), mask=jnp.broadcast_to(real[None, :], found.shape))


def tokens(x: Any) -> tuple[jax.Array, jax.Array]:
    """Rows of x, as many as an operand has, and which of them there are."""
    token = jnp.arange(MOST_TOKENS, dtype=jnp.int32)
    return token, token < x.shape[0]
