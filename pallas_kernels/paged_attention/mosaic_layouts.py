"""Register layouts that the Mosaic kernels share."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat

LOWEST = -1e30  # start of a running maximum: finite, so that no difference of two maxima is inf - inf


def copy_layout(H: int) -> Any:
    """The layout for copying a page of heads of H: 8 neighbours a lane, so that no side of it has bank conflicts."""
    lanes = min(H // 8, 16)
    tile = (32 // lanes, lanes * 8)
    tiling = _compat.tiling(((4 * tile[0], tile[1]), tile, (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def across(x: jax.Array, width: int) -> jax.Array:
    """Broadcast one number a row to ``width`` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])
