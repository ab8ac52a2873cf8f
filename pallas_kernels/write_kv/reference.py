"""The page write in plain jnp: the oracle of the kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.rotary import Rotary, split_heads


def quantised(x: jax.Array, scale: Float[Array, " K"], dtype: jnp.dtype) -> jax.Array:
    """``x / scale`` of ``[..., K, H]`` in a pool's dtype, clipped first: a cast that overflows makes NaN or inf."""
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
    page = jnp.where(slots >= 0, slots // S, P)  # past the pool: dropped
    offset = slots % S

    def scatter(pool: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
        return pool.at[page, :, offset, :].set(quantised(x, scale, pool.dtype), mode="drop")

    queries, k, v = split_heads(heads, rotary)
    return queries, scatter(k_pages, k, k_scale), scatter(v_pages, v, v_scale)
