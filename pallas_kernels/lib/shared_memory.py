"""Shared memory as TMA and wgmma want it (Mosaic GPU)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

WIDEST = 128  # bytes of TMA's widest swizzle
ALIGNED = 8  # rows of a tile; arrays that TMA copies in several hold a multiple of them
SHARED_MEMORY = 225 * 1024  # bytes of a CTA that streams: 227 KiB less 2 KiB for barriers and alignment


def tiled(shape: tuple[int, ...], dtype: Any, row: int = 0) -> Any:
    """Shared memory in tiles of 8 rows, with the widest swizzle up to 128 bytes that divides a row.

    Args:
        shape: of the array; rows lie along the last axis.
        dtype: of the array.
        row: numbers of another row that the swizzle must divide too, such as that of the array in memory; 0 is none.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(swizzle_of(math.gcd(shape[-1], row), dtype), dtype))


def swizzle_of(row: int, dtype: Any) -> int:
    """Bytes of the widest swizzle that divides a row of so many numbers."""
    return next(width for width in (WIDEST, 64, 32) if row * jnp.dtype(dtype).itemsize % width == 0)


def transforms(swizzle: int, dtype: Any) -> tuple[Any, Any]:
    """How `tiled` lays out shared memory with a swizzle of so many bytes."""
    return plgpu.TilingTransform((ALIGNED, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)
