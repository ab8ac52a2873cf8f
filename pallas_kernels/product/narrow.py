"""The product with a weight of few rows, in parts, on Pallas' Triton backend: a router's, or one of a few gates.

A program for each few rows, along all inputs, would keep a router's 256 rows on 16 multiprocessors of 132, in a loop
of copies that wait for memory one after another. Here a program multiplies 16 rows by 256 inputs in one step, and
leaves the sum over the inputs to whoever reads the product. Parts do not depend on the number of tokens.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of

ROWS, DEPTH = 16, 256  # of the weight, of a program
FEWEST, MOST = 16, 64  # tokens of a program
MOST_ROWS, MOST_TOKENS = 256, 64  # the largest that were measured faster than XLA's product (BENCH.md)


def slower(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why another product is measured faster, or None."""
    tokens = tokens_of(x)
    if tokens == 1 and dtype != jnp.float32:
        return "A single row is XLA's, in one kernel; only its float32 products take three."
    if not 0 < tokens <= MOST_TOKENS:
        return f"It was measured faster for 1 to {MOST_TOKENS} tokens; these are {tokens}."
    if len(weight) > MOST_ROWS:
        return f"It was measured faster for weights of up to {MOST_ROWS} rows; these are {len(weight)}."
    return None


def refusal(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why this product cannot do the call, or None."""
    del dtype
    rows, width = weight.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The narrow product takes bf16 and f16; this is {x.dtype}."
    if width % DEPTH or rows % ROWS:
        return (
            f"The narrow product needs a width that {DEPTH} divides, and rows that {ROWS} divides; these are {width} "
            f"and {rows}."
        )
    return None


def product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None, *, interpret: bool = False
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``."""
    return parts(x, weight, interpret=interpret).sum(axis=0).astype(dtype or x.dtype)


def parts(x: Float[Array, "*T D"], weight: Float[Array, "O D"], *, interpret: bool = False) -> Float[Array, "S *T O"]:
    """The product in parts, float32: of 256 inputs each."""
    if reason := refusal(x, weight, None):
        raise NotImplementedError(reason)
    (rows, width), tokens = weight.shape, tokens_of(x)
    splits = width // DEPTH
    if tokens == 0:
        return jnp.zeros((splits, *x.shape[:-1], rows), jnp.float32)
    tile = min(MOST, max(FEWEST, pl.next_power_of_2(tokens)))
    x_rows, weight = _compat.vary_alike(x.reshape(tokens, width), weight)
    [out] = _compat.triton_call(
        _narrow,
        grid=(rows // ROWS, splits, pl.cdiv(tokens, tile)),
        out_shape=[_compat.out_like((splits, tokens, rows), jnp.float32, x_rows)],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="narrow_product",
    )(x_rows, weight)
    return out.reshape(splits, *x.shape[:-1], rows)


def _narrow(x: Any, weight: Any, out: Any) -> None:
    """One program: some outputs of some tokens, over some inputs."""
    tokens, tile = x.shape[0], min(MOST, max(FEWEST, pl.next_power_of_2(x.shape[0])))
    row, split, block = (pl.program_id(axis) for axis in range(3))
    output = row * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    column = (split * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32))[None, :]
    token = block * tile + jnp.arange(tile, dtype=jnp.int32)
    exists = token < tokens
    inputs = pltriton.load(x.at[token[:, None], column], mask=exists[:, None], other=0.0).T
    sums = pltriton.dot(pltriton.load(weight.at[output[:, None], column]), inputs)
    mask = jnp.broadcast_to(exists[None, :], sums.shape)
    pltriton.store(out.at[jnp.full_like(token, split)[None, :], token[None, :], output[:, None]], sums, mask=mask)
