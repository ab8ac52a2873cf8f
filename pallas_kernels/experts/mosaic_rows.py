"""What the Mosaic kernels need to know of the routing, by small kernels on Pallas' Triton backend.

TMA copies no scattered rows, so they are copied by expert first; CTAs that go from block to block by themselves need
blocks without gaps.
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

_COLUMNS = 64  # that a program copies at a time
_PART = 256  # that it copies in all


class Grouped(NamedTuple):
    """Rows by expert.

    Attributes:
        x: rows of the blocks, one after the other.
        expert: of each block; one out of range is of a skipped pair, so that any expert will do.
        used: number of blocks, [1]; what lies behind them means nothing.
        place: row of each pair [T, k] among those of all blocks; anything for a skipped pair.
    """

    x: Float[Array, "R D"]
    expert: Int[Array, " C"]
    used: Int[Array, "1"]
    place: Int[Array, "T k"]


def group(x: Float[Array, "T D"], chosen: Int[Array, "T k"], experts: int, *, interpret: bool = False) -> Grouped:
    """Copy rows by expert, 128 a block."""
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
