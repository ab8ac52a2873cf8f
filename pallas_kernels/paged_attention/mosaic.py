"""Paged attention on Hopper, on Pallas' Mosaic GPU backend: decode, verify and draft blocks.

The public functions also serve longer chunks of prompts, which they hand to ``mosaic_prefill``.

An item is a block of up to 64 query rows of one kv head (the tokens of its first query head, then those of the next),
or two such blocks that share pages, and one split of the pages that its sequence sees. There are no more CTAs than
multiprocessors. A CTA attends one item after another, a page a step, and prefetches the pages of the next item while it
finishes one. Its warpgroups:

* one producer follows the page table and starts TMA copies of pages into a ring in shared memory;
* over fp8 pages, a converter splits the queries and converts values to float16, exactly, into a second, small ring;
  over 4-bit pages one converts values and one keys (``mosaic_int4``);
* consumers take pages in turn, each with its own online softmax: S = Q K^T and P V by wgmma with P, and where it fits
  Q, in registers. At the end of an item they exchange halves of their sums, and each merges and writes half of the
  columns: of the result, or, if keys are split, of the sums, which ``combine`` merges.

More than 64 rows a kv head share pages: two consumers have 64 rows each, and both read every page (27B's verify, 96
rows of 256, bf16, batch 8, 32k: 288 us, where a CTA for each 64 rows took 368). One converter then makes float16 of
keys and values, and queries are float16. Heads of 256 leave room for the pages of one consumer, or of two that share
them, and none for results of the latter, whose keys are always split.

If CTAs have several items, the sequences that see most come first, and CTAs take items in alternating order.

Keys in fp8 are never converted: an 8-bit wgmma reads them from the page. The queries are scaled row by row to fill the
range of fp8, and split into a sum of fp8 terms, each of which holds what the terms before it rounded away (two of e4m3
or three of e5m2: at least the 8 bits of bfloat16's mantissa). Values have to be converted, since an 8-bit wgmma needs
its second operand with tokens innermost, and in pages the head dimension is innermost.

A row sees one interval of positions, computed outside the kernel (``rows.bounds``) from the shared mask. Pages need a
mask only at the ends of their rows' intervals. There, values that no row sees are zeroed, since they may be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import is_int4
from pallas_kernels.lib.rotary import gated
from pallas_kernels.lib.shared_memory import tiled
from pallas_kernels.paged_attention import mosaic_prefill
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.combine import combine
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

_SHARED_MEMORY = 221 * 1024  # bytes of a CTA: 227 KiB less 6 KiB for barriers, alignment and the compiler's scratch
_MAX_ROW_BLOCKS = 4  # of a kv head; a call with more is a chunk of a prompt


def refusal(args: Arguments) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    H, dtype = args.q.shape[-1], args.k_pages.dtype
    if args.q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"The Mosaic paged attention takes bf16, f16 and f32 queries; these are {args.q.dtype}."
    if is_int4(args.k_pages) and ((H != 128 and not _is_shared(args)) or _is_long(args)):
        return (
            "The Mosaic paged attention over 4-bit pages takes up to 256 query rows a kv head of 128 numbers, and 65 "
            f"to 256 of 256; these are {args.group * head_rows(args.q.shape[1])} of {H}."
        )
    if dtype not in (jnp.bfloat16, jnp.float16) and not _compat.is_fp8(dtype) and not is_int4(args.k_pages):
        return f"The Mosaic paged attention reads bf16, f16, e4m3, e5m2 and 4-bit pages; these are {dtype}."
    if H not in (64, 128, 256):
        return f"The Mosaic paged attention needs a head size of 64, 128 or 256; this is {H}."
    if args.page_size != 64:
        return f"The Mosaic paged attention needs pages of 64 tokens; these hold {args.page_size}."
    return mosaic_prefill.refusal(args) if _is_long(args) else None


def _is_shared(args: Arguments) -> bool:
    """Whether two consumers have a block of rows each, and share pages; else each block has a CTA of its own."""
    T, H = args.q.shape[1], args.q.shape[-1]
    if H < 128 or T == 1 or not ROWS < args.group * head_rows(T) <= _MAX_ROW_BLOCKS * ROWS:
        return False
    # In 16 bits and heads of 256, which have room for one page more, blocks of few short sequences stay apart.
    return H == 128 or _is_narrow(args) or _capacity(args) >= 4096 or _occupied(args) > 0.2


def _is_narrow(args: Arguments) -> bool:
    return _compat.is_fp8(args.k_pages.dtype) or is_int4(args.k_pages)


def _capacity(args: Arguments) -> int:
    """Tokens of the page table of a sequence."""
    return args.page_table.shape[1] * args.page_size


def _occupied(args: Arguments) -> float:
    """The part of the multiprocessors for which there is a kv head of a sequence."""
    return args.q.shape[0] * args.kv_heads / _compat.sm_count()


def _is_long(args: Arguments) -> bool:
    """Whether a call is a long chunk of a prompt, which ``mosaic_prefill`` serves."""
    return args.group * head_rows(args.q.shape[1]) > _MAX_ROW_BLOCKS * ROWS


def slower(args: Arguments) -> str | None:
    """Why the Triton kernel was measured faster (BENCH.md), or None; `refusal` may object all the same.

    The lengths of the sequences are not known when a program is built; only the width of the page tables is.
    """
    if refusal(args) is not None:  # which says more
        return None
    if _is_long(args):
        return mosaic_prefill.slower(args)
    if _is_at_least_as_fast(args):
        return None
    B, T, _, H = args.q.shape
    return (
        f"The Triton kernel was measured faster for {B * args.kv_heads} kv heads in all, with {T * args.group} query "
        f"rows of {H} each, over up to {_capacity(args)} tokens in {args.k_pages.dtype}."
    )


def _is_at_least_as_fast(args: Arguments) -> bool:
    """Whether the Mosaic kernel measured at least as fast as the Triton kernel for a block."""
    T, H = args.q.shape[1], args.q.shape[-1]
    rows = T * args.group
    capacity, is_narrow = _capacity(args), _is_narrow(args)
    if _is_shared(args):  # with heads of 256 keys are always split, which costs much for many short sequences
        most = 0.5 if H == 256 and not is_int4(args.k_pages) else math.inf
        return capacity >= 4096 or 0.2 < _occupied(args) <= most
    # On a full card keys need no split, so nothing has to be merged. With fp8 pages half a card is enough, except for
    # few rows; of those only calls of one token were measured.
    full = _occupied(args) > (0.45 if is_narrow and rows > 16 else 0.9)
    fills = full and (rows > 16 or (T == 1 and capacity >= 1024))
    if is_narrow:
        return H == 128 and rows <= ROWS and (fills or capacity >= 4096)
    if rows <= 16:
        return H == 128 and (fills or capacity >= 65536)
    return (H == 128 and rows <= ROWS and (fills or capacity >= 4096)) or H == 256


def default_config(args: Arguments) -> Config:
    """The configuration that was fastest on an H200 for this shape (BENCH.md)."""
    B, T, _, H = args.q.shape
    is_shared, is_packed, is_fp8 = _is_shared(args), is_int4(args.k_pages), _compat.is_fp8(args.k_pages.dtype)
    consumers = 1 if H > 128 and not is_shared else 2
    both = ("kv",) if is_shared else ("k", "v")
    converters = both if is_packed or (is_fp8 and is_shared) else ("v",) if is_fp8 else ()
    wide = (1 if H > 128 else 2) if converters else 0
    config = Config(1, consumers, 1, wide, converters, is_packed, is_shared)
    programs = B * args.kv_heads * pl.cdiv(args.group * head_rows(T), ROWS * config.blocks)
    splits = best_splits(programs, args.page_table.shape[1], _compat.sm_count())
    # Shared pages of heads of 256 leave no room for results, which are merged from sums then.
    config = dataclasses.replace(config, splits=max(splits, 2) if is_shared and H > 128 else splits)
    longer = (dataclasses.replace(config, stages=stages) for stages in range(8, 1, -1))
    return next((more for more in longer if _shared_memory(args, more) <= _SHARED_MEMORY), config)


def _shared_memory(args: Arguments, config: Config) -> int:
    """Bytes of shared memory of a CTA, without barriers."""
    H, S = args.q.shape[-1], args.page_size
    page = S * (int4_kv.head_bytes(H) if config.is_packed else H * args.k_pages.dtype.itemsize)
    ring = config.turns * (config.stages * 2 * page + config.wide * (1 + config.converts_keys) * S * H * 2)
    merging = ROWS * H * 4 if config.merges else 0
    if config.splits_queries:
        queries = ROWS * H * (terms(args.k_pages.dtype) * args.k_pages.dtype.itemsize + args.q.dtype.itemsize)
    else:
        queries = config.blocks * ROWS * H * 2
    result = config.blocks * ROWS * H * args.q.dtype.itemsize if config.splits == 1 else 0
    return ring + queries + merging + result + (14 if config.is_shared else 12) * ROWS * 4


@functools.partial(jax.jit, static_argnames="config")
def paged_attention(args: Arguments, *, config: Config | None = None) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``; long chunks of prompts ignore ``config``."""
    if reason := refusal(args):
        raise NotImplementedError(reason)
    if _is_long(args):
        return mosaic_prefill.paged_attention(args)
    config = config or default_config(args)
    B, T, N, H = args.q.shape
    K, rows = args.kv_heads, args.group * head_rows(T)
    row_items = pl.cdiv(rows, ROWS * config.blocks)
    blocks = row_items * config.blocks
    items = B * K * row_items * config.splits
    ctas = min(items, _compat.sm_count())
    row_bounds, block_bounds = bounds(args, blocks, config.blocks)
    order = longest_first(block_bounds) if items > ctas else jnp.arange(B, dtype=jnp.int32)
    inputs = _compat.vary_alike(
        ordered(block_bounds, order), row_bounds, args.page_table, args.scores_scale, args.v_scale,
        padded(args, are_split=config.splits_queries),
        *jax.tree.leaves((args.k_pages, args.v_pages)),
    )  # fmt: skip
    out_rows = rows if blocks == 1 and config.merges else ROWS
    sums = (B, K, config.splits, blocks, ROWS)
    shapes = [(*sums[:-1], out_rows, H), sums, sums] if config.splits > 1 else [(B, copied_tokens(args), N * H)]
    dtype = jnp.float32 if config.splits > 1 else args.q.dtype
    shape = Shape(config, args.page_size, K, H, row_items, args.group, copied_tokens(args), items, ctas)

    def paged_attention_kernel(*refs: Any, **scratch: Any) -> None:  # profilers show its name
        attend(*refs, shape=shape, **scratch)

    results = plgpu.kernel(
        paged_attention_kernel,
        out_type=[_compat.out_like(shape, dtype, inputs[0]) for shape in shapes],
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.consumers + len(config.converters) + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(args, config),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs)
    results = _compat.vary_alike(*results, *inputs)[: len(results)]  # Mosaic does not mark its outputs as varying
    if config.splits == 1:
        return gated(results[0][:, :T].reshape(B, T, N, H), args.gates)
    acc, highest, total = (x.reshape(*x.shape[:3], -1, *x.shape[5:]) for x in results)
    return combine(acc, highest, total, args=args, head_rows=head_rows(T), interpret=False)


def _scratch(args: Arguments, config: Config) -> dict[str, Any]:
    """Shared memory and barriers of a CTA, by name."""
    H, S, consumers = args.q.shape[-1], args.page_size, config.consumers
    pages: Any = args.k_pages.dtype
    dtype: Any = args.compute_dtype if config.converts_keys else pages
    slots, wide, tokens = config.turns * config.stages, config.turns * config.wide, copied_tokens(args)
    of_rows: Any = plgpu.SMEM if tokens < TILE else tiled  # TMA cannot copy fewer rows than a tile has into tiles
    ring = ((slots, S, H // 2), jnp.uint8) if config.is_packed else ((slots, S, H), pages)
    scratch = {
        "q_s": tiled((terms(dtype) * ROWS, H), dtype)
        if config.splits_queries
        else of_rows((config.blocks * ROWS, H), dtype),
        "bounds_s": plgpu.SMEM((config.blocks, 3, ROWS), jnp.int32),
        **{f"{x}_s": tiled(*ring) for x in "kv"},
        "sums_s": plgpu.SMEM(((1 + config.merges) * consumers, 2, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=config.blocks * len(pieces(tokens)) + 1),
        "q_empty": plgpu.Barrier(num_arrivals=consumers + config.splits_queries),
        **{
            name: plgpu.Barrier(num_barriers=slots, num_arrivals=1 if config.wide else config.blocks)
            for name in ("k_empty", "v_empty")
        },
        **{
            name: plgpu.Barrier(num_barriers=slots, num_arrivals=3 if config.is_packed else 1)
            for name in ("k_full", "v_full")
        },
    }
    if config.merges:
        scratch["acc_s"] = tiled((consumers, ROWS, H // consumers), jnp.float32)
        scratch |= {name: plgpu.Barrier(num_arrivals=consumers) for name in ("halves_sent", "free")}
    if config.splits == 1:
        scratch["out_s"] = of_rows((consumers, ROWS, H * config.blocks // consumers), args.q.dtype)
    if config.splits_queries:
        scratch |= {"q_ready": plgpu.Barrier(), "factor_s": plgpu.SMEM((ROWS,), jnp.float32)}
        scratch["rows_s"] = of_rows((ROWS, H), args.q.dtype)
    if config.is_packed:
        scratch |= {f"{x}_affine": plgpu.SMEM((slots, 2, S), int4_kv.SCALE_DTYPE) for x in "kv"}
    for name in (f"wide_{x}" for parts in config.converters for x in parts):
        scratch[f"{name}_s"] = tiled((wide, S, H), args.compute_dtype)
        scratch[f"{name}_full"] = plgpu.Barrier(num_barriers=wide)
        scratch[f"{name}_empty"] = plgpu.Barrier(num_barriers=wide, num_arrivals=config.blocks)
    return scratch
