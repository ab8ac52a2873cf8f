"""Shared memory as TMA and wgmma want it (Mosaic GPU)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(shape: tuple[int, ...], dtype: Any, row: int = 0) -> Any:
    """Tiles of 8 rows, swizzled as wide as divides a row of it, and one of ``row`` numbers, up to 128 bytes."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if math.gcd(shape[-1], row) * size % width == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
