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


def scaled(heads: Halves, rotary: Rotary | None, of_tokens: Any, load: Callable[[Any], Halves]) -> Halves:
    """Heads times the scales of their tokens (a function that reads these) and of their columns, which ``load`` reads.

    Without such scales they are left as they are, and neither is asked.
    """
    if rotary is None or rotary.scales is None:
        return heads
    tokens, columns = of_tokens(rotary.scales[0]), load(rotary.scales[1])
    return [(x.astype(jnp.float32) * (tokens * y)).astype(x.dtype) for x, y in zip(heads, columns, strict=True)]


def quantised(x: Halves, scale: Any, dtype: Any) -> Halves:
    """Halves as a pool of that dtype stores them; numbers too large for it as its largest."""
    limit = _compat.max_finite(dtype)
    return [jnp.clip(half.astype(jnp.float32) / scale, -limit, limit).astype(dtype) for half in x]


def positioned(
    x: Halves,
    weights: Halves | None,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    spread: Callable[[jax.Array], jax.Array] = lambda of_heads: of_heads[..., None],
) -> Halves:
    """Halves of heads [.., H / 2] after norm, if they have one, and RoPE, rounded where ``split_heads`` rounds.

    Args:
      x: the halves.
      weights: halves of the norm's, for every element of x; None norms nothing.
      eps: of the norm.
      angles: cosines and sines, for every element of a half.
      spread: from a number of each head to one of each element.
    """
    dtype = x[0].dtype
    left, right = (y.astype(jnp.float32) for y in x)
    if weights is not None:
        scale = spread(jax.lax.rsqrt((left * left + right * right).sum(axis=-1) / (2 * left.shape[-1]) + eps))

        def normed(y: jax.Array, weight: jax.Array) -> jax.Array:
            weighted = weight.astype(jnp.float32) * (y * scale).astype(dtype).astype(jnp.float32)
            return weighted.astype(jnp.promote_types(weight.dtype, dtype)).astype(jnp.float32)

        left, right = (normed(y, weight) for y, weight in zip((left, right), weights, strict=True))
    cos, sin = angles
    return [(left * cos - right * sin).astype(dtype), (right * cos + left * sin).astype(dtype)]


def halves_of(norm: Any) -> Halves | None:
    """Of the weights that a reference [H] holds."""
    if norm is None:
        return None
    half = norm.shape[0] // 2
    return [norm[pl.ds(start, half)] for start in (0, half)]
