"""Activations in bfloat16 as sums of two numbers in e4m3, which tensor cores multiply by weights in e4m3 as they are.

A bfloat16 has 8 significant bits and an e4m3 has 4: the first piece is the number rounded, the second the rest. Of 128
inputs, which share a scale that is a power of 2, numbers down to a 512th of the largest are their pieces' exact sum,
and the others are off by at most 2**-17 of it, where their own format rounds the largest to 2**-9.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.quantized_product.layout import LONGEST

E4M3 = jnp.float8_e4m3fn
_MOST_GROUPS = 8  # of a program
_EXPONENT = 23  # bits below it in float32
_BIAS = 127
_LARGEST = 7  # exponent of a group's largest number, scaled: it is less than 256, and an e4m3 at most 448


def split(x: Float[Array, "T I"], tokens: int, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """Both pieces of activations [tokens, I], and what those of a group are multiplied by, [I / 128, tokens] float32.

    NaN and infinity make their group's factor NaN. Rows behind those of x are zeros.
    """
    groups = x.shape[1] // LONGEST
    at_once = math.gcd(groups, _MOST_GROUPS)
    [x] = _compat.vary_alike(x)
    shapes = [((tokens, x.shape[1]), E4M3), ((tokens, x.shape[1]), E4M3), ((groups, tokens), jnp.float32)]
    first, second, factors = _compat.triton_call(
        functools.partial(_split, at_once=at_once),
        grid=(tokens, groups // at_once),
        out_shape=[_compat.out_like(shape, dtype, x) for shape, dtype in shapes],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="split_in_pieces",
    )(x)
    return first, second, factors


def _split(x: Any, first: Any, second: Any, factors: Any, *, at_once: int) -> None:
    """One program: some groups of a token."""
    token, start = pl.program_id(0), pl.program_id(1) * at_once
    group = start + jnp.arange(at_once, dtype=jnp.int32)
    column = group[:, None] * LONGEST + jnp.arange(LONGEST, dtype=jnp.int32)[None, :]
    row = jnp.full_like(column, token)
    numbers = pltriton.load(x.at[row, column], mask=row < x.shape[0], other=0.0).astype(jnp.float32)
    sizes = lax.bitcast_convert_type(numbers, jnp.int32) & 0x7FFFFFFF  # NaN is above infinity
    exponent = jnp.maximum(jnp.max(sizes, axis=1) >> _EXPONENT, _LARGEST + 1)
    scale = lax.bitcast_convert_type((2 * _BIAS + _LARGEST - exponent) << _EXPONENT, jnp.float32)
    factor = lax.bitcast_convert_type((exponent - _LARGEST) << _EXPONENT, jnp.float32)
    factor = jnp.where(exponent == 2 * _BIAS + 1, jnp.nan, factor)
    scaled = numbers * scale[:, None]
    rounded = scaled.astype(E4M3)
    pltriton.store(first.at[row, column], rounded)
    pltriton.store(second.at[row, column], (scaled - rounded.astype(jnp.float32)).astype(E4M3))
    pltriton.store(factors.at[group, jnp.full_like(group, token)], factor)
