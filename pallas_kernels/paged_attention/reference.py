"""Paged attention in plain jnp: the oracle of every kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.masks import visible
from pallas_kernels.paged_attention.arguments import Arguments

LEAST_KEYS = 128  # a page table of no more tokens is attended over as a whole
GROWTH = 4  # of the part that is attended over, until the longest sequence fits


@jax.jit
def paged_attention(args: Arguments) -> Float[Array, "B T N H"]:
    """Gathers each sequence's pages and attends in float32; see ``pallas_kernels.paged_attention``.

    On CPUs, where a choice between programs costs nothing, over as much of the page table as the longest sequence has.
    """
    return lax.platform_dependent(args, cpu=_over_what_is_kept, default=_attend)


def _over_what_is_kept(args: Arguments) -> Float[Array, "B T N H"]:
    pages, S = args.page_table.shape[1], args.page_size
    widths = [pages]
    while widths[0] > 1 and widths[0] * S > LEAST_KEYS:
        widths.insert(0, -(-widths[0] // GROWTH))

    def over(width: int) -> Callable[[Arguments], jax.Array]:
        return lambda args: _attend(dataclasses.replace(args, page_table=args.page_table[:, :width]))

    longest = jnp.max(args.kv_length, initial=0)
    fitting = sum((longest > width * S).astype(jnp.int32) for width in widths[:-1])
    return lax.switch(fitting, [over(width) for width in widths], args)


def _attend(args: Arguments) -> Float[Array, "B T N H"]:
    B, T, N, H = args.q.shape
    P, K, S, _ = args.k_pages.shape
    keys, rows = args.page_table.shape[1] * S, N // K * T  # r: a kv head's query heads, tokens innermost
    pages = jnp.clip(args.page_table, 0, P - 1)

    def gather(pool: jax.Array) -> jax.Array:
        return jnp.swapaxes(pool[pages], 1, 2).reshape(B, K, keys, H).astype(jnp.float32)

    seen = _seen(args, keys)  # [B, T, keys]
    # What no query sees may be anything, NaN too: it must not reach this product, where 0 * NaN is NaN.
    v = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], gather(args.v_pages), 0)

    q = args.q.astype(jnp.float32).reshape(B, T, K, N // K, H) * (args.scale * args.k_scale[:, None, None])
    q = q.transpose(0, 2, 3, 1, 4).reshape(B, K, rows, H)
    scores = jnp.einsum("BKrH,BKsH->BKrs", q, gather(args.k_pages), precision=lax.Precision.HIGHEST)
    scores = jnp.where(jnp.tile(seen[:, None], (1, 1, N // K, 1)), scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("BKrs,BKsH->BKrH", weights, v, precision=lax.Precision.HIGHEST)
    out = out * (args.v_scale[:, None, None] / jnp.where(total > 0, total, 1))
    out = out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, N, H).astype(args.q.dtype)


def _seen(args: Arguments, keys: int) -> jax.Array:
    """Which keys each query token may see: the mask, and what exists at all. Shape [B, T, keys]."""
    token = jnp.arange(args.q.shape[1], dtype=jnp.int32)[None, :]
    position = jnp.arange(keys, dtype=jnp.int32)[None, :]
    query_positions = (args.kv_length - args.q_length)[:, None] + token
    seen = visible(query_positions, position, mask=args.mask, window=args.window)
    exists = (position < args.kv_length[:, None]) & (position >= args.valid_from[:, None])
    return seen & exists[:, None, :] & (token < args.q_length[:, None])[:, :, None]
