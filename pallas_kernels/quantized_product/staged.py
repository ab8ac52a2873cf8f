"""Products on their way to memory through shared memory (Mosaic GPU): turned there, and copied out by TMA.

A thread's sums are of some rows of the weight, which lie side by side in memory, for some tokens, which lie far apart:
stored from registers, a tile of 128 tokens in bfloat16 took 6,500 cycles of the 54,400 that 40 steps take.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.lib.shared_memory import tiled
from pallas_kernels.quantized_product.rescaled import ROWS

PIECE = 16  # tokens that leave at a time


def slots_of(consumers: int, tokens: int, itemsize: int, room: int) -> int:
    """Pieces of each consumer that wait at a time in so many bytes; a tile has a multiple of as many."""
    slots = 1
    while tokens % (2 * slots * PIECE) == 0 and 2 * slots * least_bytes(consumers, itemsize) <= room:
        slots *= 2
    return slots


def least_bytes(consumers: int, itemsize: int = 4) -> int:
    """Bytes of a piece of each consumer."""
    return consumers * PIECE * ROWS * itemsize


def scratch(consumers: int, slots: int, dtype: Any) -> Any:
    """The shared memory of `store`."""
    return tiled((consumers, slots, PIECE, ROWS), dtype)


def store(sums: jax.Array, out: Any, place: tuple[Any, Any, Any], me: Any, staged: Any) -> None:
    """Store a consumer's sums [64, tokens], rounded to the dtype of the result; rows and tokens beyond it are dropped.

    Args:
        sums: in wgmma's layout.
        out: [S, T, O] in global memory.
        place: part, first token and first row of the sums.
        me: the number of the consumer.
        staged: `scratch`.
    """
    part, token, row = place
    slots, rounded = staged.shape[1], sums.astype(out.dtype)
    for piece in range(sums.shape[1] // PIECE):
        first = piece * PIECE
        turned = plgpu.layout_cast(rounded[:, first : first + PIECE], plgpu.Layout.WGMMA_TRANSPOSED)
        slot = staged.at[me, piece % slots]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # until what the slot had has left
        _compat.smem_transpose(slot)[...] = turned
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, out.at[part, pl.ds(token + first, PIECE), pl.ds(row, ROWS)])


def drain() -> None:
    """Wait until all that a consumer has stored has left its shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
