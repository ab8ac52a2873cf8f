"""The sorting of pairs in one kernel on Pallas' Triton backend: a program for each expert (see ``sort``).

Each program reads all of ``chosen``, once to count the pairs before its own, once to write its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from pallas_kernels import _compat
from pallas_kernels.experts.sort import Blocks, block_count

CHUNK = 4096  # pairs that a program reads at a time


def sort(chosen: Int[Array, "T k"], experts: int, rows: int, *, interpret: bool) -> Blocks:
    """See ``sort.sort``."""
    pairs = chosen.size
    blocks = block_count(pairs, experts, rows)
    chunk = min(CHUNK, pl.next_power_of_2(pairs))
    outputs = _compat.triton_call(
        functools.partial(_sort, experts=experts, rows=rows, chunk=chunk),
        grid=(experts,),
        out_shape=[_compat.out_like((size,), jnp.int32, chosen) for size in (pairs, blocks, blocks, blocks)],
        num_warps=4 if chunk <= 1024 else 8,
        num_stages=1,
        interpret=interpret,
        name="experts_sort",
    )(chosen.reshape(-1))
    return Blocks(*outputs)


def _sort(
    chosen: Any, pairs: Any, expert_of: Any, first_of: Any, end_of: Any, *, experts: int, rows: int, chunk: int
) -> None:
    """One program: the pairs and the blocks of one expert."""
    expert = pl.program_id(0)
    chunks = pl.cdiv(chosen.shape[0], chunk)

    def read(i: Any) -> tuple[jax.Array, jax.Array]:
        pair = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return pair, pltriton.load(chosen.at[pair], mask=pair < chosen.shape[0], other=-1)

    def count(i: Any, counts: Any) -> Any:
        _, ids = read(i)
        is_counted = (ids >= 0) & (ids < expert), ids == expert
        return [n + mask.astype(jnp.int32) for n, mask in zip(counts, is_counted, strict=True)]

    zeros = jnp.zeros((chunk,), jnp.int32)  # places of a chunk are summed once, at the end
    before, mine = (jnp.sum(counts) for counts in lax.fori_loop(0, chunks, count, [zeros, zeros]))
    _write_blocks(expert, before, mine, (expert_of, first_of, end_of), experts, rows)

    def write(i: Any, place: Any) -> Any:
        pair, ids = read(i)
        is_mine = (ids == expert).astype(jnp.int32)
        after = jnp.cumsum(is_mine)
        target = jnp.where(is_mine > 0, place + after - 1, pairs.shape[0])  # the interpreter drops what is out of range
        pltriton.store(pairs.at[target], pair, mask=is_mine > 0)
        return place + jnp.sum(is_mine)

    # JAX 0.11.2 gives a selection between Python's integers 64 bits, which no loop takes beside 32.
    lax.fori_loop(0, jnp.where(mine > 0, jnp.int32(chunks), jnp.int32(0)), write, before)


def _write_blocks(expert: Any, before: Any, mine: Any, out: tuple[Any, Any, Any], experts: int, rows: int) -> None:
    """Write the blocks that an expert has room for; the last expert's go on to the end."""
    expert_of, first_of, end_of = out
    begin = before // rows + expert
    end = jnp.where(expert == experts - 1, jnp.int32(expert_of.shape[0]), (before + mine) // rows + expert + 1)

    def write(block: Any, nothing: None) -> None:
        first = before + (block - begin) * rows
        expert_of[block] = jnp.where(first < before + mine, expert, -1)
        first_of[block] = first
        end_of[block] = jnp.minimum(first + rows, before + mine)

    lax.fori_loop(begin, end, write, None)
