"""Paged attention of decode, verify and draft blocks on Hopper, on Pallas' Mosaic GPU backend.

One CTA attends up to 64 query rows of one kv head (row = token * group + head of the group) to one split of the pages
that its sequence sees, a page a step. Its warpgroups:

* one producer follows the page table and starts TMA copies of pages into a ring in shared memory;
* over fp8 pages, converters rewrite each page as float16, exactly, into a second, small ring;
* consumers take pages in turn, each with its own online softmax: S = Q K^T by wgmma from shared memory, P V by wgmma
  with P in registers. At the end they merge and the CTA writes its sums, which ``combine`` merges over the splits.

What a row sees is one interval of positions, computed outside (``_bounds``) from the shared mask; a page needs a mask
only at the ends of its rows' intervals, and values that no row sees are zeroed there, since they may be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments, key_range
from pallas_kernels.paged_attention.combine import combine_jnp
from pallas_kernels.paged_attention.splits import best_splits

_LOWEST = -1e30
_ROWS = 64  # rows of a wgmma
_SHARED_MEMORY = 227 * 1024
_MOST_ROW_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up: splits of the keys, consumer and converter warpgroups of a CTA, pages in flight."""

    splits: int
    consumers: int
    converters: int
    stages: int  # pages of the TMA ring; a multiple of the consumers where they read it themselves


def refusal(args: Arguments) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    T, H = args.q.shape[1], args.q.shape[-1]
    dtype = args.k_pages.dtype
    if dtype not in (jnp.bfloat16, jnp.float16) and not _compat.is_fp8(dtype):
        return f"The Mosaic paged attention reads bf16, f16, e4m3 and e5m2 pages; these are {dtype}."
    if H not in (64, 128, 256):
        return f"The Mosaic paged attention needs a head size of 64, 128 or 256; this is {H}."
    if args.page_size != 64:
        return f"The Mosaic paged attention needs pages of 64 tokens; these hold {args.page_size}."
    if T * args.group > _MOST_ROW_BLOCKS * _ROWS:
        return (
            f"The Mosaic paged attention is for decode, verify and draft blocks, up to {_MOST_ROW_BLOCKS * _ROWS} query "
            f"rows a kv head; {T} tokens x {args.group} heads are {T * args.group}."
        )
    return None


def is_fastest(args: Arguments) -> bool:
    """Whether this call is at least as fast here as on the Triton backend (BENCH.md)."""
    return args.q.shape[1] * args.group <= _ROWS


def default_config(args: Arguments) -> Config:
    """The configuration that measured best on an H200 for this shape (BENCH.md)."""
    B, T, _, H = args.q.shape
    consumers = 1 if H > 128 else 2
    converters = 1 if _compat.is_fp8(args.k_pages.dtype) else 0
    stages = consumers
    while _shared_memory(args, Config(1, consumers, converters, stages + consumers)) <= _SHARED_MEMORY - 4096:
        stages += consumers
    programs = B * args.kv_heads * pl.cdiv(T * args.group, _ROWS)
    splits = best_splits(programs, args.page_table.shape[1], _compat.sm_count())
    return Config(splits=splits, consumers=consumers, converters=converters, stages=min(stages, 8))


def _shared_memory(args: Arguments, config: Config) -> int:
    """Bytes of shared memory of a CTA, barriers apart."""
    H, S = args.q.shape[-1], args.page_size
    ring = config.stages * 2 * S * H * args.k_pages.dtype.itemsize
    converted = config.consumers * 2 * S * H * 2 if config.converters else 0
    return ring + converted + _ROWS * H * (2 + 4)


def paged_attention(args: Arguments, *, config: Config | None = None) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``."""
    if reason := refusal(args):
        raise NotImplementedError(reason)
    config = config or default_config(args)
    B, T, _, H = args.q.shape
    K, rows = args.kv_heads, T * args.group
    blocks = pl.cdiv(rows, _ROWS)
    out_rows = _ROWS if blocks > 1 else pl.cdiv(rows, 8) * 8
    row_bounds, block_bounds = _bounds(args, blocks)
    inputs = _compat.vary_alike(
        block_bounds, row_bounds, args.page_table, args.scores_scale, _packed(args, blocks), args.k_pages, args.v_pages
    )
    kernel = functools.partial(_attend, config=config, out_rows=out_rows)
    partial = [(B, K, config.splits, blocks, out_rows, H), *[(B, K, config.splits, blocks, _ROWS)] * 2]
    acc, highest, total = plgpu.kernel(
        kernel,
        out_type=[_compat.out_like(shape, jnp.float32, inputs[0]) for shape in partial],
        grid=(config.splits, K, blocks, B),
        grid_names=("split", "head", "block", "b"),
        num_threads=config.consumers + config.converters + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(args, config),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs)
    merge = lambda x: x.reshape(*x.shape[:3], -1, *x.shape[5:])  # noqa: E731
    sums = [merge(x[:, :, :, :, :out_rows]) for x in (highest, total)]
    return combine_jnp(merge(acc), *sums, args=args)


def _packed(args: Arguments, blocks: int) -> Float[Array, "B K R H"]:
    """Queries as rows of each kv head, padded to whole blocks, in the dtype of the products."""
    B, T, N, H = args.q.shape
    K, group = args.kv_heads, args.group
    q = args.q
    if args.compute_dtype == jnp.float16 and q.dtype != jnp.float16:
        limit = _compat.max_finite(jnp.float16)
        q = jnp.clip(q.astype(jnp.float32), -limit, limit)
    q = jnp.swapaxes(q.reshape(B, T, K, group, H), 1, 2).reshape(B, K, T * group, H)
    return jnp.pad(q, ((0, 0), (0, 0), (0, blocks * _ROWS - T * group), (0, 0))).astype(args.compute_dtype)


def _bounds(args: Arguments, blocks: int) -> tuple[Int[Array, "B blocks 2 R"], Int[Array, "B blocks 4"]]:
    """The positions that each row sees, and what the kernel needs to know of a block of rows.

    Returns:
      First position that a row sees and the one past the last. A row of padding or of a token past ``q_length`` takes
      the bounds of the last token, so as not to need a mask of its own: nobody reads it.
      Of each block: the union of its rows' intervals and their intersection, each as first and past the last.
    """
    T = args.q.shape[1]
    row = jnp.arange(blocks * _ROWS, dtype=jnp.int32).reshape(1, blocks, _ROWS)
    lengths = (x[:, None, None] for x in (args.kv_length, args.q_length, args.valid_from))
    kv_length, q_length, valid_from = lengths
    last = jnp.maximum(q_length - 1, 0)
    token = jnp.minimum(jnp.minimum(row // args.group, T - 1), last)
    low, high = key_range(args, kv_length, q_length, valid_from, token, token)
    low, high = jnp.broadcast_arrays(low, jnp.maximum(high, low))
    any_row = jnp.minimum(row[:, :, :1] // args.group, T - 1) <= q_length - 1  # whether the block has a token at all
    union_low, union_high = low.min(2), jnp.where(any_row[:, :, 0], high.max(2), low.min(2))
    block = jnp.stack([union_low, union_high, low.max(2), high.min(2)], axis=-1)
    return jnp.stack([low, high], axis=2), block


def _scratch(args: Arguments, config: Config) -> dict[str, Any]:
    H, S, dtype = args.q.shape[-1], args.page_size, args.k_pages.dtype
    compute, consumers = args.compute_dtype, config.consumers
    scratch = {
        "q_s": _tiled((_ROWS, H), compute),
        "bounds_s": plgpu.SMEM((2, _ROWS), jnp.int32),
        "k_s": _tiled((config.stages, S, H), dtype),
        "v_s": _tiled((config.stages, S, H), dtype),
        "acc_s": _tiled((_ROWS, H), jnp.float32),
        "sums_s": plgpu.SMEM((2, _ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=max(config.converters, 1), num_barriers=config.stages),
        "done": plgpu.Barrier(),
    }
    if config.converters:
        scratch |= {
            "k16_s": _tiled((consumers, S, H), compute),
            "v16_s": _tiled((consumers, S, H), compute),
            "k_ready": plgpu.Barrier(num_barriers=consumers),
            "v_ready": plgpu.Barrier(num_barriers=consumers),
            "k_free": plgpu.Barrier(num_barriers=consumers),
            "v_free": plgpu.Barrier(num_barriers=consumers),
        }
    return scratch


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out for TMA and wgmma: tiles of 8 rows, swizzled as wide as a row allows (128 bytes)."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * size)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _attend(
    block_bounds: Any, row_bounds: Any, page_table: Any, scores_scale: Any, q: Any, k_pages: Any, v_pages: Any,
    acc: Any, highest: Any, total: Any, *, config: Config, out_rows: int, **s: Any,
) -> None:  # fmt: skip
    """One CTA; ``s`` is its scratch."""
    split, head, block, b, me = (lax.axis_index(n) for n in ("split", "head", "block", "b", "warpgroup"))
    S = k_pages.shape[2]
    edges = [block_bounds[b, block, i] for i in range(4)]
    low = edges[0] // S
    each = pl.cdiv(jnp.maximum(pl.cdiv(edges[1], S) - low, 0), config.splits)
    first = low + split * each
    count = jnp.maximum(jnp.minimum(each, pl.cdiv(edges[1], S) - first), 0)
    work = _Work(first, count, edges, config)
    place = (b, head, split, block)

    @pl.when(me < config.consumers)
    def _():
        plgpu.set_max_registers(_registers(config)[0], action="increase")

        @pl.when(count > 0)
        def _():
            plgpu.barrier_wait(s["q_full"])
            sums = _consume(work, me, scores_scale[head], s)
            _merge(sums, me, count, config, out_rows, [x.at[place] for x in (acc, highest, total)], s)

        @pl.when((count == 0) & (me == 0))
        def _():  # the values of an empty split stay unwritten: its total of 0 says so
            s["sums_s"][...] = jnp.zeros((2, _ROWS), jnp.float32)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["sums_s"].at[0], highest.at[place])
            plgpu.copy_smem_to_gmem(s["sums_s"].at[1], total.at[place])
            plgpu.wait_smem_to_gmem(0)

    for i in range(config.converters):

        @pl.when(me == config.consumers + i)
        def _(i: int = i) -> None:
            plgpu.set_max_registers(_registers(config)[1], action="decrease")
            _convert(work, i, s)

    @pl.when(me == config.consumers + config.converters)
    def _():
        plgpu.set_max_registers(_registers(config)[2], action="decrease")

        @pl.when(count > 0)
        def _():
            plgpu.copy_gmem_to_smem(q.at[b, head, pl.ds(block * _ROWS, _ROWS)], s["q_s"], s["q_full"])
            plgpu.copy_gmem_to_smem(row_bounds.at[b, block], s["bounds_s"], s["q_full"])

        _produce(work, page_table.at[b], k_pages, v_pages, head, s)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The pages of a CTA, ``first`` and ``count`` of them, and the bounds of its rows (traced scalars)."""

    first: Any
    count: Any
    edges: list[Any]
    config: Config


def _registers(config: Config) -> tuple[int, int, int]:
    """Registers of a thread of consumers, converters and producer; together what the CTA is launched with."""
    match config.consumers, config.converters:
        case 1, 0:
            return 232, 0, 40
        case 2, 0:
            return 232, 0, 40
        case 1, 1:
            return 256 - 16, 128, 40
        case 2, 1:
            return 200, 72, 32
        case 2, 2:
            return 168, 56, 24
        case _:
            return 200, 56, 24


def _produce(work: _Work, page_table: Any, k_pages: Any, v_pages: Any, head: Any, s: dict[str, Any]) -> None:
    """The producer: page after page into the ring, as slots come free."""
    config = work.config
    last = work.first + work.count - 1

    def step(i: Any, page: Any) -> Any:
        slot, turn = _slot(i, config)
        following = page_table[jnp.minimum(work.first + i + 1, last)]  # asked for early: a read takes long

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(s["empty"].at[slot])

        plgpu.copy_gmem_to_smem(k_pages.at[page, head], s["k_s"].at[slot], s["full"].at[slot])
        plgpu.copy_gmem_to_smem(v_pages.at[page, head], s["v_s"].at[slot], s["full"].at[slot])
        return following

    @pl.when(work.count > 0)
    def _():
        lax.fori_loop(0, work.count, step, page_table[work.first])


def _slot(i: Any, config: Config) -> tuple[Any, Any]:
    """The slot of the ring of page i, and how often that slot was used before.

    Where consumers read the ring themselves each has slots of its own, so that it awaits every use of them.
    """
    if config.converters:
        return lax.rem(i, config.stages), lax.div(i, config.stages)
    mine, j, of_mine = lax.rem(i, config.consumers), lax.div(i, config.consumers), config.stages // config.consumers
    return mine * of_mine + lax.rem(j, of_mine), lax.div(j, of_mine)


def _convert(work: _Work, index: int, s: dict[str, Any]) -> None:
    """A converter: its share (keys, values or both) of every page of the ring as float16 into the consumers' slots."""
    config = work.config
    both = ["k", "v"] if config.converters == 1 else [["k", "v"][index]]

    def step(i: Any, _: None) -> None:
        slot, consumer, turn = lax.rem(i, config.stages), lax.rem(i, config.consumers), lax.div(i, config.consumers)
        plgpu.barrier_wait(s["full"].at[slot])
        narrow = {x: _compat.smem_load(s[f"{x}_s"].at[slot], _copy_layout(s[f"{x}_s"].shape[-1])) for x in both}
        plgpu.barrier_arrive(s["empty"].at[slot])
        for x in both:

            @pl.when(turn > 0)
            def _(x: str = x) -> None:
                plgpu.barrier_wait(s[f"{x}_free"].at[consumer])

            wide = narrow[x].astype(s[f"{x}16_s"].dtype)
            target = s[f"{x}16_s"].at[consumer]
            if x == "v":
                _store_seen(wide, target, work.first + i, work.edges)
            else:
                target[...] = wide
            plgpu.commit_smem()
            plgpu.barrier_arrive(s[f"{x}_ready"].at[consumer])

    lax.fori_loop(0, work.count, step, None)


def _store_seen(values: jax.Array, target: Any, page: Any, edges: list[Any]) -> None:
    """Stores the values of a page, those that no row sees as zeros: they may be NaN, and 0 * NaN is NaN."""
    S, H = values.shape
    inside = (page * S >= edges[0]) & ((page + 1) * S <= edges[1])

    @pl.when(inside)
    def _():
        target[...] = values

    @pl.when(jnp.logical_not(inside))
    def _():
        position = plgpu.broadcasted_iota(jnp.int32, (S, H), 0, layout=_copy_layout(H)) + page * S
        target[...] = jnp.where((position >= edges[0]) & (position < edges[1]), values, jnp.zeros_like(values))


def _copy_layout(H: int) -> Any:
    """Registers of a converter: 8 neighbouring elements a lane, so that a page is read and written without conflicts."""
    lanes = H // 8 if H < 256 else 16
    rows = 32 // lanes
    return plgpu.Layout.TILED(
        plgpu_tiling(((4 * rows, lanes * 8), (rows, lanes * 8), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def plgpu_tiling(tiles: tuple[tuple[int, ...], ...]) -> Any:
    from jax.experimental.mosaic.gpu import fragmented_array

    return fragmented_array.Tiling(tiles)


def _consume(work: _Work, me: Any, factor: Any, s: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A consumer: the online softmax over its pages, every ``consumers``-th of the CTA's."""
    config, H = work.config, s["q_s"].shape[-1]
    column = plgpu.Layout.WGMMA.reduce(1)
    row_low, row_high = (_compat.smem_load(s["bounds_s"].at[i], column) for i in range(2))

    def step(j: Any, carry: Any) -> Any:
        acc, highest, total = carry
        i = j * config.consumers + me
        keys, values, k_free, v_ready, v_free = _next_page(i, me, work, s)

        def products(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, s["q_s"], _compat.smem_transpose(keys))
            return ref[...]

        scores = pl.run_scoped(products, plgpu.ACC((_ROWS, keys.shape[0]), jnp.float32))
        k_free()
        scores = _masked(scores, work.first + i, row_low, row_high, work.edges)
        new = jnp.maximum(highest, scores.max(axis=1) * factor)
        shrink = jnp.exp2(highest - new)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        weights = weights.astype(values.dtype)
        v_ready()
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))
        v_free()
        return acc, new, total

    start = (
        plgpu.layout_cast(jnp.zeros((_ROWS, H), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((_ROWS,), _LOWEST, jnp.float32), column),
        plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), column),
    )
    return lax.fori_loop(0, pl.cdiv(work.count - me, config.consumers), step, start)


def _next_page(i: Any, me: Any, work: _Work, s: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Waits for the keys of page i; returns keys, values, and how to free keys, await values, free values."""
    if work.config.converters:
        plgpu.barrier_wait(s["k_ready"].at[me])
        return (
            s["k16_s"].at[me],
            s["v16_s"].at[me],
            lambda: plgpu.barrier_arrive(s["k_free"].at[me]),
            lambda: plgpu.barrier_wait(s["v_ready"].at[me]),
            lambda: plgpu.barrier_arrive(s["v_free"].at[me]),
        )
    slot, _ = _slot(i, work.config)
    plgpu.barrier_wait(s["full"].at[slot])
    keys, values = s["k_s"].at[slot], s["v_s"].at[slot]
    S, edges = keys.shape[0], work.edges
    page = work.first + i

    @pl.when((page * S < edges[0]) | ((page + 1) * S > edges[1]))
    def _():
        _store_seen(_compat.smem_load(values, _copy_layout(values.shape[1])), values, page, edges)
        plgpu.commit_smem()

    return keys, values, lambda: None, lambda: None, lambda: plgpu.barrier_arrive(s["empty"].at[slot])


def _masked(scores: jax.Array, page: Any, row_low: jax.Array, row_high: jax.Array, edges: list[Any]) -> jax.Array:
    """The scores of a page, -inf where a row does not see the key; untouched where all rows see all of it."""
    S = scores.shape[1]

    def mask(scores: jax.Array) -> jax.Array:
        position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + page * S
        low, high = (lax.broadcast_in_dim(x, scores.shape, [0]) for x in (row_low, row_high))
        return jnp.where((position >= low) & (position < high), scores, -jnp.inf)

    everything = (page * S >= edges[2]) & ((page + 1) * S <= edges[3])
    return lax.cond(everything, lambda scores: scores, mask, scores)


def _merge(
    sums: tuple[jax.Array, jax.Array, jax.Array], me: Any, count: Any, config: Config, out_rows: int,
    outputs: list[Any], s: dict[str, Any],
) -> None:  # fmt: skip
    """Merges the consumers' sums and writes those of the CTA: all rows of highest and total, ``out_rows`` of acc."""
    acc, highest, total = sums
    column = plgpu.Layout.WGMMA.reduce(1)

    @pl.when(me > 0)
    def _():
        s["acc_s"][...] = acc
        s["sums_s"][0] = highest
        s["sums_s"][1] = total
        plgpu.barrier_arrive(s["done"])

    @pl.when(me == 0)
    def _():
        if config.consumers == 1:
            _write(acc, highest, total, out_rows, outputs, s)
            return
        plgpu.barrier_wait(s["done"])
        other = _compat.smem_load(s["acc_s"], plgpu.Layout.WGMMA)
        other_highest, other_total = (_compat.smem_load(s["sums_s"].at[i], column) for i in range(2))
        new = jnp.maximum(highest, other_highest)
        mine, theirs = jnp.exp2(highest - new), jnp.exp2(other_highest - new)
        wide = lambda x: lax.broadcast_in_dim(x, acc.shape, [0])  # noqa: E731
        _write(acc * wide(mine) + other * wide(theirs), new, total * mine + other_total * theirs, out_rows, outputs, s)


def _write(
    acc: jax.Array, highest: jax.Array, total: jax.Array, out_rows: int, outputs: list[Any], s: dict[str, Any]
) -> None:
    s["acc_s"][...] = acc
    s["sums_s"][0] = highest
    s["sums_s"][1] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s["acc_s"].at[pl.ds(0, out_rows)], outputs[0])
    plgpu.copy_smem_to_gmem(s["sums_s"].at[0], outputs[1])
    plgpu.copy_smem_to_gmem(s["sums_s"].at[1], outputs[2])
    plgpu.wait_smem_to_gmem(0)
