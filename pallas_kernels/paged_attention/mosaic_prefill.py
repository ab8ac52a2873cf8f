"""Paged attention of long chunks of prompts on Hopper, on Pallas' Mosaic GPU backend.

Such calls are limited by arithmetic, not by bandwidth. One CTA attends two blocks of 64 query rows (each 64 tokens of
one query head, neighbours among the heads of a kv head) to the pages that either sees, two pages a step. Its
warpgroups:

* one producer follows the page table and starts TMA copies of pages into a ring in shared memory;
* two consumers, one for each block of rows, go through all steps with an online softmax. While one computes its
  softmax, the tensor cores multiply for the other.

Pages in fp8 are first converted to a 16-bit copy, for all sequences of the call: a CTA reads a page for only 128 query
rows, and every CTA would have to repeat the conversion.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.lib.rotary import gated
from pallas_kernels.lib.shared_memory import tiled
from pallas_kernels.paged_attention.arguments import (
    MOST_WIDENED,
    MOST_WIDENED_HEAD,
    Arguments,
    key_range,
    operand,
    page_range,
)
from pallas_kernels.paged_attention.mosaic_layouts import LOWEST, across, copy_layout
from pallas_kernels.paged_attention.rows import ROWS

_CONSUMERS = 2
_PAGES = 2  # pages of a step
_STAGES = 2  # steps in flight
_REGISTERS = (232, 40)  # of a thread of a consumer, and of the producer
_MIN_FILL = 0.45  # of the card by CTAs; below it the Triton kernel, which can split keys, measured faster

_Sums = tuple[jax.Array, jax.Array, jax.Array]  # weighted values, running maximum, sum of the weights


def refusal(args: Arguments) -> str | None:
    """Why this kernel cannot do a call that ``mosaic.refusal`` finds nothing else to object to, or None."""
    H = args.q.shape[-1]
    if args.q.dtype == jnp.float32 or H > MOST_WIDENED_HEAD:
        return (
            "The Mosaic paged attention of more than 256 query rows a kv head takes 16-bit queries of 64 or 128 "
            f"numbers; these are {args.q.dtype} of {H}."
        )
    return None


def slower(args: Arguments) -> str | None:
    """Why the Triton kernel is the faster one, or None."""
    if _compat.is_fp8(args.k_pages.dtype) and (copy := _widened_bytes(args)) > MOST_WIDENED:
        return f"Its 16-bit copy of the fp8 pages would take {copy >> 20} MiB, of at most {MOST_WIDENED >> 20}."
    if (ctas := args.q.shape[0] * args.kv_heads * _ctas(args)) <= _MIN_FILL * _compat.sm_count():
        return f"Its {ctas} CTAs would fill no more than {_MIN_FILL:.0%} of the {_compat.sm_count()} multiprocessors."
    return None


def _widened_bytes(args: Arguments) -> int:
    """Bytes of a 16-bit copy of as many pages as the page table has entries, keys and values."""
    return 2 * 2 * args.page_table.size * math.prod(args.k_pages.shape[1:])


def _widened(args: Arguments) -> Arguments:
    """The call on a copy of its pages in the dtype of the products, in the order of the page table."""
    pages = jnp.arange(args.page_table.size, dtype=jnp.int32).reshape(args.page_table.shape)
    k_pages, v_pages = (
        pool.at[args.page_table.reshape(-1)].get(mode="clip").astype(args.compute_dtype) for pool in args.arrays
    )
    return dataclasses.replace(args, k_pages=k_pages, v_pages=v_pages, page_table=pages)


def _ctas(args: Arguments) -> int:
    """CTAs of one kv head of one sequence."""
    return pl.cdiv(pl.cdiv(args.q.shape[1], ROWS) * args.group, _CONSUMERS)


@jax.jit
def paged_attention(args: Arguments) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``."""
    if _compat.is_fp8(args.k_pages.dtype):
        args = _widened(args)
    B, T, N, H = args.q.shape
    dtype, keys = args.k_pages.dtype, _PAGES * args.page_size
    rows = pl.cdiv(T, ROWS) * ROWS
    inputs = _compat.vary_alike(
        args.page_table, args.kv_length, args.q_length, args.valid_from, args.scores_scale, args.v_scale,
        jnp.pad(operand(args.q, dtype).reshape(B, T, N * H), ((0, 0), (0, rows - T), (0, 0))), *args.arrays,
    )  # fmt: skip

    def paged_prefill_kernel(*refs: Any, **scratch: Any) -> None:  # profilers show its name
        _attend(*refs, args=args, **scratch)

    results = plgpu.kernel(
        paged_prefill_kernel,
        out_type=[_compat.out_like((B, rows, N * H), args.q.dtype, inputs[0])],
        grid=(B, args.kv_heads, _ctas(args)),  # the last axis runs fastest: CTAs that run together share keys in L2
        grid_names=("b", "head", "cta"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "q_s": tiled((_CONSUMERS, ROWS, H), dtype),
            "out_s": tiled((_CONSUMERS, ROWS, H), args.q.dtype),
            "k_s": tiled((_STAGES, keys, H), dtype),
            "v_s": tiled((_STAGES, keys, H), dtype),
            "q_full": plgpu.Barrier(num_barriers=_CONSUMERS),
            **{f"{x}_full": plgpu.Barrier(num_arrivals=_PAGES, num_barriers=_STAGES) for x in "kv"},
            **{f"{x}_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES) for x in "kv"},
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs)
    out = _compat.vary_alike(*results, *inputs)[0]  # Mosaic does not mark its outputs as varying
    return gated(out[:, :T].reshape(B, T, N, H), args.gates)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The keys of a CTA; all but ``keys`` are traced scalars.

    Attributes:
        lengths: kv_length, q_length and valid_from of the sequence.
        low: first position that any of its rows sees.
        high: position past the last.
        keys: of a step.
    """

    lengths: tuple[Any, Any, Any]
    low: Any
    high: Any
    keys: int

    @property
    def steps(self) -> tuple[Any, Any]:
        """Half-open range of steps; step i has the positions from i * keys on."""
        return page_range(self.low, self.high, self.keys)

    def plain_steps(self, args: Arguments, token: Any, first: Any, count: Any) -> tuple[Any, Any]:
        """Half-open range of the steps that need no mask, of ``count`` steps from ``first``, and counted from there.

        The rows are those of tokens from ``token`` on. A step multiplies the values of the step before it, so unmasked
        steps begin one later.
        """
        last_low, _ = key_range(args, *self.lengths, token + ROWS - 1, token + ROWS - 1)
        _, first_high = key_range(args, *self.lengths, token, token)
        stop = jnp.maximum(count, 1)
        plain_from = jnp.clip(pl.cdiv(last_low, self.keys) - first + 1, 1, stop)
        return plain_from, jnp.clip(lax.div(first_high, self.keys) - first, plain_from, stop)

    def clear_unseen(self, values: Any, step: Any) -> None:
        """Zero the values of a step that no row sees: they may be NaN, and 0 * NaN is NaN.

        Both consumers do it, and write equal numbers, so that neither disturbs products of the other that read them.
        """
        begin, size, H = step * self.keys, self.keys // _PAGES, values.shape[1]

        @pl.when((begin < self.low) | (begin + self.keys > self.high))
        def _():
            for page in range(_PAGES):
                target = values.at[pl.ds(page * size, size)]
                position = plgpu.broadcasted_iota(jnp.int32, (size, H), 0, layout=copy_layout(H)) + begin + page * size
                stored = _compat.smem_load(target, copy_layout(H))
                seen = (position >= self.low) & (position < self.high)
                target[...] = jnp.where(seen, stored, jnp.zeros_like(stored))
            plgpu.commit_smem()


def _attend(
    page_table: Any, kv_length: Any, q_length: Any, valid_from: Any, scores_scale: Any, v_scale: Any,
    q: Any, k_pages: Any, v_pages: Any, out: Any, *, args: Arguments, **s: Any,
) -> None:  # fmt: skip
    """The body of one CTA; ``s`` is its scratch."""
    b, head, cta, me = (lax.axis_index(n) for n in ("b", "head", "cta", "warpgroup"))
    S, H = k_pages.shape[2:]
    blocks = q.shape[1] // ROWS * args.group
    block = (_ctas(args) - 1 - cta) * _CONSUMERS  # the last tokens see most, and come first

    def place(i: Any) -> tuple[Any, Any]:
        """First token and query head of the rows of consumer i; past the last block, those of the last block again."""
        number = jnp.minimum(block + i, blocks - 1)
        return lax.div(number, args.group) * ROWS, head * args.group + lax.rem(number, args.group)

    lengths = kv_length[b], q_length[b], valid_from[b]
    work = _Work(lengths, *key_range(args, *lengths, place(0)[0], place(_CONSUMERS - 1)[0] + ROWS - 1), _PAGES * S)

    @pl.when(me < _CONSUMERS)
    def _():
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        token, n = place(me)
        plgpu.barrier_wait(s["q_full"].at[me])
        acc, _, total = _consume(work, me, token, scores_scale[head], args, s)
        real = plgpu.broadcasted_iota(jnp.int32, (ROWS, H), 0, layout=plgpu.Layout.WGMMA) + token < q_length[b]
        factor = v_scale[head] / jnp.where(total > 0, total, jnp.ones_like(total))
        rows = s["out_s"].at[me]
        rows[...] = jnp.where(real, acc * across(factor, H), jnp.zeros_like(acc)).astype(out.dtype)
        plgpu.commit_smem()
        target = out.at[b, pl.ds(token, ROWS), pl.ds(n * H, H)]
        plgpu.copy_smem_to_gmem(rows, target, predicate=block + me < blocks)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == _CONSUMERS)
    def _():
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        for i in range(_CONSUMERS):
            token, n = place(i)
            source = q.at[b, pl.ds(token, ROWS), pl.ds(n * H, H)]
            plgpu.copy_gmem_to_smem(source, s["q_s"].at[i], s["q_full"].at[i])
        _produce(work, page_table.at[b], k_pages, v_pages, head, s)


def _produce(work: _Work, page_table: Any, k_pages: Any, v_pages: Any, head: Any, s: dict[str, Any]) -> None:
    """The producer: copy the pages of step after step into the ring, as slots come free."""
    S = k_pages.shape[2]
    first_page, end_page = page_range(work.low, work.high, S)
    first, end = work.steps

    def step(i: Any, nothing: None) -> None:
        slot, turn = lax.rem(i, _STAGES), lax.div(i, _STAGES)
        # A step may begin before the first page or end after the last. It then copies that page twice, since no other
        # page may be read.
        wanted = [jnp.clip((first + i) * _PAGES + page, first_page, end_page - 1) for page in range(_PAGES)]
        numbers = [page_table[page] for page in wanted]
        for x, pages in (("k", k_pages), ("v", v_pages)):

            @pl.when(turn > 0)
            def _(x: str = x) -> None:
                plgpu.barrier_wait(s[f"{x}_empty"].at[slot])

            for page, number in enumerate(numbers):
                target = s[f"{x}_s"].at[slot, pl.ds(page * S, S)]
                plgpu.copy_gmem_to_smem(pages.at[number, head], target, s[f"{x}_full"].at[slot])

    lax.fori_loop(0, end - first, step, None)


def _consume(work: _Work, me: Any, token: Any, scores_scale: Any, args: Arguments, s: dict[str, Any]) -> _Sums:
    """A consumer: the online softmax of its rows, tokens from ``token`` on, over all steps.

    The values of a step are multiplied together with the keys of the next, so that the tensor cores get more work at
    once. Only steps at the ends of the visible range are masked, so the loop has three parts.
    """
    keys, H = s["k_s"].shape[1:]
    wgmma, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    factor = plgpu.layout_cast(jnp.full((ROWS,), scores_scale, jnp.float32), column)  # makes products base-2 logits
    queries = _compat.smem_load(s["q_s"].at[me], wgmma)  # in registers, which spares shared memory a third of its reads
    first, end = work.steps

    def softmax(i: Any, scores: jax.Array, sums: _Sums, masked: bool) -> tuple[jax.Array, _Sums]:
        """The weights of a step's values, and sums rescaled so that the weighted values can be added."""
        plgpu.barrier_arrive(s["k_empty"].at[lax.rem(i, _STAGES)])
        acc, highest, total = sums
        if masked:
            query, position = (plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), d, layout=wgmma) for d in (0, 1))
            query, position = query + token, position + (first + i) * keys
            low, high = key_range(args, *work.lengths, query, query)
            scores = jnp.where((position >= low) & (position < high), scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(axis=1) * factor)
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(scores * across(factor, keys) - across(new, keys))
        total = total * shrink + weights.sum(axis=1)
        return weights.astype(s["v_s"].dtype), (acc * across(shrink, H), new, total)

    def begin(i: Any, carry: Any) -> Any:
        scores = pl.run_state(lambda ref: _score(ref, queries, i, s))(plgpu.ACC.init(no_scores))
        return softmax(i, scores, carry[1], True)

    def step(i: Any, carry: Any, masked: bool) -> Any:
        last, (weights, (acc, highest, total)) = i - 1, carry

        def run(refs: Any) -> None:
            _add(work, refs[0], weights, last, first + last if masked else None, s)
            _score(refs[1], queries, i, s)

        acc, scores = pl.run_state(run)((plgpu.ACC.init(acc), plgpu.ACC.init(no_scores)))
        plgpu.barrier_arrive(s["v_empty"].at[lax.rem(last, _STAGES)])
        return softmax(i, scores, (acc, highest, total), masked)

    def finish(i: Any, carry: Any) -> Any:
        weights, (acc, highest, total) = carry
        acc = pl.run_state(lambda ref: _add(work, ref, weights, i, first + i, s))(plgpu.ACC.init(acc))
        return weights, (acc, highest, total)

    no_scores = plgpu.layout_cast(jnp.zeros((ROWS, keys), jnp.float32), wgmma)
    sums = (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), wgmma),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), column),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), column),
    )
    count = end - first
    plain_from, plain_to = work.plain_steps(args, token, first, count)
    carry = lax.fori_loop(0, jnp.minimum(count, 1), begin, (no_scores.astype(s["v_s"].dtype), sums))
    for start, stop, masked in ((1, plain_from, True), (plain_from, plain_to, False), (plain_to, count, True)):
        carry = lax.fori_loop(start, stop, functools.partial(step, masked=masked), carry)
    return lax.fori_loop(jnp.maximum(count - 1, 0), count, finish, carry)[1]


def _score(scores: Any, queries: jax.Array, i: Any, s: dict[str, Any]) -> None:
    """Start the products of a consumer's queries with the keys of step i, once these are in the ring."""
    slot = lax.rem(i, _STAGES)
    plgpu.barrier_wait(s["k_full"].at[slot])
    plgpu.wgmma(scores, queries, _compat.smem_transpose(s["k_s"].at[slot]))


def _add(work: _Work, acc: Any, weights: jax.Array, i: Any, cleared: Any, s: dict[str, Any]) -> None:
    """Start to add the weighted values of step i, once these are in the ring.

    Where ``cleared`` is not None, it is the step's number in the sequence, and values that no row sees are zeroed.
    """
    slot = lax.rem(i, _STAGES)
    plgpu.barrier_wait(s["v_full"].at[slot])
    if cleared is not None:
        work.clear_unseen(s["v_s"].at[slot], cleared)
    plgpu.wgmma(acc, weights, s["v_s"].at[slot])
