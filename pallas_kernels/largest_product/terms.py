"""Tokens in two terms of 8 bits, on Pallas' Triton backend, for products with a head's 8-bit copy (``screen``)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int8

from pallas_kernels import _compat
from pallas_kernels.largest_product.screen import NORM, REST, SCALE, TINY, length

TERM = 1 << 7  # of a token's numbers m = TERM first + second
MOST = 127 * TERM  # the largest of them
ROWS = 64  # of a wgmma


class Terms(NamedTuple):
    """Tokens in two terms of 8 bits.

    Attributes:
        values: first and second terms; tokens are padded to a multiple of 8.
        factors: of each token its scale r, a bound of |d| and |x|; there are at least 64, those of no token garbage.
    """

    values: Int8[Array, "2 R D"]
    factors: Float[Array, "3 R"]


@functools.partial(jax.jit, static_argnames="interpret")
def terms_of(x: Float[Array, "T D"], *, interpret: bool = False) -> Terms:
    """Split tokens into terms, one program a token."""
    T, D = x.shape
    padded = -(-T // 8) * 8
    (x,) = _compat.vary_alike(x)
    shapes: list[tuple[tuple[int, ...], Any]] = [((2, padded, D), jnp.int8), ((3, max(padded, ROWS)), jnp.float32)]
    values, factors = _compat.triton_call(
        functools.partial(_split, width=pl.next_power_of_2(D)),
        grid=(padded,),
        out_shape=[_compat.out_like(shape, dtype, x) for shape, dtype in shapes],
        num_warps=8,
        num_stages=1,
        interpret=interpret,
        name="largest_product_terms",
    )(x)
    return Terms(values, factors)


def _split(x: Any, values: Any, factors: Any, *, width: int) -> None:
    """One program: a token's terms and factors; zeros behind the last token."""
    (T, D), t = x.shape, pl.program_id(0)
    column = jnp.arange(width, dtype=jnp.int32)
    at, inside = jnp.zeros_like(column) + t, column < D
    row = pltriton.load(x.at[at, column], mask=inside & (at < T), other=0.0).astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(row)), TINY)
    scale = largest / MOST
    ratio = row / scale
    number = (ratio + jnp.where(ratio < 0, -0.5, 0.5)).astype(jnp.int32)
    first = (number + TERM // 2) >> 7  # rounds down
    for term, part in enumerate((first, number - TERM * first)):
        pltriton.store(values.at[jnp.zeros_like(column) + term, at, column], part.astype(jnp.int8), mask=inside)
    rest = row - number.astype(jnp.float32) * scale
    for place, factor in {SCALE: scale, REST: length(rest, largest), NORM: length(row, largest)}.items():
        factors[place, t] = factor
