"""The page write in plain jnp: the oracle of the kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.lib.rotary import Rotary, pairs_of, split_heads


def quantised(x: jax.Array, scale: Float[Array, " K"], dtype: jnp.dtype) -> jax.Array:
    """``x / scale`` in a pool's dtype, clipped first, since a cast that overflows makes NaN or inf; x is [.., K, H]."""
    limit = _compat.max_finite(dtype)
    y = x.astype(jnp.float32) / scale[:, None].reshape((1,) * (x.ndim - 2) + (-1, 1))
    return jnp.clip(y, -limit, limit).astype(dtype)


def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    heads: Float[Array, "T K J H"],
    slots: Int[Array, " T"],
    rotary: Rotary | None,
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Scatters with ``.at[].set``, in place where the pools are donated; see ``pallas_kernels.write_kv``."""
    P, _, S, _ = k_pages.shape
    page = jnp.where(slots >= 0, slots // S, P)  # pages past the pool are dropped
    offset = slots % S

    def scatter(pool: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
        return pool.at[page, :, offset, :].set(quantised(x, scale, pool.dtype), mode="drop")

    queries, k, v = split_heads(heads, rotary)
    return queries, scatter(k_pages, k, k_scale), scatter(v_pages, v, v_scale)


def write_context(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    heads: Sequence[Float[Array, "T K _ H"]],
    slots: Int[Array, " T"],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    k_scale: Float[Array, "L K"],
    v_scale: Float[Array, "L K"],
    *,
    first_pages: Sequence[tuple[int, int]],
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Write one layer after the other; see ``pallas_kernels.write_kv.write_context``."""
    page_size, pairs = k_pages.shape[2], pairs_of(heads)
    for layer, first_page in first_pages:
        array, row = pairs[layer]
        _, k_pages, v_pages = write_kv(
            k_pages,
            v_pages,
            array[:, :, row : row + 2],
            jnp.where(slots < 0, -1, first_page * page_size + slots),
            replace(rotary, k_norm=k_norms[layer]),
            k_scale[layer],
            v_scale[layer],
        )
    return k_pages, v_pages
