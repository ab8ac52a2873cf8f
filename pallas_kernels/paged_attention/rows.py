"""What the Mosaic kernel is given of the queries: the order of their rows, and what each row sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments, key_range

ROWS = 64  # rows of a block: of a wgmma
TILE = 8  # rows of a tile of shared memory: of a head's tokens, no fewer can be copied


def terms(dtype: jnp.dtype) -> int:
    """How many numbers of the pages' dtype a query is the sum of: enough for the 8 bits of mantissa of bfloat16."""
    if not _compat.is_fp8(dtype):
        return 1
    return -(-8 // (jnp.finfo(dtype).nmant + 1))


def head_rows(tokens: int) -> int:
    """Rows of one query head, R: a power of two of at least a tile, so that blocks and heads divide each other."""
    return max(TILE, pl.next_power_of_2(tokens))


def pieces(tokens: int) -> list[Any]:
    """The rows of a block that are copied, cut where the query head changes; a head has ``tokens`` of them."""
    return [pl.ds(start, min(tokens, ROWS)) for start in range(0, ROWS, head_rows(tokens))]


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rows a CTA has: a block of those of a kv head of a sequence, of ``tokens`` for each of ``group`` heads."""

    b: Any
    head: Any
    block: Any
    group: int
    tokens: int

    def pieces(self) -> list[tuple[Any, Any, Any, Any]]:
        """Runs of rows of one query head: rows of the block, tokens and head they stand for, and whether these exist.

        What does not exist is read as the last head, and never written.
        """
        found, each = [], head_rows(self.tokens)
        for rows in pieces(self.tokens):
            row = self.block * ROWS + rows.start
            mine = lax.div(row, each)
            tokens = pl.ds(lax.rem(row, each), rows.size)
            found.append((rows, tokens, self.head * self.group + jnp.minimum(mine, self.group - 1), mine < self.group))
        return found


def copied_tokens(args: Arguments) -> int:
    """Tokens that a head has in what the kernel reads and writes: whole tiles, or the only one as it lies.

    Padding one token and taking it out of the result would be two kernels, a tenth of the time. Queries that are
    multiplied as they lie in shared memory must be in tiles.
    """
    T, H = args.q.shape[1], args.q.shape[-1]
    alone = T == 1 and (H == 128 or _compat.is_fp8(args.k_pages.dtype))
    return 1 if alone else head_rows(T)


def padded(args: Arguments) -> Float[Array, "B R NH"]:
    """Queries, ``copied_tokens`` rows, heads side by side.

    Over 16-bit pages in their dtype; over fp8 pages as they are, for the kernel to split into ``terms``.
    """
    B, T, N, H = args.q.shape
    q = args.q if _compat.is_fp8(args.k_pages.dtype) else args.q.astype(args.k_pages.dtype)
    return jnp.pad(q.reshape(B, T, N * H), ((0, 0), (0, copied_tokens(args) - T), (0, 0)))


def bounds(args: Arguments, blocks: int) -> tuple[Int[Array, "B blocks 3 R"], Int[Array, "B blocks 4"]]:
    """The positions that each row sees, always one interval, and those of a block of rows.

    Returns:
      First position that a row sees, the one past the last, and whether the row is a token's (1) or padding (0). A row
      of padding or of a token past ``q_length`` takes the bounds of the last token, so as not to need a mask of its
      own: its result is not used.
      Of each block: the union of its rows' intervals and their intersection, each as first and past the last.
    """
    T = args.q.shape[1]
    row = jnp.arange(blocks * ROWS, dtype=jnp.int32).reshape(1, blocks, ROWS)
    kv_length, q_length, valid_from = (x[:, None, None] for x in (args.kv_length, args.q_length, args.valid_from))
    own = row % head_rows(T)
    token = jnp.minimum(own, jnp.maximum(q_length - 1, 0))
    low, high = key_range(args, kv_length, q_length, valid_from, token, token)
    low, high = jnp.broadcast_arrays(low, jnp.maximum(high, low))
    start, empty = low.min(2), own[:, :, 0] >= q_length[:, :, 0]
    union = (start, jnp.where(empty, start, high.max(2)))
    real = (own < q_length).astype(jnp.int32)
    return jnp.stack([low, high, real], axis=2), jnp.stack([*union, low.max(2), high.min(2)], axis=-1)


def longest_first(block_bounds: Int[Array, "B blocks 4"]) -> Int[Array, " B"]:
    """Sequences in the order of how much they see, by comparison of each with each: XLA sorts in several kernels."""
    seen = block_bounds[:, 0, 1] - block_bounds[:, 0, 0]
    number = jnp.arange(seen.size, dtype=jnp.int32)
    before = (seen[None] > seen[:, None]) | ((seen[None] == seen[:, None]) & (number[None] < number[:, None]))
    rank = before.sum(1, dtype=jnp.int32)
    return jnp.where(rank[None] == number[:, None], number[None], 0).sum(1, dtype=jnp.int32)


def ordered(block_bounds: Int[Array, "B blocks 4"], order: Int[Array, " B"]) -> Int[Array, "B blocks 5"]:
    """The bounds of blocks in another order of sequences, each with the number of its sequence as a fifth."""
    numbers = jnp.broadcast_to(order[:, None, None], (*block_bounds.shape[:2], 1))
    return jnp.concatenate([block_bounds[order], numbers], axis=2)
