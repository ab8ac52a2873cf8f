"""Paged attention in plain jnp: the oracle of every kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.masks import visible
from pallas_kernels.paged_attention.arguments import Arguments


def paged_attention(args: Arguments) -> Float[Array, "B T N H"]:
    """Gathers each sequence's pages and attends in float32; see ``pallas_kernels.paged_attention``."""
    B, T, N, H = args.q.shape
    P, K, S, _ = args.k_pages.shape
    keys = args.page_table.shape[1] * S
    pages = jnp.clip(args.page_table, 0, P - 1)

    def gather(pool: jax.Array, scale: jax.Array) -> jax.Array:
        rows = jnp.swapaxes(pool[pages], 1, 2).reshape(B, K, keys, H).astype(jnp.float32)
        return rows * scale[None, :, None, None]

    seen = _seen(args, keys)  # [B, T, keys]
    # What no query sees may be anything, NaN too: it must not reach a product, where 0 * NaN is NaN.
    somebody = jnp.any(seen, axis=1)[:, None, :, None]
    k = jnp.where(somebody, gather(args.k_pages, args.k_scale), 0)
    v = jnp.where(somebody, gather(args.v_pages, args.v_scale), 0)

    q = args.q.astype(jnp.float32).reshape(B, T, K, N // K, H) * args.scale
    scores = jnp.einsum("BTKGH,BKsH->BKGTs", q, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("BKGTs,BKsH->BTKGH", weights, v, precision=lax.Precision.HIGHEST)
    return out.reshape(B, T, N, H).astype(args.q.dtype)


def _seen(args: Arguments, keys: int) -> jax.Array:
    """Which keys each query token may see: the mask, and what exists at all. Shape [B, T, keys]."""
    token = jnp.arange(args.q.shape[1], dtype=jnp.int32)[None, :]
    position = jnp.arange(keys, dtype=jnp.int32)[None, :]
    query_positions = (args.kv_length - args.q_length)[:, None] + token
    seen = visible(query_positions, position, mask=args.mask, window=args.window)
    exists = (position < args.kv_length[:, None]) & (position >= args.valid_from[:, None])
    return seen & exists[:, None, :] & (token < args.q_length[:, None])[:, :, None]
