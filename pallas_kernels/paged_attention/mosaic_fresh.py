"""What the Mosaic kernel makes of fresh heads: queries, and keys and values in pages, while the first pages come."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.halves import Halves, positioned, quantised
from pallas_kernels.paged_attention.mosaic_layouts import copy_layout
from pallas_kernels.paged_attention.mosaic_work import Work
from pallas_kernels.paged_attention.rows import ROWS
from pallas_kernels.rotary import Rotary

BLOCK = 16  # new tokens of a sequence: as many rows as the layout of half a head has
HALF = 64
_LAYOUT = copy_layout(HALF)


class Fresh(NamedTuple):
    """What the kernel wants to know of fresh heads beside them; references."""

    slots: Any
    rotary: Rotary
    k_scale: Any


def prepare(heads: Any, fresh: Fresh, work: Work, me: Any, pools: tuple[Any, Any], v_scale: Any, s: Any) -> None:
    """One of two consumers: writes all keys, or values, of an item to pages, and turns half of its queries in place.

    Who awaits ``turned`` finds the queries, who awaits ``written`` may have the pages copied.
    """
    b, head, rotary = work.place.b, work.place.head, fresh.rotary
    of_tokens: tuple[Any, Any] = rotary.cos, rotary.sin
    cos, sin = (_load(x.at[b], False) for x in of_tokens)

    def turn(x: Halves, norm: Any) -> Halves:
        return positioned(x, _weights(norm), rotary.eps, (cos, sin), lambda row: _across(row, 0))

    start = (head * (work.shape.group + 2) + work.shape.group + me) * 2 * HALF
    raw = [_load(heads.at[b, :, pl.ds(start + h, HALF)], False) for h in (0, HALF)]
    is_key = lax.broadcast_in_dim(me == 0, raw[0].shape, ())
    own = [jnp.where(is_key, k, v) for k, v in zip(turn(raw, rotary.k_norm), raw, strict=True)]
    own = quantised(own, jnp.where(me == 0, fresh.k_scale[head], v_scale), pools[0].dtype)
    for h, half in zip((0, HALF), own, strict=True):
        s["new_s"].at[me, :, pl.ds(h, HALF)][...] = half
    plgpu.commit_smem()
    is_mine = work.fresh() < work.count
    for pool, index in zip(pools, range(2), strict=True):
        for token in range(BLOCK):
            slot = fresh.slots[b, token]
            place = jnp.maximum(slot, 0)
            size = work.shape.page_size
            target = pool.at[lax.div(place, size), head, lax.rem(place, size)]
            wanted = (slot >= 0) & is_mine & (me == index)
            plgpu.copy_smem_to_gmem(s["new_s"].at[index, token], target, predicate=wanted)

    rows_s = s["rows_s" if work.shape.config.wide else "q_s"]
    each = ROWS // BLOCK // work.shape.config.consumers

    def turn_rows(i: Any, nothing: None) -> None:
        rows = pl.ds((me * each + i) * BLOCK, BLOCK)
        places = [rows_s.at[rows, pl.ds(h, HALF)] for h in (0, HALF)]
        for place, half in zip(places, turn([_load(x, True) for x in places], rotary.q_norm), strict=True):
            place[...] = half

    lax.fori_loop(0, each, turn_rows, None)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s["turned"])
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(s["written"])


def _load(ref: Any, optimized: bool) -> jax.Array:
    return _compat.smem_load(ref, _LAYOUT, optimized=optimized)


def _weights(norm: Any) -> Halves | None:
    """Halves of a norm's weights, for each row."""
    if norm is None:
        return None
    layout = _LAYOUT.reduce(0)
    return [_across(_compat.smem_load(norm.at[pl.ds(h, HALF)], layout, optimized=False), 1) for h in (0, HALF)]


def _across(x: jax.Array, dimension: int) -> jax.Array:
    """A number a row (0) or a column (1), for every element of half a head."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (BLOCK, HALF), [dimension]), _LAYOUT)
