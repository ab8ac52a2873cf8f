"""Heads in Triton kernels, each as its two halves: RoPE pairs element h of a head with element h + H / 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _compat
from pallas_kernels.lib.norm import weighted
from pallas_kernels.lib.rotary import Rotary

Halves = list[jax.Array]


def half_rows(ref: Any, *index: Any) -> list[Any]:
    """References to the left and the right halves of rows, given scalar and vector indices of the rows."""
    half = ref.shape[-1] // 2
    *rows, column = _compat.row_index(*index, half)
    return [ref.at[*rows, column + start] for start in (0, half)]


def scaled(
    heads: Halves, rotary: Rotary | None, of_tokens: Callable[[Any], jax.Array], of_columns: Callable[[Any], Halves]
) -> Halves:
    """Heads times the scales of their tokens and columns, if ``rotary`` has any.

    Args:
        heads: halves of heads.
        rotary: of references.
        of_tokens: loads the scales of the tokens from a reference.
        of_columns: loads halves of the scales of the columns from a reference.
    """
    if rotary is None or rotary.scales is None:
        return heads
    tokens, columns = of_tokens(rotary.scales[0]), of_columns(rotary.scales[1])
    return [(x.astype(jnp.float32) * (tokens * y)).astype(x.dtype) for x, y in zip(heads, columns, strict=True)]


def quantised(x: Halves, scale: Any, dtype: Any) -> Halves:
    """Halves divided by their scale, in the dtype of a pool; numbers too large for it become its largest."""
    limit = _compat.max_finite(dtype)
    return [jnp.clip(half.astype(jnp.float32) / scale, -limit, limit).astype(dtype) for half in x]


def positioned(x: Halves, norm: Any, eps: float, angles: tuple[jax.Array, jax.Array]) -> Halves:
    """Halves of heads after RMS norm and RoPE, rounded where ``split_heads`` rounds.

    Args:
        x: halves [.., H / 2].
        norm: reference to the weights [H] of the norm; None norms nothing.
        eps: of the norm.
        angles: cosines and sines, [.., H / 2] each.
    """
    dtype = x[0].dtype
    left, right = (y.astype(jnp.float32) for y in x)
    if norm is not None:
        half = left.shape[-1]
        squares = jnp.sum(left * left + right * right, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(squares / (2 * half) + eps)

        def normed(y: jax.Array, start: int) -> jax.Array:
            return weighted(y * scale, norm[pl.ds(start, half)], dtype).astype(jnp.float32)

        left, right = normed(left, 0), normed(right, half)
    cos, sin = angles
    return [(left * cos - right * sin).astype(dtype), (right * cos + left * sin).astype(dtype)]
