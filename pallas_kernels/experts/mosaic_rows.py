"""What the Mosaic kernels need to know of the routing, by small kernels on Pallas' Triton backend.

TMA copies no scattered rows, and CTAs that go from block to block by themselves need blocks without gaps. For few
tokens each expert that is touched is a block, and its rows are all tokens; for many, rows are copied by expert.
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
from pallas_kernels.experts.triton_sort import sort
from pallas_kernels.lib.products import ALIGNED

MOST_FEW_PAIRS = 256  # that a program compares with each other
_COLUMNS = 64  # that a program copies at a time
_PART = 256  # that it copies in all


class Grouped(NamedTuple):
    """Rows by expert.

    Attributes:
        x: rows of the blocks, one after the other; or of all blocks alike.
        expert: of each block; one out of range is of a skipped pair, so that any expert will do.
        used: number of blocks, [1]; what lies behind them means nothing.
        place: row of each pair [T, k] among those of all blocks; anything for a skipped pair.
    """

    x: Float[Array, "R D"]
    expert: Int[Array, " C"]
    used: Int[Array, "1"]
    place: Int[Array, "T k"]


def few(x: Float[Array, "T D"], chosen: Int[Array, "T k"], experts: int, *, interpret: bool = False) -> Grouped:
    """Group few tokens: all of them are the rows of each block.

    The experts of a single token differ, so they are the blocks as they stand, those out of range included.
    """
    (tokens, k), pairs = chosen.shape, chosen.size
    rows = tokens + -tokens % ALIGNED
    padded = jnp.pad(x, ((0, rows - tokens), (0, 0)))
    if tokens == 1:
        place = rows * jnp.arange(k, dtype=jnp.int32)[None]
        return Grouped(padded, chosen[0], *_compat.vary_alike(jnp.full(1, k, jnp.int32), place, chosen)[:2])
    size = pl.next_power_of_2(pairs)
    outputs = _compat.triton_call(
        functools.partial(_touch, k=k, experts=experts, rows=rows, size=size),
        grid=(1,),
        out_shape=[_compat.out_like((length,), jnp.int32, chosen) for length in (pairs, 1, pairs)],
        num_warps=min(32, max(4, size * size // 2048)),
        num_stages=1,
        interpret=interpret,
        name="experts_touched",
    )(chosen.reshape(-1))
    expert, used, place = outputs
    return Grouped(padded, expert, used, place.reshape(tokens, k))


def _touch(chosen: Any, expert: Any, count: Any, place: Any, *, k: int, experts: int, rows: int, size: int) -> None:
    """The one program: list experts in the order of the pairs that are the first to choose them."""
    pair = jnp.arange(size, dtype=jnp.int32)
    exists = pair < chosen.shape[0]
    ids = pltriton.load(chosen.at[pair], mask=exists, other=-1)
    is_pair = (ids >= 0) & (ids < experts)
    is_same = (ids[:, None] == ids[None, :]) & is_pair[:, None]
    is_after = is_same & (pair[None, :] < pair[:, None])
    is_first = (is_pair & (jnp.sum(is_after.astype(jnp.int32), axis=1) == 0)).astype(jnp.int32)
    block = jnp.cumsum(is_first) - is_first
    target = jnp.where(is_first > 0, block, expert.shape[0])  # the interpreter drops what is out of range
    pltriton.store(expert.at[target], ids, mask=is_first > 0)
    count[0] = jnp.sum(is_first)
    block_of = jnp.sum(jnp.where(is_same, (is_first * block)[None, :], 0), axis=1)
    pltriton.store(place.at[pair], block_of * rows + pair // k, mask=exists)


def many(x: Float[Array, "T D"], chosen: Int[Array, "T k"], experts: int, *, interpret: bool = False) -> Grouped:
    """Group many tokens: copy their rows, 128 a block."""
    (tokens, k), pairs, width = chosen.shape, chosen.size, x.shape[1]
    rows, blocks = MOST_ROWS, block_count(chosen.size, experts, MOST_ROWS)
    blocks_of = sort(chosen, experts, rows, interpret=interpret)
    expert, first, end, used = _compat.triton_call(
        functools.partial(_close_gaps, size=pl.next_power_of_2(blocks)),
        grid=(1,),
        out_shape=[_compat.out_like((length,), jnp.int32, chosen) for length in (blocks, blocks, blocks, 1)],
        num_warps=8,
        num_stages=1,
        interpret=interpret,
        name="experts_close_gaps",
    )(*blocks_of[1:])
    copied, place = _compat.triton_call(
        functools.partial(_copy_rows, k=k, rows=rows),
        grid=(blocks * pl.cdiv(width, _PART),),
        out_shape=[
            _compat.out_like((blocks * rows, width), x.dtype, x),
            _compat.out_like((pairs,), jnp.int32, x),
        ],
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="experts_copy_rows",
    )(x, blocks_of.pairs, first, end, used)
    return Grouped(copied, expert, used, place.reshape(tokens, k))


def _close_gaps(
    expert_in: Any, first_in: Any, end_in: Any, expert: Any, first: Any, end: Any, count: Any, *, size: int
) -> None:
    """The one program: move blocks to the front, in order."""
    block = jnp.arange(size, dtype=jnp.int32)
    exists = block < expert.shape[0]
    ids = pltriton.load(expert_in.at[block], mask=exists, other=-1)
    is_used = (ids >= 0).astype(jnp.int32)
    target = jnp.where(is_used > 0, jnp.cumsum(is_used) - 1, expert.shape[0])
    pltriton.store(expert.at[target], ids, mask=is_used > 0)
    for source, out in ((first_in, first), (end_in, end)):
        pltriton.store(out.at[target], pltriton.load(source.at[block], mask=exists, other=0), mask=is_used > 0)
    count[0] = jnp.sum(is_used)


def _copy_rows(
    x: Any, pairs: Any, first: Any, end: Any, count: Any, out: Any, place: Any, *, k: int, rows: int
) -> None:
    """One program: some columns of the rows of a block."""
    width = x.shape[1]
    parts = pl.cdiv(width, _PART)
    program = pl.program_id(0)
    block, part = lax.div(program, jnp.int32(parts)), lax.rem(program, jnp.int32(parts))

    @pl.when(block < count[0])
    def _() -> None:
        at = first[block] + jnp.arange(rows, dtype=jnp.int32)
        exists = at < end[block]
        pair = pltriton.load(pairs.at[at], mask=exists, other=pairs.shape[0])
        row = block * rows + jnp.arange(rows, dtype=jnp.int32)

        @pl.when(part == 0)
        def _() -> None:
            pltriton.store(place.at[pair], row, mask=exists)

        def copy(i: Any, nothing: None) -> None:
            column = part * _PART + i * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)
            mask = exists[:, None] & (column < width)[None, :]
            values = pltriton.load(x.at[(pair // k)[:, None], column[None, :]], mask=mask, other=0.0)
            pltriton.store(out.at[row[:, None], column[None, :]], values, mask=mask)

        lax.fori_loop(0, _PART // _COLUMNS, copy, None)


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
