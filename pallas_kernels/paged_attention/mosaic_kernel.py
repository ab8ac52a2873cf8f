"""The Mosaic GPU kernel of paged attention: what each warpgroup of a CTA does (``mosaic`` has the overview)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.paged_attention.mosaic_int4 import widened
from pallas_kernels.paged_attention.mosaic_layouts import LOWEST, across, copy_layout
from pallas_kernels.paged_attention.mosaic_work import Config, Shape, Work, for_items
from pallas_kernels.paged_attention.rows import ROWS, Place

_Parts = list[jax.Array]  # columns of weighted values
_Sums = tuple[_Parts, jax.Array, jax.Array]  # weighted values, running maximum, sum of the weights


def attend(
    block_bounds: Any, row_bounds: Any, page_table: Any, scores_scale: Any, v_scale: Any, q: Any, *refs: Any,
    shape: Shape, **s: Any,
) -> None:  # fmt: skip
    """The body of one CTA; ``s`` is its scratch.

    ``refs`` are the arrays of the pools, keys first, and the outputs: the result, or the sums of each split of keys.
    """
    config = shape.config
    arrays = 3 if config.is_packed else 1
    k_pages, v_pages, outputs = refs[:arrays], refs[arrays : 2 * arrays], refs[2 * arrays :]
    cta, me = lax.axis_index("cta"), lax.axis_index("warpgroup")
    consumer, converter, producer = _registers(config)

    @pl.when(me < config.consumers)
    def _():
        plgpu.set_max_registers(consumer, action="increase")
        if config.merges:
            plgpu.barrier_arrive(s["free"])

        def step(n: Any, work: Work) -> None:
            _attend_item(work, me, (scores_scale, v_scale), outputs, s)

        for_items(cta, block_bounds, shape, step)

    def convert(parts: str) -> None:
        plgpu.set_max_registers(converter, action="decrease")

        def step(n: Any, work: Work) -> None:
            if config.splits_queries:
                plgpu.barrier_wait(s["q_full"])
                _split_queries(s)
            _convert(parts, work, s)

        for_items(cta, block_bounds, shape, step)

    for number, parts in enumerate(config.converters):
        pl.when(me == config.consumers + number)(functools.partial(convert, parts))

    @pl.when(me == config.consumers + len(config.converters))
    def _():
        plgpu.set_max_registers(producer, action="decrease")

        def step(n: Any, work: Work) -> None:
            _fetch_item(n, work, row_bounds, page_table, (q, k_pages, v_pages), s)

        for_items(cta, block_bounds, shape, step)


def _attend_item(work: Work, me: Any, scales: tuple[Any, Any], outputs: Any, s: dict[str, Any]) -> None:
    """A consumer's part of an item; ``scales`` are references to those of products and of values."""
    config, head = work.shape.config, work.place.head
    scores_scale, v_scale = scales[0][head], scales[1][head]  # loaded early, since the latency is long
    plgpu.barrier_wait(s["q_full"])
    if config.splits_queries:
        plgpu.barrier_wait(s["q_ready"])
    column, mine = plgpu.Layout.WGMMA.reduce(1), lax.rem(me, config.blocks)
    low, high, exists = (_compat.smem_load(s["bounds_s"].at[mine, i], column) for i in range(3))
    sums = _merge(_consume(work, me, (low, high), scores_scale, s), me, config, s)
    if config.splits == 1:
        _write_result(sums, exists, v_scale, work, me, outputs[0], s)
    else:
        _write_sums(sums, work, me, outputs, s)
    is_late = (work.turns(me) == 0) | (not _held(config, work.shape.head_size))
    pl.when(is_late)(lambda: plgpu.barrier_arrive(s["q_empty"]))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if config.merges:
        plgpu.barrier_arrive(s["free"])


def _fetch_item(
    n: Any, work: Work, row_bounds: Any, page_table: Any, arrays: tuple[Any, Any, Any], s: dict[str, Any]
) -> None:
    """The producer's part of item ``n`` of a CTA: queries, bounds and pages; ``arrays`` are q and those of pools."""
    (q, k_pages, v_pages), b, H, config = arrays, work.place.b, work.shape.head_size, work.shape.config
    likely = page_table[b, 0]  # loaded before the number of the first page is known, since the latency is long

    @pl.when(n > 0)
    def _():
        plgpu.barrier_wait(s["q_empty"])

    for consumer in range(config.blocks):
        for rows, tokens, n_head, _ in _place_of(work, consumer).pieces():
            source = q.at[b, tokens, pl.ds(n_head * H, H)]
            target = s["rows_s" if config.splits_queries else "q_s"]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(consumer * ROWS + rows.start, rows.size)], s["q_full"])
    blocks = pl.ds(work.place.block * config.blocks, config.blocks)
    plgpu.copy_gmem_to_smem(row_bounds.at[b, blocks], s["bounds_s"], s["q_full"])
    is_other = (work.first > 0) & (work.count > 0)
    page = lax.cond(is_other, lambda: page_table[b, work.first], lambda: likely)
    _produce(work, page, page_table.at[b], k_pages, v_pages, s)


def _place_of(work: Work, me: Any) -> Place:
    """The rows of a consumer, by the number of its own block."""
    blocks = work.shape.config.blocks
    return dataclasses.replace(work.place, block=work.place.block * blocks + me) if blocks > 1 else work.place


def _registers(config: Config) -> tuple[int, int, int]:
    """Registers of a thread of consumer, converter and producer; together at most what the CTA starts with."""
    return {
        (1, 0): (232, 0, 40),
        (2, 0): (232, 0, 40),
        (1, 1): (232, 128, 40),
        (2, 1): (208, 72, 24) if config.is_shared else (200, 80, 24),
        (2, 2): (152, 72, 24),
    }[config.consumers, len(config.converters)]


def _split_queries(s: dict[str, Any]) -> None:
    """The converter's first task: write the queries to ``q_s`` as fp8 terms, and the inverse of their scales.

    It scales each row by the power of two that fills the range of fp8, and splits it into fp8 terms. Each term holds
    what the terms before it rounded away: a bfloat16 is their exact sum, unless it is tiny beside the largest number of
    its row. Rows that were not copied stay garbage. Half of the rows at a time fit into registers. The inverse scales
    go to ``factor_s``.
    """
    H, dtype = s["rows_s"].shape[1], s["q_s"].dtype
    layout, size = copy_layout(H), ROWS // 2
    for start in range(0, ROWS, size):
        rows = s["rows_s"].at[pl.ds(start, size)]
        # Eight neighbours of 32 bits cross the tiles' swizzle: Mosaic finds no plan without bank conflicts for them.
        rest = _compat.smem_load(rows, layout, optimized=rows.dtype.itemsize < 4).astype(jnp.float32)
        largest = jnp.maximum(jnp.maximum(rest, -rest).max(axis=1), 1e-30)
        room = lax.bitcast_convert_type(_compat.max_finite(dtype) / largest, jnp.int32)
        scale = lax.bitcast_convert_type(room & 0x7F800000, jnp.float32)  # its exponent alone: a power of two
        rest = rest * plgpu.layout_cast(lax.broadcast_in_dim(scale, rest.shape, [0]), layout)
        for term in range(s["q_s"].shape[0] // ROWS):
            part = rest.astype(dtype)
            s["q_s"].at[pl.ds(term * ROWS + start, size)][...] = part
            rest = rest - part.astype(jnp.float32)
        s["factor_s"].at[pl.ds(start, size)][...] = 1 / scale
    plgpu.commit_smem()
    plgpu.barrier_arrive(s["q_ready"])
    plgpu.barrier_arrive(s["q_empty"])


def _produce(work: Work, page: Any, page_table: Any, k_pages: Any, v_pages: Any, s: dict[str, Any]) -> None:
    """The producer: copy page after page of an item into the ring, as slots come free."""
    last = work.first + work.count - 1

    def step(i: Any, page: Any) -> Any:
        slot, turn = work.slot(i, work.shape.config.stages)
        following = page_table[jnp.minimum(work.first + i + 1, last)]
        for x, pages in (("k", k_pages), ("v", v_pages)):

            @pl.when(turn > 0)
            def _(x: str = x) -> None:
                plgpu.barrier_wait(s[f"{x}_empty"].at[slot])

            numbers, *affine = (array.at[page, work.place.head] for array in pages)
            plgpu.copy_gmem_to_smem(numbers, s[f"{x}_s"].at[slot], s[f"{x}_full"].at[slot])
            for row, of_tokens in enumerate(affine):
                plgpu.copy_gmem_to_smem(of_tokens, s[f"{x}_affine"].at[slot, row], s[f"{x}_full"].at[slot])
        return following

    lax.fori_loop(0, work.count, step, page)


def _convert(parts: str, work: Work, s: dict[str, Any]) -> None:
    """A converter: write keys ("k") or values ("v") of every page of an item as float16 into slots of its consumer."""
    config = work.shape.config

    def convert(x: str, i: Any) -> None:
        slot = work.slot(i, config.stages)[0]
        wide, turn = work.slot(i, config.wide)
        source, target = s[f"{x}_s"].at[slot], s[f"wide_{x}_s"].at[wide]
        plgpu.barrier_wait(s[f"{x}_full"].at[slot])

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(s[f"wide_{x}_empty"].at[wide])

        for rows in _row_pieces(target):
            columns: tuple[jax.Array, ...]
            if config.is_packed:
                columns = widened(source.at[rows], s[f"{x}_affine"].at[slot, :, rows])
            else:
                columns = (_compat.smem_load(source.at[rows], copy_layout(source.shape[1])),)
            for part, values in enumerate(columns):
                target.at[rows, pl.ds(part * values.shape[1], values.shape[1])][...] = values.astype(target.dtype)
        plgpu.commit_smem()
        if x == "v":
            _hide_unseen(target, i, work)
        plgpu.barrier_arrive(s[f"wide_{x}_full"].at[wide])
        plgpu.barrier_arrive(s[f"{x}_empty"].at[slot])  # not earlier: an arrival does not wait for loads to finish

    def step(i: Any, nothing: None) -> None:
        for x in parts:
            convert(x, i)

    lax.fori_loop(0, work.count, step, None)


def _row_pieces(page: Any) -> list[Any]:
    """Rows of a page, so many at a time that a thread has 64 numbers of them."""
    S, H = page.shape
    rows = min(S, 64 * 128 // H)
    return [pl.ds(first, rows) for first in range(0, S, rows)]


def _hide_unseen(values: Any, i: Any, work: Work) -> None:
    """Put zeros into the values of page i where no row sees them: they may be NaN, and 0 * NaN is NaN."""

    @pl.when(jnp.logical_not(work.seen(i)))
    def _():
        S, H = values.shape
        for rows in _row_pieces(values):
            part, start = values.at[rows], (work.first + i) * S + rows.start
            position = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=copy_layout(H)) + start
            inside = (position >= work.edges[0]) & (position < work.edges[1])
            stored = _compat.smem_load(part, copy_layout(H))
            part[...] = jnp.where(inside, stored, jnp.zeros_like(stored))
        plgpu.commit_smem()


def _consume(work: Work, me: Any, bounds: tuple[jax.Array, jax.Array], scores_scale: Any, s: dict[str, Any]) -> _Sums:
    """A consumer: the online softmax over its pages of an item.

    All pages run the same copy of the code, since code that runs for the first time has to be read from memory.
    """
    config, S, H = work.shape.config, work.shape.page_size, work.shape.head_size
    column = plgpu.Layout.WGMMA.reduce(1)
    factor = jnp.full((ROWS,), scores_scale, jnp.float32)  # makes products base-2 logits
    factor = plgpu.layout_cast(factor, column)
    if config.splits_queries:
        factor = factor * _compat.smem_load(s["factor_s"], column)
    if config.is_shared:
        queries = [s["q_s"].at[pl.ds(me * ROWS, ROWS)]]
    else:
        queries = [s["q_s"].at[pl.ds(term * ROWS, ROWS)] for term in range(s["q_s"].shape[0] // ROWS)]
    if held := _held(config, H):
        layout = plgpu.Layout.WGMMA_8BIT if config.splits_queries else plgpu.Layout.WGMMA
        tiles = config.splits_queries or work.shape.tokens > 1  # loads of untiled rows have bank conflicts
        queries = [_compat.smem_load(q, layout, optimized=tiles) for q in queries]

    def products(i: Any) -> jax.Array:
        ring, slots = ("wide_k", config.wide) if config.converts_keys else ("k", config.stages)
        slot = work.slot(i, slots)[0]
        plgpu.barrier_wait(s[f"{ring}_full"].at[slot])

        def run(ref: Any) -> jax.Array:
            for q in queries:
                plgpu.wgmma(ref, q, _compat.smem_transpose(s[f"{ring}_s"].at[slot]))
            return ref[...]

        scores = pl.run_scoped(run, plgpu.ACC((ROWS, S), jnp.float32))
        plgpu.barrier_arrive(s[f"{ring}_empty"].at[slot])
        return scores

    def masked(scores: jax.Array, i: Any) -> jax.Array:
        position = plgpu.broadcasted_iota(jnp.int32, (ROWS, S), 1, layout=plgpu.Layout.WGMMA) + (work.first + i) * S
        seen = (position >= across(bounds[0], S)) & (position < across(bounds[1], S))
        return jnp.where(seen, scores, -jnp.inf)

    def step(j: Any, sums: _Sums) -> _Sums:
        acc, highest, total = sums
        i = work.begin(me) + j * config.turns
        scores = products(i)
        if held:  # not earlier: arriving at a barrier does not wait for the loads of the queries to finish
            pl.when(j == 0)(lambda: plgpu.barrier_arrive(s["q_empty"]))
        scores = lax.cond(work.plain(i), lambda: scores, lambda: masked(scores, i))
        new = jnp.maximum(highest, scores.max(axis=1) * factor)
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(scores * across(factor, S) - across(new, S))
        total = total * shrink + weights.sum(axis=1)
        acc = _weighted_values([part * across(shrink, part.shape[1]) for part in acc], weights, i, work, s)
        return acc, new, total

    width = H // _parts(config, H)
    start = (
        [plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA) for _ in range(0, H, width)],
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), column),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), column),
    )
    return lax.fori_loop(0, work.turns(me), step, start)


def _held(config: Config, H: int) -> bool:
    """Whether consumers hold queries in registers, which spares shared memory a third of its reads.

    Queries of heads of 64 stay in shared memory: they are as large as the weights, and ptxas (12.9 and 13.0, not 13.5)
    lets the weights overwrite them before the products of the next page.
    """
    return H == 128 or (config.wide > 0 and H > 128 and not config.is_shared)


def _parts(config: Config, H: int) -> int:
    """Products of weights and values: two of 128 columns where 4 warpgroups start with 128 registers a thread."""
    return H // 128 if config.is_shared and config.wide else 1


def _weighted_values(acc: _Parts, weights: jax.Array, i: Any, work: Work, s: dict[str, Any]) -> _Parts:
    """``acc`` plus the weights times the values of page i, from the converted ring or from the ring of pages."""
    config = work.shape.config
    name = "wide_v" if config.wide else "v"
    slot = work.slot(i, config.wide or config.stages)[0]
    values = s[f"{name}_s"].at[slot]
    weights = weights.astype(values.dtype)
    plgpu.barrier_wait(s[f"{name}_full"].at[slot])
    if not config.wide:
        _hide_unseen(values, i, work)
    width = acc[0].shape[1]

    def multiply(refs: list[Any]) -> None:
        for part, ref in enumerate(refs):
            plgpu.wgmma(ref, weights, values.at[:, pl.ds(part * width, width)] if len(refs) > 1 else values)

    acc = pl.run_state(multiply)([plgpu.ACC.init(part) for part in acc])
    plgpu.barrier_arrive(s[f"{name}_empty"].at[slot])
    return acc


def _merge(sums: _Sums, me: Any, config: Config, s: dict[str, Any]) -> _Sums:
    """Merge the two consumers' sums: each sends half of its columns to the other, and merges the other half."""
    if not config.merges:
        return sums
    [acc], highest, total = sums
    half, column = acc.shape[1] // 2, plgpu.Layout.WGMMA.reduce(1)
    left, right = acc[:, :half], acc[:, half:]
    first = lax.broadcast_in_dim(me == 0, left.shape, ())
    plgpu.barrier_wait(s["free"])
    s["acc_s"].at[1 - me][...] = jnp.where(first, right, left)
    s["sums_s"].at[me, 0][...] = highest
    s["sums_s"].at[me, 1][...] = total
    plgpu.barrier_arrive(s["halves_sent"])
    plgpu.barrier_wait(s["halves_sent"])
    other_acc = _compat.smem_load(s["acc_s"].at[me], plgpu.Layout.WGMMA)
    other_highest, other_total = (_compat.smem_load(s["sums_s"].at[1 - me, i], column) for i in range(2))
    new = jnp.maximum(highest, other_highest)
    shrink, other_shrink = jnp.exp2(highest - new), jnp.exp2(other_highest - new)
    acc = jnp.where(first, left, right) * across(shrink, half) + other_acc * across(other_shrink, half)
    return [acc], new, total * shrink + other_total * other_shrink


def _write_result(
    sums: _Sums, exists: jax.Array, v_scale: Any, work: Work, me: Any, out: Any, s: dict[str, Any]
) -> None:
    """Normalise the weighted values of all keys and write them, with zeros for rows that are no token's."""
    [acc], _, total = sums
    config, place, width = work.shape.config, _place_of(work, me), acc.shape[1]
    factor = v_scale / jnp.where(total > 0, total, jnp.ones_like(total))
    values = jnp.where(across(exists, width) > 0, acc * across(factor, width), jnp.zeros_like(acc))
    s["out_s"].at[me][...] = values.astype(s["out_s"].dtype)
    plgpu.commit_smem()
    for rows, tokens, n, is_head in place.pieces():
        columns = pl.ds((n * 2 + me if config.merges else n) * width, width)
        plgpu.copy_smem_to_gmem(s["out_s"].at[me, rows], out.at[place.b, tokens, columns], predicate=is_head)


def _write_sums(sums: _Sums, work: Work, me: Any, outputs: Any, s: dict[str, Any]) -> None:
    """Write the sums of a split. A split without keys writes no values: its total of 0 says that there are none."""
    acc, highest, total = sums
    config, place, width = work.shape.config, _place_of(work, me), acc[0].shape[1]
    targets = [x.at[place.b, place.head, work.split, place.block] for x in outputs]
    staged = s["sums_s"].at[config.merges * config.consumers + me]
    staged.at[0][...] = highest
    staged.at[1][...] = total
    if config.merges:
        s["acc_s"].at[me][...] = acc[0]
    else:  # straight from registers, since no shared memory is left to stage it

        @pl.when(work.count > 0)
        def _():
            for part, values in enumerate(acc):
                targets[0].at[:, pl.ds(part * width, width)][...] = values

    plgpu.commit_smem()
    if config.merges:
        rows, columns = pl.ds(0, targets[0].shape[0]), pl.ds(me * width, width)
        plgpu.copy_smem_to_gmem(s["acc_s"].at[me, rows], targets[0].at[:, columns], predicate=work.count > 0)
    for i in range(2):
        predicate = None if config.is_shared else me == 0
        plgpu.copy_smem_to_gmem(staged.at[i], targets[1 + i], predicate=predicate)
