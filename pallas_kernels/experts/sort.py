"""Pairs of tokens and experts, sorted by expert and cut into blocks, each of rows of one expert.

Nothing is read by the host, and shapes depend on shapes alone. Expert e gets the blocks from ``start // rows + e`` on,
where ``start`` pairs belong to experts before it. That is room for each of its blocks, and at most one more, whatever
the routing: so an expert needs to know the number of pairs before its own, and no other expert's number of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

MOST_ROWS = 128  # of a block


class Blocks(NamedTuple):
    """Which rows the blocks have.

    Attributes:
        pairs: numbers ``token * k + j`` of the pairs, sorted by expert, an expert's in order; after them, anything.
        expert: of each block; -1 is an empty block.
        first: place of each block's first row in ``pairs``; anything for an empty block.
        end: place behind its last row.
    """

    pairs: Int[Array, " P"]
    expert: Int[Array, " C"]
    first: Int[Array, " C"]
    end: Int[Array, " C"]


def block_count(pairs: int, experts: int, rows: int) -> int:
    """The number of blocks, empty ones included."""
    return pairs // rows + experts


def rows_of(pairs: int, experts: int, least: int) -> int:
    """Rows of a block: a power of two from ``least`` to 128 that holds the pairs of an expert of mean popularity."""
    rows = least
    while rows < MOST_ROWS and rows * min(pairs, experts) < pairs:
        rows *= 2
    return rows


def sort(chosen: Int[Array, "T k"], experts: int, rows: int) -> Blocks:
    """Sort the pairs in plain jnp.

    Args:
      chosen: experts of each token; others than 0..X-1 are skipped.
      experts: X.
      rows: of a block, a power of two.
    """
    ids = chosen.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    pairs = lax.sort((ids, lax.iota(jnp.int32, len(ids))), num_keys=1, is_stable=True)[1]
    every = jnp.arange(experts + 1, dtype=jnp.int32)
    starts = jnp.sum(ids[None, :] < every[:, None], axis=1, dtype=jnp.int32)
    blocks = starts[:-1] // rows + every[:-1]  # the first block of each expert
    block = jnp.arange(block_count(len(ids), experts, rows), dtype=jnp.int32)
    expert = jnp.sum(blocks[None, :] <= block[:, None], axis=1, dtype=jnp.int32) - 1
    first = starts[expert] + (block - blocks[expert]) * rows
    end = jnp.minimum(first + rows, starts[expert + 1])
    return Blocks(pairs, jnp.where(first < end, expert, -1), first, end)
