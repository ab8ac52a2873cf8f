"""Heads in Triton kernels, each as its two halves: RoPE pairs element h of a head with element h + H / 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _compat
from pallas_kernels.rotary import Rotary

Halves = list[jax.Array]


def half_rows(ref: Any, *index: Any) -> list[Any]:
    """References to the left and the right halves of rows, given scalars and vectors of their places."""
    half = ref.shape[-1] // 2
    *rows, column = _compat.row_index(*index, half)
    return [ref.at[*rows, column + start] for start in (0, half)]


def scaled(
    heads: Halves, rotary: Rotary | None, of_tokens: Callable[[Any], jax.Array], of_columns: Callable[[Any], Halves]
) -> Halves:
    """Heads times the scales that ``rotary`` has of their tokens and columns, if any; the functions load these."""
    if rotary is None or rotary.scales is None:
        return heads
    tokens, columns = of_tokens(rotary.scales[0]), of_columns(rotary.scales[1])
    return [(x.astype(jnp.float32) * (tokens * y)).astype(x.dtype) for x, y in zip(heads, columns, strict=True)]


def quantised(x: Halves, scale: Any, dtype: Any) -> Halves:
    """Halves as a pool of that dtype stores them; numbers too large for it as its largest."""
    limit = _compat.max_finite(dtype)
    return [jnp.clip(half.astype(jnp.float32) / scale, -limit, limit).astype(dtype) for half in x]


def positioned(x: Halves, norm: Any, eps: float, angles: tuple[jax.Array, jax.Array]) -> Halves:
    """Halves of heads [.., H / 2] after norm, if they have one, and RoPE, rounded where ``split_heads`` rounds.

    ``norm`` is a reference to its weights [H], ``angles`` are cosines and sines for the halves.
    """
    dtype = x[0].dtype
    left, right = (y.astype(jnp.float32) for y in x)
    if norm is not None:
        half = left.shape[-1]
        squares = jnp.sum(left * left + right * right, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(squares / (2 * half) + eps)

        def normed(y: jax.Array, start: int) -> jax.Array:
            weight = norm[pl.ds(start, half)]
            weighted = weight.astype(jnp.float32) * (y * scale).astype(dtype).astype(jnp.float32)
            return weighted.astype(jnp.promote_types(weight.dtype, dtype)).astype(jnp.float32)

        left, right = normed(left, 0), normed(right, half)
    cos, sin = angles
    return [(left * cos - right * sin).astype(dtype), (right * cos + left * sin).astype(dtype)]
