"""What the Mosaic kernels need to know of the routing, by small kernels on Pallas' Triton backend.

TMA copies no scattered rows, so they are copied by expert first, into blocks of rows without gaps between the blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts.sort import MOST_ROWS, block_count

_CHUNK = 64  # pairs that a program compares with each other
_TOKENS = 8  # whose rows a program copies
_PART = 512  # columns of them
_HIGHEST = jnp.iinfo(jnp.int32).max  # a row that does not exist


class Grouped(NamedTuple):
    """Rows by expert.

    Attributes:
        x: rows of the blocks, one after the other; what lies behind a block's pairs means nothing.
        expert: of each block; one out of range is of a block without pairs, so that any expert will do.
        rows: of each block that are of a pair.
        used: number of blocks, [1]; what lies behind them means nothing.
        place: row of each pair [T, k] among those of all blocks; anything for a skipped pair.
    """

    x: Float[Array, "R D"]
    expert: Int[Array, " C"]
    rows: Int[Array, " C"]
    used: Int[Array, "1"]
    place: Int[Array, "T k"]


def group(x: Float[Array, "T D"], chosen: Int[Array, "T k"], experts: int, *, interpret: bool = False) -> Grouped:
    """Copy rows by expert, 128 a block; an expert's pairs stay in order.

    A program that searched all pairs for one expert's took 41 us for 65,536 pairs of 256 experts. Chunks of pairs are
    counted side by side instead, and a pair's row follows from the counts of the chunks before.
    """
    ids = chosen.reshape(-1)
    rank, before, total = _counted(ids, experts, interpret=interpret)
    blocks_of = pl.cdiv(total, MOST_ROWS)
    every = jnp.arange(experts, dtype=jnp.int32)
    end = jnp.sum(jnp.where(every[:, None] <= every[None, :], blocks_of[:, None], 0), axis=0, dtype=jnp.int32)
    block = jnp.arange(block_count(len(ids), experts, MOST_ROWS), dtype=jnp.int32)
    expert = jnp.sum(end[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    known = jnp.minimum(expert, experts - 1)
    rows = jnp.minimum(total[known] - (block - (end - blocks_of)[known]) * MOST_ROWS, MOST_ROWS)
    exists = (ids >= 0) & (ids < experts)
    of = jnp.where(exists, ids, 0)
    row = (end - blocks_of)[of] * MOST_ROWS + before[of, jnp.arange(len(ids)) // _CHUNK] + rank
    place = jnp.where(exists, row, _HIGHEST).reshape(chosen.shape)
    return Grouped(_copied(x, place, len(block) * MOST_ROWS, interpret=interpret), expert, rows, end[-1:], place)


def _counted(ids: Int[Array, " P"], experts: int, *, interpret: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count the pairs of each expert.

    Returns:
        Of each pair, how many of its expert come before it in its chunk, [P]; of each expert and chunk, how many come
        in the chunks before, [X, chunks]; and of each expert, how many there are, [X].
    """
    none = jnp.zeros((experts, pl.cdiv(len(ids), _CHUNK)), jnp.int32)
    rank, counts = _compat.triton_call(
        _count,
        grid=(none.shape[1],),
        out_shape=[_compat.out_like(shape, jnp.int32, ids) for shape in ((len(ids),), none.shape)],
        num_warps=2,
        num_stages=1,
        interpret=interpret,
        name="experts_count",
        aliases={1: 1},
    )(ids, none)
    before, total = _compat.triton_call(
        _add_up,
        grid=(experts,),
        out_shape=[_compat.out_like(shape, jnp.int32, ids) for shape in (counts.shape, (experts,))],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="experts_add_up",
    )(counts)
    return rank, before, total


def _count(ids: Any, none: Any, rank: Any, counts: Any) -> None:
    """One program: the pairs of a chunk, each of which looks for those of its expert; the last writes their number."""
    del none
    chunk, (experts, _) = pl.program_id(0), counts.shape
    lane = jnp.arange(_CHUNK, dtype=jnp.int32)
    pair = chunk * _CHUNK + lane
    mine = pltriton.load(ids.at[pair], mask=pair < ids.shape[0], other=-1)
    is_same = mine[None, :] == mine[:, None]
    before, behind = (
        jnp.sum((is_same & is_there).astype(jnp.int32), axis=1)
        for is_there in (lane[None, :] < lane[:, None], lane[None, :] > lane[:, None])
    )
    pltriton.store(rank.at[pair], before, mask=pair < ids.shape[0])
    is_last = (behind == 0) & (mine >= 0) & (mine < experts)
    target = jnp.where(is_last, mine, experts)  # the interpreter drops what is out of range
    pltriton.store(counts.at[target, jnp.full_like(lane, chunk)], before + 1, mask=is_last)


def _add_up(counts: Any, before: Any, total: Any) -> None:
    """One program: the chunks of an expert."""
    expert, chunks = pl.program_id(0), counts.shape[1]
    chunk = jnp.arange(pl.next_power_of_2(chunks), dtype=jnp.int32)
    at = jnp.full_like(chunk, expert), chunk
    counted = pltriton.load(counts.at[at], mask=chunk < chunks, other=0)
    pltriton.store(before.at[at], jnp.cumsum(counted) - counted, mask=chunk < chunks)
    total[expert] = jnp.sum(counted)


def _copied(x: Float[Array, "T D"], place: Int[Array, "T k"], rows: int, *, interpret: bool) -> Float[Array, "R D"]:
    """Copy each token's row to the places of its pairs: it is read once, and no row of padding is written."""
    tokens, width = x.shape
    return _compat.triton_call(
        functools.partial(_copy, k=place.shape[1]),
        grid=(pl.cdiv(tokens, _TOKENS) * pl.cdiv(width, _PART),),
        out_shape=_compat.out_like((rows, width), x.dtype, x),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="experts_copy_rows",
    )(x, place.reshape(-1))


def _copy(x: Any, place: Any, out: Any, *, k: int) -> None:
    """One program: some columns of a few tokens."""
    (tokens, width), program = x.shape, pl.program_id(0)
    parts = pl.cdiv(width, _PART)
    token = lax.div(program, jnp.int32(parts)) * _TOKENS + jnp.arange(_TOKENS, dtype=jnp.int32)
    column = lax.rem(program, jnp.int32(parts)) * _PART + jnp.arange(_PART, dtype=jnp.int32)
    is_inside = (token < tokens)[:, None] & (column < width)[None, :]
    values = pltriton.load(x.at[token[:, None], column[None, :]], mask=is_inside, other=0.0)

    def copy(j: Any, nothing: None) -> None:
        row = pltriton.load(place.at[token * k + j], mask=token < tokens, other=_HIGHEST)
        exists = (row < out.shape[0])[:, None]
        pltriton.store(out.at[row[:, None], column[None, :]], values, mask=is_inside & exists)

    lax.fori_loop(0, k, copy, None)


def summed(
    parts: Float[Array, "R D"],
    place: Int[Array, "T k"],
    chosen: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: int,
) -> Float[Array, "T D"]:
    """Weighted sum over each token's experts in float32, in the order of ``chosen``; skipped pairs are left out."""
    is_pair = (chosen >= 0) & (chosen < experts)
    rows = jnp.where(is_pair, place, 0)

    def term(j: int) -> jax.Array:
        values = parts.at[rows[:, j]].get(mode="promise_in_bounds").astype(jnp.float32)
        return jnp.where(is_pair[:, j, None], weights[:, j, None] * values, 0)

    return functools.reduce(jnp.add, [term(j) for j in range(chosen.shape[1])])
