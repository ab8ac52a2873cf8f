"""The Mosaic GPU kernel of paged attention: what each warpgroup of a CTA does (see ``mosaic`` for the whole)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import page_range
from pallas_kernels.paged_attention.mosaic_layouts import LOWEST, across, copy_layout
from pallas_kernels.paged_attention.rows import ROWS, Place


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up: splits of the keys, consumer warpgroups of a CTA, pages in flight.

    Each consumer has its own ``stages`` pages of the TMA ring and, over fp8 pages, ``wide`` slots of converted values.
    """

    splits: int
    consumers: int
    stages: int
    wide: int


_Sums = tuple[jax.Array, jax.Array, jax.Array]  # weighted values, running maximum, sum of the weights


@dataclasses.dataclass(frozen=True)
class Work:
    """The pages of a CTA, ``count`` of them from ``first``, and the bounds of its rows (traced scalars)."""

    first: Any
    count: Any
    edges: list[Any]
    config: Config

    def slot(self, i: Any, each: int) -> tuple[Any, Any]:
        """The slot of page i in a ring of ``each`` slots a consumer, and how often it was used before.

        A consumer has slots of its own, since who awaits a barrier must await every use of it.
        """
        consumer, j = lax.rem(i, self.config.consumers), lax.div(i, self.config.consumers)
        return consumer * each + lax.rem(j, each), lax.div(j, each)

    def seen(self, i: Any, S: int) -> Any:
        """Whether some row sees every key of page i; else its values may be NaN in places."""
        page = self.first + i
        return (page * S >= self.edges[0]) & ((page + 1) * S <= self.edges[1])


def attend(
    block_bounds: Any, row_bounds: Any, page_table: Any, scores_scale: Any, v_scale: Any, q: Any, k_pages: Any,
    v_pages: Any, *outputs: Any, config: Config, head_rows: int, out_rows: int, **s: Any,
) -> None:  # fmt: skip
    """One CTA; ``s`` is its scratch. ``outputs`` are the result, or where keys are split the sums of each split."""
    split, head, block, b, me = (lax.axis_index(n) for n in ("split", "head", "block", "b", "warpgroup"))
    S, H = k_pages.shape[2:]
    edges = [block_bounds[b, block, i] for i in range(4)]
    begin, end = page_range(edges[0], edges[1], S)
    each = pl.cdiv(end - begin, config.splits)
    first = begin + split * each
    work = Work(first, jnp.maximum(jnp.minimum(each, end - first), 0), edges, config)
    place = Place(b, head, block, q.shape[2] // (k_pages.shape[1] * H), head_rows)
    consumer, converter, producer = _registers(config)

    def leave(acc: jax.Array, highest: jax.Array, total: jax.Array) -> None:
        if config.splits == 1:
            _write_result(acc, total, v_scale[head], place, outputs[0], s)
        else:
            _write_sums(acc, highest, total, out_rows, [x.at[b, head, split, block] for x in outputs], s)

    @pl.when(me < config.consumers)
    def _():
        plgpu.set_max_registers(consumer, action="increase")

        @pl.when(work.count > 0)
        def _():
            plgpu.barrier_wait(s["q_full"])
            if config.wide:
                _split_queries(me, s)
            _merge(_consume(work, me, scores_scale[head], s), me, config, leave, s)

        @pl.when((work.count == 0) & (me == 0))
        def _():
            if config.splits == 1:
                _write_nothing(place, outputs[0], s)
            else:  # the values of an empty split stay unwritten: its total of 0 says so
                nothing = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                _write_sums(None, nothing, nothing, out_rows, [x.at[b, head, split, block] for x in outputs], s)

    def convert() -> None:
        plgpu.set_max_registers(converter, action="decrease")
        _convert(work, s)

    if config.wide:
        pl.when(me == config.consumers)(convert)

    @pl.when(me == config.consumers + min(config.wide, 1))
    def _():
        plgpu.set_max_registers(producer, action="decrease")

        @pl.when(work.count > 0)
        def _():
            first_page = page_table[b, work.first]  # asked for early: a read takes long
            for rows, tokens, n, _ in place.pieces():
                source = q.at[b, tokens, pl.ds(n * H, H)]
                plgpu.copy_gmem_to_smem(source, s["rows_s" if config.wide else "q_s"].at[rows], s["q_full"])
            plgpu.copy_gmem_to_smem(row_bounds.at[b, block], s["bounds_s"], s["q_full"])
            _produce(work, first_page, page_table.at[b], k_pages, v_pages, head, s)


def _registers(config: Config) -> tuple[int, int, int]:
    """Registers of a thread of consumers, converter and producer; together at most what the CTA is launched with."""
    return {(1, 0): (232, 0, 40), (2, 0): (232, 0, 40), (1, 1): (232, 128, 40), (2, 1): (200, 80, 24)}[
        config.consumers, min(config.wide, 1)
    ]


def _split_queries(me: Any, s: dict[str, Any]) -> None:
    """Leaves queries in ``q_s`` as products with fp8 keys want them, and in ``factor_s`` what undoes their scaling.

    The first consumer scales each row by the power of two that fills the range of fp8 and splits it into fp8 terms,
    each of which holds what the ones before it rounded away: a bfloat16 is their exact sum, unless it is tiny beside
    its row's largest. Rows that never came stay garbage.
    """

    @pl.when(me == 0)
    def _():
        H, dtype = s["rows_s"].shape[1], s["q_s"].dtype
        layout = copy_layout(H)
        rest = _compat.smem_load(s["rows_s"], layout).astype(jnp.float32)
        largest = jnp.maximum(jnp.maximum(rest.max(axis=1), (-rest).max(axis=1)), 1e-30)
        room = lax.bitcast_convert_type(_compat.max_finite(dtype) / largest, jnp.int32)
        scale = lax.bitcast_convert_type(room & 0x7F800000, jnp.float32)  # its exponent alone: a power of two
        rest = rest * plgpu.layout_cast(lax.broadcast_in_dim(scale, rest.shape, [0]), layout)
        for term in range(s["q_s"].shape[0] // ROWS):
            part = rest.astype(dtype)
            s["q_s"].at[pl.ds(term * ROWS, ROWS)][...] = part
            rest = rest - part.astype(jnp.float32)
        s["factor_s"][...] = 1 / scale
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["q_ready"])

    plgpu.barrier_wait(s["q_ready"])


def _produce(work: Work, page: Any, page_table: Any, k_pages: Any, v_pages: Any, head: Any, s: dict[str, Any]) -> None:
    """The producer: page after page into the ring, as slots come free."""
    last = work.first + work.count - 1

    def step(i: Any, page: Any) -> Any:
        slot, turn = work.slot(i, work.config.stages)
        following = page_table[jnp.minimum(work.first + i + 1, last)]
        for x, pages in (("k", k_pages), ("v", v_pages)):

            @pl.when(turn > 0)
            def _(x: str = x) -> None:
                plgpu.barrier_wait(s[f"{x}_empty"].at[slot])

            plgpu.copy_gmem_to_smem(pages.at[page, head], s[f"{x}_s"].at[slot], s[f"{x}_full"].at[slot])
        return following

    lax.fori_loop(0, work.count, step, page)


def _convert(work: Work, s: dict[str, Any]) -> None:
    """The converter: the values of every page, as float16, into slots of their consumer."""

    def step(i: Any, nothing: None) -> None:
        slot = work.slot(i, work.config.stages)[0]
        target, turn = work.slot(i, work.config.wide)
        plgpu.barrier_wait(s["v_full"].at[slot])
        values = _compat.smem_load(s["v_s"].at[slot], copy_layout(s["v_s"].shape[-1]))
        plgpu.barrier_arrive(s["v_empty"].at[slot])

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(s["wide_empty"].at[target])

        _store_seen(values, s["wide_s"].at[target], i, work)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["wide_full"].at[target])

    lax.fori_loop(0, work.count, step, None)


def _store_seen(values: jax.Array, target: Any, i: Any, work: Work) -> None:
    """Stores the values of page i, those that no row sees as zeros: they may be NaN, and 0 * NaN is NaN.

    Converts in each branch apart: LLVM takes vectors to pieces, at two instructions an element, that both would share.
    """
    S, H = values.shape
    seen = work.seen(i, S)

    @pl.when(seen)
    def _():
        target[...] = values.astype(target.dtype)

    @pl.when(jnp.logical_not(seen))
    def _():
        position = plgpu.broadcasted_iota(jnp.int32, (S, H), 0, layout=copy_layout(H)) + (work.first + i) * S
        inside = (position >= work.edges[0]) & (position < work.edges[1])
        wide = values.astype(target.dtype)
        target[...] = jnp.where(inside, wide, jnp.zeros_like(wide))


def _consume(work: Work, me: Any, scores_scale: Any, s: dict[str, Any]) -> _Sums:
    """A consumer: the online softmax over its pages, every ``consumers``-th of the CTA's.

    Only pages at the ends of the rows' intervals are masked, so the loop comes in parts. The products with the next
    page's keys are under way while this page's softmax is computed; the last page has no next, and comes apart.
    """
    config, (S, H) = work.config, s["k_s"].shape[1:]
    column = plgpu.Layout.WGMMA.reduce(1)
    each = config.consumers
    row_low, row_high = (_compat.smem_load(s["bounds_s"].at[i], column) for i in range(2))
    factor = jnp.full((ROWS,), scores_scale, jnp.float32)  # what makes products base-2 logits
    factor = plgpu.layout_cast(factor, column)
    if config.wide:
        factor = factor * _compat.smem_load(s["factor_s"], column)
    queries = [s["q_s"].at[pl.ds(term * ROWS, ROWS)] for term in range(s["q_s"].shape[0] // ROWS)]
    if config.wide:  # fp8 queries are few enough to stay in registers, which spares shared memory a third of its reads
        queries = [_compat.smem_load(q, plgpu.Layout.WGMMA_8BIT) for q in queries]

    def multiply(ref: Any, j: Any) -> None:
        slot = work.slot(j * each + me, config.stages)[0]
        plgpu.barrier_wait(s["k_full"].at[slot])
        for q in queries:
            plgpu.wgmma(ref, q, _compat.smem_transpose(s["k_s"].at[slot]))

    def products(j: Any, meanwhile: Any = lambda: None) -> tuple[jax.Array, Any]:
        """Scores of the consumer's page j; what ``meanwhile`` returns is computed while the tensor cores work."""

        def run(ref: Any) -> Any:
            multiply(ref, j)
            other = meanwhile()
            return ref[...], other

        scores, other = pl.run_scoped(run, plgpu.ACC((ROWS, S), jnp.float32))
        plgpu.barrier_arrive(s["k_empty"].at[work.slot(j * each + me, config.stages)[0]])
        return scores, other

    def add(j: Any, scores: jax.Array, sums: _Sums, masked: bool) -> _Sums:
        acc, highest, total = sums
        i = j * each + me
        if masked:
            position = plgpu.broadcasted_iota(jnp.int32, (ROWS, S), 1, layout=plgpu.Layout.WGMMA) + (work.first + i) * S
            seen = (position >= across(row_low, S)) & (position < across(row_high, S))
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(axis=1) * factor)
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(scores * across(factor, S) - across(new, S))
        total = total * shrink + weights.sum(axis=1)
        acc = _weighted_values(acc * across(shrink, H), weights, i, work, s)
        return acc, new, total

    def step(j: Any, carry: Any, masked: bool) -> Any:
        scores, sums = carry
        return products(j + 1, lambda: add(j, scores, sums, masked))

    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), column),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), column),
    )
    count = _turns(work.count - me, each)
    last = jnp.maximum(count - 1, 0)
    plain_from = jnp.minimum(_turns(pl.cdiv(work.edges[2], S) - work.first - me, each), last)
    plain_to = jnp.clip(_turns(work.edges[3] // S - work.first - me, each), plain_from, last)
    nothing = plgpu.layout_cast(jnp.zeros((ROWS, S), jnp.float32), plgpu.Layout.WGMMA)
    scores = lax.fori_loop(0, jnp.minimum(count, 1), lambda j, _: products(j)[0], nothing)
    masked, plain = functools.partial(step, masked=True), functools.partial(step, masked=False)
    carry = lax.fori_loop(0, plain_from, masked, (scores, start))
    carry = lax.fori_loop(plain_from, plain_to, plain, carry)
    scores, sums = lax.fori_loop(plain_to, last, masked, carry)
    return lax.fori_loop(last, count, lambda j, sums: add(j, scores, sums, True), sums)


def _turns(pages: Any, each: int) -> Any:
    """How many pages below ``pages`` a consumer has, counting every ``each``-th from 0."""
    return pl.cdiv(jnp.maximum(pages, 0), each)


def _weighted_values(acc: jax.Array, weights: jax.Array, i: Any, work: Work, s: dict[str, Any]) -> jax.Array:
    """``acc`` plus the weights times the values of page i, which are converted, or as TMA brought them."""
    name = "wide" if work.config.wide else "v"
    slot = work.slot(i, work.config.wide or work.config.stages)[0]
    values = s[f"{name}_s"].at[slot]
    weights = weights.astype(values.dtype)
    plgpu.barrier_wait(s[f"{name}_full"].at[slot])
    if not work.config.wide:

        @pl.when(jnp.logical_not(work.seen(i, values.shape[0])))
        def _():
            _store_seen(_compat.smem_load(values, copy_layout(values.shape[1])), values, i, work)
            plgpu.commit_smem()

    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
    plgpu.barrier_arrive(s[f"{name}_empty"].at[slot])
    return acc


def _merge(sums: _Sums, me: Any, config: Config, leave: Callable[..., None], s: dict[str, Any]) -> None:
    """Merges the consumers' sums and leaves those of the CTA."""
    acc, highest, total = sums
    if config.consumers == 1:
        leave(acc, highest, total)
        return
    column = plgpu.Layout.WGMMA.reduce(1)

    @pl.when(me > 0)
    def _():
        s["acc_s"][...] = acc
        s["sums_s"][0] = highest
        s["sums_s"][1] = total
        plgpu.barrier_arrive(s["done"])

    @pl.when(me == 0)
    def _():
        plgpu.barrier_wait(s["done"])
        other_highest, other_total = (_compat.smem_load(s["sums_s"].at[i], column) for i in range(2))
        new = jnp.maximum(highest, other_highest)
        mine, others = jnp.exp2(highest - new), jnp.exp2(other_highest - new)
        other_acc = _compat.smem_load(s["acc_s"], plgpu.Layout.WGMMA)
        H = acc.shape[1]
        leave(acc * across(mine, H) + other_acc * across(others, H), new, total * mine + other_total * others)


def _write_result(acc: jax.Array, total: jax.Array, v_scale: Any, place: Place, out: Any, s: dict[str, Any]) -> None:
    """Normalises the weighted values of all keys and writes them, zeros for rows that are no token's."""
    real = _compat.smem_load(s["bounds_s"].at[2], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
    factor = v_scale / jnp.where(total > 0, total, jnp.ones_like(total))
    H = acc.shape[1]
    values = jnp.where(across(real, H) > 0, acc * across(factor, H), jnp.zeros_like(acc))
    _copy_result(values, place, out, s)


def _write_nothing(place: Place, out: Any, s: dict[str, Any]) -> None:
    """Zeros, of a sequence that sees no key."""
    _copy_result(plgpu.layout_cast(jnp.zeros(s["out_s"].shape, jnp.float32), plgpu.Layout.WGMMA), place, out, s)


def _copy_result(values: jax.Array, place: Place, out: Any, s: dict[str, Any]) -> None:
    H = values.shape[1]
    s["out_s"][...] = values.astype(s["out_s"].dtype)
    plgpu.commit_smem()
    for rows, tokens, n, exists in place.pieces():
        plgpu.copy_smem_to_gmem(s["out_s"].at[rows], out.at[place.b, tokens, pl.ds(n * H, H)], predicate=exists)
    plgpu.wait_smem_to_gmem(0)


def _write_sums(
    acc: jax.Array | None, highest: jax.Array, total: jax.Array, out_rows: int, outputs: list[Any], s: dict[str, Any]
) -> None:
    """Writes the sums of a split: all rows of highest and total, ``out_rows`` of acc if there is any."""
    if acc is not None and "acc_s" not in s:  # straight from registers: no shared memory is left to lay it out in
        outputs[0][...] = acc
    elif acc is not None:
        s["acc_s"][...] = acc
    s["sums_s"][0] = highest
    s["sums_s"][1] = total
    plgpu.commit_smem()
    if acc is not None and "acc_s" in s:
        plgpu.copy_smem_to_gmem(s["acc_s"].at[pl.ds(0, out_rows)], outputs[0])
    for i in range(2):
        plgpu.copy_smem_to_gmem(s["sums_s"].at[i], outputs[1 + i])
    plgpu.wait_smem_to_gmem(0)
