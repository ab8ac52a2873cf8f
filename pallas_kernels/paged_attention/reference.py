"""Paged attention in plain jnp: the oracle of every kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import Pages
from pallas_kernels.lib.masks import visible
from pallas_kernels.lib.rotary import gated
from pallas_kernels.paged_attention.arguments import Arguments, key_range, page_range

STEP = 128  # keys of each sequence in a step, in full pages: few enough to stay in a CPU's cache
_State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # next step, running maxima, sums of weights, output


@jax.jit
def paged_attention(args: Arguments) -> Float[Array, "B T N H"]:
    """Attend in float32, to some pages of each sequence in a step; see ``pallas_kernels.paged_attention``.

    It takes only the steps that hold keys that some query may see, however wide the page table is.
    """
    B, T, N, H = args.q.shape
    K, pages = args.kv_heads, max(1, STEP // args.page_size)  # pages: of a step
    keys = pages * args.page_size
    q = int4_kv.rotated(args.q) if int4_kv.is_int4(args.k_pages) else args.q.astype(jnp.float32)
    q = q.reshape(B, T, K, N // K, H) * (args.scale * args.k_scale[:, None, None])
    q = q.transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, H)  # r: a kv head's query heads, tokens innermost
    table = jnp.pad(args.page_table, ((0, 0), (0, -args.page_table.shape[1] % pages)))

    def attend(state: _State) -> _State:
        step, highest, total, out = state
        ids = jnp.clip(lax.dynamic_slice_in_dim(table, step * pages, pages, axis=1), 0, args.k_pages.shape[0] - 1)

        def gather(pool: Pages) -> jax.Array:
            taken: Any = jax.tree.map(lambda array: array[ids], pool)
            heads = int4_kv.dequantised(taken) if int4_kv.is_int4(taken) else taken.astype(jnp.float32)
            return jnp.swapaxes(heads, 1, 2).reshape(B, K, keys, H)

        seen = _seen(args, step * keys + jnp.arange(keys, dtype=jnp.int32))
        # A value that no query sees may be NaN, and 0 * NaN is NaN: it must not reach the product.
        v = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], gather(args.v_pages), 0)
        scores = jnp.einsum("BKrH,BKsH->BKrs", q, gather(args.k_pages), precision=lax.Precision.HIGHEST)
        scores = jnp.where(jnp.tile(seen[:, None], (1, 1, N // K, 1)), scores, -jnp.inf)
        now = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - now), jnp.exp(highest - now)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        out = out * kept + jnp.einsum("BKrs,BKsH->BKrH", weights, v, precision=lax.Precision.HIGHEST)
        return step + 1, now, total, out

    first, end = _steps(args, keys)
    row = jnp.zeros_like(q[..., :1])
    start = (first, row - 1e30, row, jnp.zeros_like(q))
    _, _, total, out = lax.while_loop(lambda state: state[0] < end, attend, start)
    out = out * (args.v_scale[:, None, None] / jnp.where(total > 0, total, 1))
    out = out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4)
    return gated(out.reshape(B, T, N, H).astype(args.q.dtype), args.gates)


def _steps(args: Arguments, keys: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Half-open range of the steps, of ``keys`` keys each, that any query of any sequence needs."""
    low, high = key_range(args, args.kv_length, args.q_length, args.valid_from, 0, args.q.shape[1] - 1)
    first, end = page_range(low, high, keys)
    sees_any = high > low
    return jnp.min(first, where=sees_any, initial=2**30), jnp.max(end, where=sees_any, initial=0)


def _seen(args: Arguments, position: Int[Array, " s"]) -> Bool[Array, "B T s"]:
    """Which keys each query token may see: those that the mask allows and that exist."""
    token = jnp.arange(args.q.shape[1], dtype=jnp.int32)[None, :]
    query_positions = (args.kv_length - args.q_length)[:, None] + token
    seen = visible(query_positions, position[None, :], mask=args.mask, window=args.window)
    exists = (position < args.kv_length[:, None]) & (position >= args.valid_from[:, None])
    return seen & exists[:, None, :] & (token < args.q_length[:, None])[:, :, None]
