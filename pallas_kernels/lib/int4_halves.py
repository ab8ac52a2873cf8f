"""Heads in 4 bits inside Triton kernels, by halves: the rotation of keys, and rounding (see ``lib.int4_kv``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.lib.halves import Halves
from pallas_kernels.lib.int4_kv import (
    BLOCK,
    KeyRounding,
    nearest,
    numbers_of,
    refitted,
    scale_and_middle,
    sums_of,
    units_of,
)


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


def packed(x: Halves, scale: Any, *, is_key: bool, rounding: KeyRounding | None = None, head: Any = ()) -> Packed:
    """Halves of a head divided by its static scale, rotated if it is a key, and rounded.

    Args:
        x: the halves.
        scale: what they are divided by.
        is_key: whether they are a key's.
        rounding: of keys, references.
        head: index of the head in these.
    """
    halves, half_size = [half.astype(jnp.float32) for half in x], x[0].shape[0]
    if rounding is not None:
        offsets = (rounding.offset[*head, pl.ds(start, half_size)] for start in (0, half_size))
        halves = [half - offset for half, offset in zip(halves, offsets, strict=True)]
    halves = [half / scale for half in halves]
    low, high = rotated(halves) if is_key else halves
    step, middle = scale_and_middle(jnp.minimum(low, high).min(-1), jnp.maximum(low, high).max(-1))
    units = [units_of(half, step, middle) for half in (low, high)]
    numbers = [numbers_of(u) for u in units] if rounding is None else _fed_back(units, rounding.feedback, head)
    sums = [sums_of(u, n) for u, n in zip(units, numbers, strict=True)]
    step, middle = refitted(step, middle, [(a + b).sum() for a, b in zip(*sums, strict=True)], 2 * half_size)
    return Packed((numbers[0] | (numbers[1] << 4)).astype(jnp.uint8), step, middle)


def _fed_back(units: Halves, feedback: Any, head: Any) -> Halves:
    """The numbers of a head's halves, rounded from the last element to the first as in ``lib.int4_kv``."""
    size = units[0].shape[0]
    index, zeros = jnp.arange(size, dtype=jnp.int32), jnp.zeros((size,), jnp.int32)

    def over_half(half: int, fed: Halves) -> tuple[jax.Array, Halves]:
        """Round one half; errors are fed back to it and to the halves before it."""

        def step(i: Any, state: tuple[jax.Array, Halves]) -> tuple[jax.Array, Halves]:
            numbers, fed = state
            start = size - BLOCK * (i + 1)
            rounded, errors = nearest(units[half], fed[half])
            for j in range(BLOCK):
                error = jnp.where(index == start + j, errors, 0).sum()
                row = half * size + start + j
                weights = [feedback[*head, row, pl.ds(k * size, size)].astype(jnp.int32) for k in range(half + 1)]
                fed = [old + error * weight for old, weight in zip(fed, weights, strict=True)]
            return jnp.where((index >= start) & (index < start + BLOCK), rounded, numbers), fed

        state: tuple[jax.Array, Halves] = jax.lax.fori_loop(0, size // BLOCK, step, (zeros, fed))
        return state

    high, fed = over_half(1, [zeros, zeros])
    low, _ = over_half(0, fed[:1])
    return [low, high]


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
