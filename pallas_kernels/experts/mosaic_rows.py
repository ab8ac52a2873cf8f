"""What the Mosaic kernels need to know of the routing, by small kernels on Pallas' Triton backend.

Pairs of a token and an expert are placed by expert, into blocks of 128 rows without gaps between the blocks.
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
from pallas_kernels.lib.products import BAND

_CHUNK = 64  # pairs that a program compares with each other
_EXPERTS = 2  # whose chunks a program adds up
_PAIRS = 256  # that a program places
_HIGHEST = jnp.iinfo(jnp.int32).max  # a row that does not exist


class Grouped(NamedTuple):
    """Rows of the blocks, one after the other; what is said of rows behind a block's pairs means nothing.

    Attributes:
        token: of each row.
        expert: of each block.
        rows: of each block that are of a pair.
        band: first block of each block's band: at most 8 blocks in a row of one expert.
        length: of each block's band.
        used: number of blocks, [1]; what lies behind them means nothing.
        place: row of each pair [T, k] among those of all blocks; anything for a skipped pair.
    """

    token: Int[Array, " R"]
    expert: Int[Array, " C"]
    rows: Int[Array, " C"]
    band: Int[Array, " C"]
    length: Int[Array, " C"]
    used: Int[Array, "1"]
    place: Int[Array, "T k"]


def group(chosen: Int[Array, "T k"], experts: int, *, interpret: bool = False) -> Grouped:
    """Place pairs by expert, 128 a block; an expert's pairs stay in order.

    A program that searched all pairs for one expert's took 41 us for 65,536 pairs of 256 experts. Chunks of pairs are
    counted side by side instead, and a pair's row follows from the counts of the chunks before.
    """
    ids = chosen.reshape(-1)
    rank, counts = _counted(ids, experts, interpret=interpret)
    before, total = _added_up(counts, interpret=interpret)
    blocks = block_count(len(ids), experts, MOST_ROWS)
    base, expert, rows, band, length, used = _cut(total, blocks, interpret=interpret)
    token, place = _placed(chosen, (rank, before, base), blocks * MOST_ROWS, interpret=interpret)
    return Grouped(token, expert, rows, band, length, used, place)


def _counted(ids: Int[Array, " P"], experts: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Count the pairs of each chunk.

    Returns:
        Of each pair, how many of its expert come before it in its chunk, [P]; of each chunk and expert, how many there
        are, [chunks, X].
    """
    shapes = (len(ids),), (pl.cdiv(len(ids), _CHUNK), experts)
    rank, counts = _compat.triton_call(
        _count,
        grid=shapes[1][:1],
        out_shape=[_compat.out_like(shape, jnp.int32, ids) for shape in shapes],
        num_warps=2,
        num_stages=1,
        interpret=interpret,
        name="experts_count",
    )(ids)
    return rank, counts


def _count(ids: Any, rank: Any, counts: Any) -> None:
    """One program: the pairs of a chunk, each of which looks for those of its expert before it."""
    chunk, (_, experts) = pl.program_id(0), counts.shape
    lane = jnp.arange(_CHUNK, dtype=jnp.int32)
    pair = chunk * _CHUNK + lane
    mine = pltriton.load(ids.at[pair], mask=pair < ids.shape[0], other=-1)
    is_before = (mine[None, :] == mine[:, None]) & (lane[None, :] < lane[:, None])
    pltriton.store(rank.at[pair], jnp.sum(is_before.astype(jnp.int32), axis=1), mask=pair < ids.shape[0])
    expert = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    number = jnp.sum((mine[:, None] == expert[None, :]).astype(jnp.int32), axis=0)
    pltriton.store(counts.at[jnp.full_like(expert, chunk), expert], number, mask=expert < experts)


def _added_up(counts: Int[Array, "chunks X"], *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Add up the counts of `_counted` along the chunks.

    Returns:
        For each chunk and expert, the number of the expert's pairs in earlier chunks, [chunks, X]; and for each expert,
        the number of its pairs, [X].
    """
    experts = counts.shape[1]
    before, total = _compat.triton_call(
        _add_up,
        grid=(pl.cdiv(experts, _EXPERTS),),
        out_shape=[_compat.out_like(shape, jnp.int32, counts) for shape in (counts.shape, (experts,))],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="experts_add_up",
    )(counts)
    return before, total


def _add_up(counts: Any, before: Any, total: Any) -> None:
    """One program: all chunks of a few experts."""
    chunks, experts = counts.shape
    chunk = jnp.arange(pl.next_power_of_2(chunks), dtype=jnp.int32)[:, None]
    expert = (pl.program_id(0) * _EXPERTS + jnp.arange(_EXPERTS, dtype=jnp.int32))[None, :]
    is_inside = (chunk < chunks) & (expert < experts)
    counted = pltriton.load(counts.at[chunk, expert], mask=is_inside, other=0)
    pltriton.store(before.at[chunk, expert], jnp.cumsum(counted, axis=0) - counted, mask=is_inside)
    pltriton.store(total.at[expert.reshape(-1)], jnp.sum(counted, axis=0), mask=expert.reshape(-1) < experts)


def _cut(total: Int[Array, " X"], blocks: int, *, interpret: bool) -> tuple[jax.Array, ...]:
    """Cut each expert's pairs into blocks.

    Returns:
        The row of each expert's first pair, [X]; and expert, rows, band, length and used of ``Grouped``.
    """
    experts = len(total)
    shapes = (experts,), *[(blocks,)] * 4, (1,)
    cut: list[jax.Array] = _compat.triton_call(
        _cut_expert,
        grid=(experts,),
        out_shape=[_compat.out_like(shape, jnp.int32, total) for shape in shapes],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="experts_cut",
    )(total)
    return tuple(cut)


def _cut_expert(total: Any, base: Any, expert_of: Any, rows_of: Any, band_of: Any, length_of: Any, used: Any) -> None:
    """One program: the blocks of an expert."""
    expert, [experts] = pl.program_id(0), total.shape
    other = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    pairs = pltriton.load(total.at[other], mask=other < experts, other=0)
    blocks = lax.div(pairs + (MOST_ROWS - 1), jnp.int32(MOST_ROWS))
    begin, end = (jnp.sum(jnp.where(is_before, blocks, 0)) for is_before in (other < expert, other <= expert))
    mine = jnp.sum(jnp.where(other == expert, pairs, 0))
    base[expert] = begin * MOST_ROWS

    def write(block: Any, nothing: None) -> None:
        expert_of[block] = expert
        rows_of[block] = jnp.minimum(mine - (block - begin) * MOST_ROWS, MOST_ROWS)
        band = block - lax.rem(block - begin, jnp.int32(BAND))
        band_of[block] = band
        length_of[block] = jnp.minimum(end - band, BAND)

    lax.fori_loop(begin, end, write, None)
    is_last = jnp.full((1,), expert == experts - 1)
    pltriton.store(used.at[jnp.zeros((1,), jnp.int32)], jnp.full((1,), end), mask=is_last)


def _placed(
    chosen: Int[Array, "T k"],
    places: tuple[Int[Array, " P"], Int[Array, "chunks X"], Int[Array, " X"]],
    rows: int,
    *,
    interpret: bool,
) -> tuple[Int[Array, " R"], Int[Array, "T k"]]:
    """Name the token of each row and the row of each pair.

    Args:
        chosen: experts of the tokens.
        places: three arrays whose sum is a pair's row: of its own, of its chunk and expert, and of its expert.
        rows: R, of all blocks.
        interpret: run in Pallas' interpreter.
    """
    token, place = _compat.triton_call(
        functools.partial(_place_pairs, k=chosen.shape[1]),
        grid=(pl.cdiv(chosen.size, _PAIRS),),
        out_shape=[_compat.out_like(shape, jnp.int32, chosen) for shape in ((rows,), (chosen.size,))],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="experts_place",
    )(chosen.reshape(-1), *places)
    return token, place.reshape(chosen.shape)


def _place_pairs(ids: Any, rank: Any, before: Any, base: Any, token: Any, place: Any, *, k: int) -> None:
    """One program: some pairs."""
    [experts] = base.shape
    pair = pl.program_id(0) * _PAIRS + jnp.arange(_PAIRS, dtype=jnp.int32)
    is_inside = pair < ids.shape[0]
    expert = pltriton.load(ids.at[pair], mask=is_inside, other=-1)
    exists = (expert >= 0) & (expert < experts)
    expert = jnp.where(exists, expert, 0)
    terms = rank.at[pair], before.at[lax.div(pair, jnp.int32(_CHUNK)), expert], base.at[expert]
    row = sum(pltriton.load(term, mask=exists, other=0) for term in terms)
    row = jnp.where(exists, row, jnp.int32(_HIGHEST))
    pltriton.store(place.at[pair], row, mask=is_inside)
    pltriton.store(token.at[row], lax.div(pair, jnp.int32(k)), mask=exists)


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
