"""What caches that keep whole sequences as dense arrays have in common, in training and in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lib.rotary import Rotary, pairs_of


def write_each(
    cache: Any,
    heads: Sequence[Float[Array, "B T K _ H"]],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    positions: Int[Array, "B T"],
) -> Any:
    """`write_context` for a cache that keeps every layer by itself: `write` each layer, and return the cache."""
    for layer, ((array, row), k_norm) in enumerate(zip(pairs_of(heads), k_norms, strict=True)):
        heads_of_layer = array[..., row : row + 2, :]
        _, cache = cache.write(layer, heads_of_layer, replace(rotary, k_norm=k_norm), positions)
    return cache


def attention(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    seen: Bool[Array, "#B T S"],
) -> Float[Array, "B T N H"]:
    """Attention over the keys that each row sees, in float32; a row that sees nothing gives zeros."""
    B, T, N, H = q.shape
    K = keys.shape[2]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, precision=precision, preferred_element_type=jnp.float32) * (
        H**-0.5
    )
    weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None])
    weights = jnp.where(seen[:, None, None], weights, 0.0).astype(q.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, values, precision=precision)
    return out.reshape(B, T, N, H)
