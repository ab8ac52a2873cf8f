"""The page write in plain jnp: the oracle of the kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import KeyRounding, Pages
from pallas_kernels.lib.rotary import Rotary, pairs_of, split_heads


def quantised(
    x: jax.Array, scale: Float[Array, " K"], pool: Pages, *, is_key: bool, rounding: KeyRounding | None = None
) -> Any:
    """``x / scale`` as a pool stores it; x is [.., K, H].

    Floating numbers are clipped first, since a cast that overflows makes NaN or inf; keys in 4 bits are rotated.
    """
    wide = x.astype(jnp.float32)
    y = (wide if rounding is None else wide - rounding.offset) / scale[:, None].reshape((1,) * (x.ndim - 2) + (-1, 1))
    if int4_kv.is_int4(pool):
        feedback = None if rounding is None else rounding.feedback
        return int4_kv.quantised(int4_kv.rotated(y) if is_key else y, feedback)
    limit = _compat.max_finite(pool.dtype)
    return jnp.clip(y, -limit, limit).astype(pool.dtype)


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    heads: Float[Array, "T K J H"],
    slots: Int[Array, " T"],
    rotary: Rotary | None,
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
    k_rounding: KeyRounding | None,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """Scatters with ``.at[].set``, in place where the pools are donated; see ``pallas_kernels.write_kv``."""
    P, _, S, _ = k_pages.shape
    page = jnp.where(slots >= 0, slots // S, P)  # pages past the pool are dropped
    offset = slots % S

    def scatter(array: jax.Array, x: jax.Array) -> jax.Array:
        return array.at[page, :, offset].set(x, mode="drop")

    queries, k, v = split_heads(heads, rotary)
    k = quantised(k, k_scale, k_pages, is_key=True, rounding=k_rounding)
    v = quantised(v, v_scale, v_pages, is_key=False)
    return queries, jax.tree.map(scatter, k_pages, k), jax.tree.map(scatter, v_pages, v)


def write_context(
    k_pages: Pages,
    v_pages: Pages,
    heads: Sequence[Float[Array, "T K _ H"]],
    slots: Int[Array, " T"],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    k_scale: Float[Array, "L K"],
    v_scale: Float[Array, "L K"],
    k_rounding: KeyRounding | None,
    *,
    first_pages: Sequence[tuple[int, int]],
) -> tuple[Pages, Pages]:
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
            k_rounding and k_rounding.of_layer(layer),
        )
    return k_pages, v_pages
