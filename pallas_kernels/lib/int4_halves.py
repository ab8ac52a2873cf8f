"""Heads in 4 bits inside Triton kernels, by halves: the rotation of keys, and rounding (see ``lib.int4_kv``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.halves import Halves
from pallas_kernels.lib.int4_kv import numbers_of, refitted, scale_and_middle, sums_of


class Packed(NamedTuple):
    """A head as pages keep it.

    Attributes:
        numbers: two a byte, [.., H / 2].
        scale: float16.
        middle: float16.
    """

    numbers: jax.Array
    scale: jax.Array
    middle: jax.Array


def packed(x: Halves, scale: Any, *, is_key: bool) -> Packed:
    """Halves of a head divided by its static scale, rotated if it is a key, and rounded."""
    halves = [half.astype(jnp.float32) / scale for half in x]
    low, high = rotated(halves) if is_key else halves
    step, middle = scale_and_middle(jnp.minimum(low, high).min(-1), jnp.maximum(low, high).max(-1))
    numbers = [numbers_of(half, step, middle) for half in (low, high)]
    sums = [sums_of(half, n, step, middle) for half, n in zip((low, high), numbers, strict=True)]
    step, middle = refitted(step, middle, [(a + b).sum() for a, b in zip(*sums, strict=True)], 2 * low.shape[0])
    return Packed(numbers[0] | (numbers[1] << 4), step, middle)


def rotated(x: Halves) -> Halves:
    """The Hadamard transform of one head in float32, which comes as two halves [H / 2]."""
    left, right = x
    factor = (2 * left.shape[0]) ** -0.5
    return [_transformed(half) * factor for half in (left + right, left - right)]


def _transformed(x: jax.Array) -> jax.Array:
    """The unscaled transform of a vector, as a matrix.

    Sylvester's matrix of n = a * b is the Kronecker product of those of a and b: two small products in place of one
    with n numbers for each element, and none of a butterfly's exchanges between lanes.
    """
    size = x.shape[0]
    inner = 1 << (size.bit_length() - 1) // 2
    outer = size // inner
    grid = x.reshape(outer, inner)
    grid = (grid[:, None, :] * _signs(inner)[None, :, :]).sum(2)
    return (grid[None, :, :] * _signs(outer)[:, :, None]).sum(1).reshape(size)


def _signs(size: int) -> jax.Array:
    """Sylvester's matrix: 1 where an even number of bits is common to row and column, -1 elsewhere; up to 256 rows."""
    common = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0) & jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    for shift in (4, 2, 1):
        common = common ^ (common >> shift)
    return (1 - 2 * (common & 1)).astype(jnp.float32)
