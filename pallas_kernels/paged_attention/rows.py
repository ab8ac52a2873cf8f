"""The query rows of the Mosaic kernel: their order, and the positions that each row sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.lib.int4_kv import is_int4, rotated
from pallas_kernels.paged_attention.arguments import Arguments, key_range, operand

ROWS = 64  # rows of a block: those of one wgmma
TILE = 8  # rows of a tile of shared memory, the fewest that TMA copies into tiles


def terms(dtype: jnp.dtype) -> int:
    """Terms of the pages' dtype whose sum is a query: enough for the 8 bits of bfloat16's mantissa."""
    if not _compat.is_fp8(dtype):
        return 1
    return -(-8 // (jnp.finfo(dtype).nmant + 1))


def head_rows(tokens: int) -> int:
    """Rows of one query head, R: a power of two of at least a tile, so that blocks and heads divide each other."""
    return max(TILE, pl.next_power_of_2(tokens))


def pieces(tokens: int) -> list[Any]:
    """The runs of rows of a block that are copied, one for each query head, which has ``tokens`` rows to copy."""
    return [pl.ds(start, min(tokens, ROWS)) for start in range(0, ROWS, head_rows(tokens))]


@dataclasses.dataclass(frozen=True)
class Place:
    """The rows of an item: a block of the rows of a kv head of a sequence.

    Attributes:
        b: sequence, traced.
        head: kv head, traced.
        block: number of the block, traced.
        group: query heads of a kv head.
        tokens: rows that are copied for each query head.
    """

    b: Any
    head: Any
    block: Any
    group: int
    tokens: int

    def pieces(self) -> list[tuple[Any, Any, Any, Any]]:
        """Runs of rows of one query head: rows of the block, their tokens, their head, and whether that head exists.

        For a head that does not exist the last head is read, and nothing is written.
        """
        runs, rows_of_head = [], head_rows(self.tokens)
        for rows in pieces(self.tokens):
            row = self.block * ROWS + rows.start
            member = lax.div(row, rows_of_head)
            tokens = pl.ds(lax.rem(row, rows_of_head), rows.size)
            n = self.head * self.group + jnp.minimum(member, self.group - 1)
            runs.append((rows, tokens, n, member < self.group))
        return runs


def copied_tokens(args: Arguments) -> int:
    """Rows of a query head in the arrays that the kernel reads and writes: full tiles, or a single token unpadded.

    Padding a single token, and slicing the result, would be two more kernels, a tenth of the time. Queries that are
    multiplied from shared memory must be in tiles.
    """
    T, H = args.q.shape[1], args.q.shape[-1]
    alone = T == 1 and (H == 128 or _compat.is_fp8(args.k_pages.dtype))
    return 1 if alone else head_rows(T)


def padded(args: Arguments, *, are_split: bool) -> Float[Array, "B R NH"]:
    """Queries padded to ``copied_tokens`` rows, heads side by side.

    They have the dtype of 16-bit pages. Over fp8 pages they keep theirs if the kernel splits them into ``terms``, and
    are float16 else. Over 4-bit pages they are rotated as keys are, in float16.
    """
    B, T, N, H = args.q.shape
    if is_int4(args.k_pages):
        q = operand(rotated(args.q), args.compute_dtype)
    elif _compat.is_fp8(args.k_pages.dtype) and not are_split:
        q = operand(args.q, args.compute_dtype)
    else:
        q = args.q if _compat.is_fp8(args.k_pages.dtype) else args.q.astype(args.k_pages.dtype)
    return jnp.pad(q.reshape(B, T, N * H), ((0, 0), (0, copied_tokens(args) - T), (0, 0)))


def bounds(
    args: Arguments, blocks: int, together: int = 1
) -> tuple[Int[Array, "B blocks 3 R"], Int[Array, "B items 4"]]:
    """The positions that each row and each item of so many blocks sees; a row always sees one interval.

    Returns:
      For each row the first position that it sees, the position past the last, and 1 for a row of a token or 0 for
      padding. Padding, and tokens past ``q_length``, take the bounds of the last token, so that they need no mask of
      their own; their results are not used.
      For each item the union of its rows' intervals, and their intersection, each as first and past the last.
    """
    T = args.q.shape[1]
    row = jnp.arange(blocks * ROWS, dtype=jnp.int32).reshape(1, blocks, ROWS)
    kv_length, q_length, valid_from = (x[:, None, None] for x in (args.kv_length, args.q_length, args.valid_from))
    number = row % head_rows(T)
    token = jnp.minimum(number, jnp.maximum(q_length - 1, 0))
    low, high = key_range(args, kv_length, q_length, valid_from, token, token)
    low, high = jnp.broadcast_arrays(low, jnp.maximum(high, low))
    start, empty = low.min(2), number[:, :, 0] >= q_length[:, :, 0]
    first, end, last_start, first_end = (
        x.reshape(*x.shape[:-1], -1, together)
        for x in (start, jnp.where(empty, start, high.max(2)), low.max(2), high.min(2))
    )
    real = (number < q_length).astype(jnp.int32)
    of_items = jnp.stack([first.min(-1), end.max(-1), last_start.max(-1), first_end.min(-1)], axis=-1)
    return jnp.stack([low, high, real], axis=2), of_items


def longest_first(block_bounds: Int[Array, "B blocks 4"]) -> Int[Array, " B"]:
    """Sequences by how much they see, longest first, by comparing all pairs: XLA's sort would be several kernels."""
    seen = block_bounds[:, 0, 1] - block_bounds[:, 0, 0]
    number = jnp.arange(seen.size, dtype=jnp.int32)
    before = (seen[None] > seen[:, None]) | ((seen[None] == seen[:, None]) & (number[None] < number[:, None]))
    rank = before.sum(1, dtype=jnp.int32)
    return jnp.where(rank[None] == number[:, None], number[None], 0).sum(1, dtype=jnp.int32)


def ordered(block_bounds: Int[Array, "B blocks 4"], order: Int[Array, " B"]) -> Int[Array, "B blocks 5"]:
    """The bounds of blocks with sequences in another order, and the number of the sequence as a fifth number."""
    numbers = jnp.broadcast_to(order[:, None, None], (*block_bounds.shape[:2], 1))
    return jnp.concatenate([block_bounds[order], numbers], axis=2)
