"""Paged attention on Hopper, on Pallas' Mosaic GPU backend: decode, verify and draft blocks.

Longer chunks of prompts are ``mosaic_prefill``'s, with which this shares its public functions.

An item is up to 64 query rows of one kv head (the tokens of its first query head, then those of the next) and one split
of the pages that its sequence sees. There are no more CTAs than multiprocessors: each attends one item after the other,
a page a step, and has the pages of the next on their way while it ends one. Its warpgroups:

* one producer follows the page table and starts TMA copies of pages into a ring in shared memory;
* over fp8 pages, a converter splits the queries and rewrites values as float16, exactly, into a second, small ring;
* consumers take pages in turn, each with its own online softmax: S = Q K^T and P V by wgmma with P, and where it fits
  Q, in registers. At the end of an item they exchange halves of their sums, and each merges and writes half of the
  result's columns, or, where keys are split, of the sums', which ``combine_jnp`` merges.

Where CTAs have several items, the sequences that see most come first, and CTAs take them to and fro.

Keys in fp8 are never converted: an 8-bit wgmma reads them as they lie, and the queries, scaled a row at a time to fill
the range of fp8, come as a sum of fp8 terms, each holding what the ones before it rounded away (two of e4m3 or three
of e5m2: 8 bits and more of mantissa, as many as bfloat16 has). Values cannot go that way, since an 8-bit wgmma wants
its second operand with tokens innermost, which pages are not.

What a row sees is one interval of positions, computed outside (``_bounds``) from the shared mask; a page needs a mask
only at the ends of its rows' intervals, and values that no row sees are zeroed there, since they may be NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.paged_attention import mosaic_prefill
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.combine import combine_jnp
from pallas_kernels.paged_attention.mosaic_kernel import attend
from pallas_kernels.paged_attention.mosaic_work import Config, Shape
from pallas_kernels.paged_attention.rows import (
    ROWS,
    TILE,
    bounds,
    copied_tokens,
    head_rows,
    longest_first,
    ordered,
    padded,
    pieces,
    terms,
)
from pallas_kernels.paged_attention.splits import best_splits
from pallas_kernels.shared_memory import tiled

_SHARED_MEMORY = 221 * 1024  # bytes of a CTA, less 6 KiB for barriers, alignment and the compiler's scratch
_MOST_ROW_BLOCKS = 4


def refusal(args: Arguments) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    H, dtype = args.q.shape[-1], args.k_pages.dtype
    if args.q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"The Mosaic paged attention takes bf16, f16 and f32 queries; these are {args.q.dtype}."
    if dtype not in (jnp.bfloat16, jnp.float16) and not _compat.is_fp8(dtype):
        return f"The Mosaic paged attention reads bf16, f16, e4m3 and e5m2 pages; these are {dtype}."
    if H not in (64, 128, 256):
        return f"The Mosaic paged attention needs a head size of 64, 128 or 256; this is {H}."
    if args.page_size != 64:
        return f"The Mosaic paged attention needs pages of 64 tokens; these hold {args.page_size}."
    return mosaic_prefill.refusal(args) if _is_long(args) else None


def _is_long(args: Arguments) -> bool:
    """Whether a call has more query rows than a block: these are a chunk of a prompt."""
    return args.group * head_rows(args.q.shape[1]) > _MOST_ROW_BLOCKS * ROWS


def is_fastest(args: Arguments) -> bool:
    """Whether this call is at least as fast here as on the Triton backend, by the measurements in BENCH.md.

    How long the sequences are is not known when a program is built; how long they may become is.
    """
    if _is_long(args):
        return mosaic_prefill.is_fastest(args)
    T, H, rows = args.q.shape[1], args.q.shape[-1], args.q.shape[1] * args.group
    capacity = args.page_table.shape[1] * args.page_size
    # Where the card is full no split is needed, and none is merged. Of fp8 half is enough, unless rows are few, of
    # which only those of one token were measured.
    is_fp8 = _compat.is_fp8(args.k_pages.dtype)
    full = args.q.shape[0] * args.kv_heads > (0.45 if is_fp8 and rows > 16 else 0.9) * _compat.sm_count()
    fills = full and (rows > 16 or (T == 1 and capacity >= 1024))
    if is_fp8:
        return H == 128 and rows <= ROWS and (fills or capacity >= 4096)
    if rows <= 16:
        return H == 128 and (fills or capacity >= 65536)
    return (H == 128 and rows <= ROWS and (fills or capacity >= 4096)) or H == 256


def default_config(args: Arguments) -> Config:
    """The configuration that measured best on an H200 for this shape (BENCH.md)."""
    B, T, _, H = args.q.shape
    consumers = 1 if H > 128 else 2
    wide = (1 if H > 128 else 2) if _compat.is_fp8(args.k_pages.dtype) else 0
    programs = B * args.kv_heads * pl.cdiv(args.group * head_rows(T), ROWS)
    splits = best_splits(programs, args.page_table.shape[1], _compat.sm_count())
    stages = 1
    while stages < 8 and _shared_memory(args, Config(splits, consumers, stages + 1, wide)) <= _SHARED_MEMORY:
        stages += 1
    return Config(splits=splits, consumers=consumers, stages=stages, wide=wide)


def _shared_memory(args: Arguments, config: Config) -> int:
    """Bytes of shared memory of a CTA, barriers apart."""
    H, S, size = args.q.shape[-1], args.page_size, args.k_pages.dtype.itemsize
    ring = config.consumers * (config.stages * 2 * S * H * size + config.wide * S * H * 2)
    merging = ROWS * H * 4 if config.consumers > 1 else 0
    queries = ROWS * H * (terms(args.k_pages.dtype) * size + (args.q.dtype.itemsize if config.wide else 0))
    result = ROWS * H * args.q.dtype.itemsize if config.splits == 1 else 0
    return ring + queries + merging + result + 12 * ROWS * 4


@functools.partial(jax.jit, static_argnames="config")
def paged_attention(args: Arguments, *, config: Config | None = None) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``; ``config`` is for blocks, a chunk of a prompt has none."""
    if reason := refusal(args):
        raise NotImplementedError(reason)
    if _is_long(args):
        return mosaic_prefill.paged_attention(args)
    config = config or default_config(args)
    B, T, N, H = args.q.shape
    K, rows = args.kv_heads, args.group * head_rows(T)
    blocks = pl.cdiv(rows, ROWS)
    items = B * K * blocks * config.splits
    ctas = min(items, _compat.sm_count())
    row_bounds, block_bounds = bounds(args, blocks)
    order = longest_first(block_bounds) if items > ctas else jnp.arange(B, dtype=jnp.int32)
    inputs = _compat.vary_alike(
        ordered(block_bounds, order), row_bounds, args.page_table, args.scores_scale, args.v_scale, padded(args),
        args.k_pages, args.v_pages,
    )  # fmt: skip
    out_rows = rows if blocks == 1 and config.consumers > 1 else ROWS
    sums = (B, K, config.splits, blocks, ROWS)
    shapes = [(*sums[:-1], out_rows, H), sums, sums] if config.splits > 1 else [(B, copied_tokens(args), N * H)]
    dtype = jnp.float32 if config.splits > 1 else args.q.dtype
    shape = Shape(config, args.page_size, K, blocks, args.group, copied_tokens(args), items, ctas)

    def paged_attention_kernel(*refs: Any, **scratch: Any) -> None:  # by whose name profilers know it
        attend(*refs, shape=shape, **scratch)

    results = plgpu.kernel(
        paged_attention_kernel,
        out_type=[_compat.out_like(shape, dtype, inputs[0]) for shape in shapes],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.consumers + config.converters + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(args, config),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs)
    results = _compat.vary_alike(*results, *inputs)[: len(results)]  # Mosaic's outputs do not say so
    if config.splits == 1:
        return results[0][:, :T].reshape(B, T, N, H)
    acc, highest, total = (_by_head(x, args) for x in results)
    return combine_jnp(acc, highest, total, args=args)


def _by_head(x: Array, args: Arguments) -> Array:
    """Sums of blocks of rows ``[B, K, splits, blocks, rows, ...]``, as those of query heads."""
    R = head_rows(args.q.shape[1])
    flat = x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, : args.group * R]
    return flat.reshape(*x.shape[:3], args.group, R, *x.shape[5:])


def _scratch(args: Arguments, config: Config) -> dict[str, Any]:
    H, S, dtype, consumers = args.q.shape[-1], args.page_size, args.k_pages.dtype, config.consumers
    slots, wide, tokens = consumers * config.stages, consumers * config.wide, copied_tokens(args)
    of_rows: Any = plgpu.SMEM if tokens < TILE else tiled  # no fewer rows than a tile's can be copied to tiles
    scratch = {
        "q_s": tiled((terms(dtype) * ROWS, H), dtype) if wide else of_rows((ROWS, H), dtype),
        "bounds_s": plgpu.SMEM((3, ROWS), jnp.int32),
        "k_s": tiled((slots, S, H), dtype),
        "v_s": tiled((slots, S, H), dtype),
        "sums_s": plgpu.SMEM((2 * consumers, 2, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=len(pieces(tokens)) + 1),
        "q_empty": plgpu.Barrier(num_arrivals=consumers + config.converters),
        **{name: plgpu.Barrier(num_barriers=slots) for name in ("k_full", "k_empty", "v_full", "v_empty")},
    }
    if consumers > 1:
        scratch["acc_s"] = tiled((consumers, ROWS, H // consumers), jnp.float32)
        scratch |= {name: plgpu.Barrier(num_arrivals=consumers) for name in ("given", "free")}
    if config.splits == 1:
        scratch["out_s"] = of_rows((consumers, ROWS, H // consumers), args.q.dtype)
    if wide:
        scratch |= {"q_ready": plgpu.Barrier(), "factor_s": plgpu.SMEM((ROWS,), jnp.float32)}
        scratch["rows_s"] = of_rows((ROWS, H), args.q.dtype)
        scratch["wide_s"] = tiled((wide, S, H), args.compute_dtype)
        scratch |= {name: plgpu.Barrier(num_barriers=wide) for name in ("wide_full", "wide_empty")}
    return scratch
