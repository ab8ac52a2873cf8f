"""Paged attention on Pallas' Triton backend: every shape, mask and page dtype, on GPUs and in the interpreter.

One program attends ``block`` query rows of one kv head (row = token * group + head of the group, so that the GQA heads
share each page they read) to one split of the sequence's visible pages, a page a step. A second, small kernel merges
the splits. The number of splits is chosen at trace time; the pages of each split are computed in the kernel from the
lengths, so that short, idle and windowed sequences read no page that they do not see.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.lib.int4_kv import Pages, is_int4, narrow_bytes
from pallas_kernels.lib.masks import visible
from pallas_kernels.lib.rotary import gated
from pallas_kernels.paged_attention import fresh
from pallas_kernels.paged_attention.arguments import Arguments, Fresh, key_range, operand, page_range
from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.paged_attention.int4 import int4_products, int4_weighted, rotated_queries, rotation
from pallas_kernels.paged_attention.splits import best_splits

_LOWEST = -1e30  # start of a running maximum: finite, so that no difference of two maxima is inf - inf
_GIB = 1 << 30
MAX_FRESH_ROWS = 128  # query rows of a kv head that one program holds


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
        block: query rows of a program.
        splits: of the keys.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block: int
    splits: int
    num_warps: int
    num_stages: int


def refusal(args: Arguments) -> str | None:
    """Why the Triton backend cannot do this call, or None."""
    H, S, dtype = args.q.shape[-1], args.page_size, args.k_pages.dtype
    if dtype not in (jnp.bfloat16, jnp.float16) and not _compat.is_fp8(dtype) and not is_int4(args.k_pages):
        return f"The Triton paged attention reads bf16, f16, e4m3, e5m2 and int4 pages; these are {dtype}."
    if H & (H - 1) or not 16 <= H <= 256:
        return f"The Triton paged attention needs a head size that is a power of two from 16 to 256; this is {H}."
    if is_int4(args.k_pages) and H < 32:
        return f"The Triton paged attention multiplies halves of 4-bit heads of at least 32; this is {H}."
    if S & (S - 1) or not 16 <= S <= 128:
        return f"The Triton paged attention needs pages of 16, 32, 64 or 128 tokens; these hold {S}."
    if 2 * _GIB < (size := narrow_bytes(args.k_pages)) <= 4 * _GIB:
        return (
            f"Pallas' Triton backend addresses an 8-bit pool of {size / _GIB:.2f} GiB with 32-bit "
            "offsets, which overflow between 2 and 4 GiB: use a pool of at most 2 GiB or of more than 4 GiB."
        )
    return None


def write_refusal(args: Arguments) -> str | None:
    """Why the Triton backend cannot write this call's fresh heads and attend in one kernel, or None."""
    rows, H = args.q.shape[1] * args.group, args.q.shape[-1]
    if not 0 < rows <= MAX_FRESH_ROWS:
        limit = f"1 to {MAX_FRESH_ROWS} rows of a kv head"
        return f"The Triton kernel that writes and attends takes {limit}; these are {rows}."
    if H < 32:
        return f"The Triton kernel that writes and attends multiplies halves of heads of at least 32; this is {H}."
    if is_int4(args.k_pages):
        return "The Triton kernel that writes and attends packs no 4-bit pages: a write and an attention do."
    return refusal(args)


def default_config(args: Arguments) -> Config:
    """The configuration that was fastest on an H200 for this shape (BENCH.md)."""
    B, T, _, H = args.q.shape
    rows = T * args.group
    block = min(128 if rows > 64 else 64, max(16, pl.next_power_of_2(rows)))
    warps = 8 if block * H > 64 * 128 else 4
    stages = 2 if _compat.is_fp8(args.k_pages.dtype) or is_int4(args.k_pages) or H > 128 else 3
    programs = B * args.kv_heads * pl.cdiv(rows, block)
    per_sm = {16: 8, 32: 4, 64: 2, 128: 1}[block] if warps == 4 else 1
    slots = _compat.sm_count() * per_sm - programs * (args.fresh is not None)  # fresh tokens have programs of their own
    splits = best_splits(programs, args.page_table.shape[1], max(1, slots))
    return Config(block=block, splits=splits, num_warps=warps, num_stages=stages)


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def paged_attention(
    args: Arguments, *, interpret: bool = False, config: Config | None = None
) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``."""
    return _call(args, interpret, config)[0]


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def write_attend(
    args: Arguments, *, interpret: bool = False, config: Config | None = None
) -> tuple[Float[Array, "B T N H"], Pages, Pages]:
    """See ``pallas_kernels.write_attend``. Fresh tokens are one more split, whose program holds them in registers."""
    if reason := write_refusal(args):
        raise NotImplementedError(reason)
    return _call(args, interpret, config)


def _call(args: Arguments, interpret: bool, config: Config | None) -> tuple[Any, ...]:
    """The attention output, and for fresh heads the two pools."""
    if reason := refusal(args):
        raise NotImplementedError(reason)
    config = config or default_config(args)
    B, T, N, H = args.q.shape
    K, rows = args.kv_heads, T * args.group
    blocks, splits = pl.cdiv(rows, config.block), config.splits + (args.fresh is not None)
    tables = (args.page_table, args.kv_length, args.q_length, args.valid_from, args.scores_scale, args.v_scale)
    queries: Any = args.q if args.fresh is None else (args.fresh, args.k_scale)
    if is_int4(args.k_pages):
        queries = (args.q, rotation(args))
    leaves, tree = jax.tree.flatten((args.k_pages, args.v_pages, *tables, queries))
    inputs = _compat.vary_alike(*leaves)
    part = (B, K, splits, blocks * config.block)
    shapes = [(B, T, N, H)] if splits == 1 else [(*part, H), part, part]
    dtype = args.q.dtype if splits == 1 else jnp.float32
    pools = [] if args.fresh is None else [_compat.out_like(x.shape, x.dtype, x) for x in args.arrays]
    outputs = _compat.triton_call(
        functools.partial(_attend, args=args, config=config, is_plain=interpret),
        grid=(splits, K * blocks, B),
        out_shape=[*pools, *(_compat.out_like(shape, dtype, inputs[0]) for shape in shapes)],
        aliases={i: i for i in range(len(pools))},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="paged_attention",
    )(*jax.tree.unflatten(tree, inputs))
    written, results = outputs[: len(pools)], outputs[len(pools) :]
    out = gated(results[0], args.gates) if splits == 1 else combine(*results, args=args, interpret=interpret)
    return out, *written


def _attend(
    k_pages: Any, v_pages: Any, page_table: Any, kv_length: Any, q_length: Any, valid_from: Any, scores_scale: Any,
    v_scale: Any, q: Any, *outputs: Any, args: Arguments, config: Config, is_plain: bool,
) -> None:  # fmt: skip
    """One program: ``block`` rows of one kv head of one sequence against one split of its visible pages.

    ``q`` are queries, or queries and their rotation, or fresh heads and the scales of keys. With fresh heads the pools
    are outputs too, aliases of the inputs, and one more program after those of the splits has the fresh tokens, which
    the others do not see.
    """
    T, H, group, block = args.q.shape[1], args.q.shape[-1], args.group, config.block
    split, b, blocks = pl.program_id(0), pl.program_id(2), pl.cdiv(T * group, block)
    head, row_block = pl.program_id(1) // blocks, pl.program_id(1) % blocks
    length, tokens, lowest = kv_length[b], q_length[b], valid_from[b]

    row = row_block * block + jnp.arange(block, dtype=jnp.int32)
    token, member, numbers = row // group, row % group, pl.ds(row_block * block, block)
    low, high = key_range(
        args, length, tokens, lowest, row_block * block // group, (row_block * block + block - 1) // group
    )
    valid, factor = (token < tokens)[:, None], scores_scale[head]
    if is_int4(k_pages):
        queries = rotated_queries(q, (b, token, head * group + member), valid)
    elif args.fresh is None:
        queries = [pltriton.load(q.at[_compat.row_index(b, token, head * group + member, H)], mask=valid, other=0.0)]
    else:
        k_pages, v_pages, outputs = outputs[0], outputs[1], outputs[2:]
        queries = fresh.queries(q[0], (b, head), token, member)
        high = jnp.minimum(high, length - tokens)
    queries = [operand(part, args.compute_dtype) for part in queries]
    first, last = _share(*page_range(low, high, args.page_size), split, config.splits)
    zeros = jnp.zeros((block,), jnp.float32)
    rows = _Rows(args, queries, token, valid, length, tokens, factor, zeros, is_plain)

    def write_sums(acc: list[jax.Array], highest: jax.Array, total: jax.Array) -> None:
        """Write the sums of a split; ``acc`` comes as parts of the columns, side by side."""
        for i, part in enumerate(acc):
            outputs[0][b, head, split, numbers, pl.ds(i * part.shape[1], part.shape[1])] = part
        outputs[1][b, head, split, numbers] = highest
        outputs[2][b, head, split, numbers] = total

    @pl.when((last > first) | (len(outputs) == 1))
    def _():
        acc, highest, total = rows.over_pages((k_pages, v_pages), (b, head), page_table, (first, last), (low, high))
        if len(outputs) > 1:
            write_sums(acc, highest, total)
        else:
            factors = (v_scale[head] / jnp.where(total > 0, total, 1))[:, None]
            *rows_of, column = _compat.row_index(b, token, head * group + member, H // len(acc))
            for i, part in enumerate(acc):
                target = outputs[0].at[*rows_of, column + i * part.shape[1]]
                pltriton.store(target, (part * factors).astype(outputs[0].dtype), mask=(token < T)[:, None])

    if len(outputs) > 1:

        @pl.when((last <= first) & (split < config.splits))
        def _():  # an empty split writes no values: its total of 0 says that there are none
            outputs[1][b, head, split, numbers] = zeros + _LOWEST
            outputs[2][b, head, split, numbers] = zeros

    if args.fresh is not None:

        @pl.when(split == config.splits)
        def attend_to_fresh():
            write_sums(*rows.over_fresh(q[0], (b, head), (k_pages, v_pages), (q[1], v_scale)))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The query rows of a program inside the kernel, and their attention.

    Attributes:
        args: of the call.
        queries: in the dtype of the products; all columns, or two halves.
        token: of each row, counted within the call.
        valid: whether a row is a token's, [block, 1].
        length: kv_length of the sequence.
        tokens: q_length of the sequence.
        factor: makes products base-2 logits.
        zeros: float32, one a row.
        is_plain: whether Pallas interprets the kernel, which it cannot with assembly.
    """

    args: Arguments
    queries: list[jax.Array]
    token: jax.Array
    valid: jax.Array
    length: Any
    tokens: Any
    factor: Any
    zeros: jax.Array
    is_plain: bool

    def masked(self, logits: jax.Array, position: jax.Array, exists: jax.Array) -> jax.Array:
        """Logits [block, keys], -inf where a row does not see a key."""
        query_position = self.length - self.tokens + self.token
        seen = visible(query_position, position, mask=self.args.mask, window=self.args.window)
        return jnp.where(seen & exists[None, :] & self.valid, logits, -jnp.inf)

    def over_pages(
        self, pools: tuple[Any, Any], program: tuple[Any, Any], page_table: Any, pages: tuple[Any, Any],
        positions: tuple[Any, Any],
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:  # fmt: skip
        """The online softmax over a half-open range of pages, of which a half-open range of positions counts.

        Returns:
            Sums of weighted values [block, H], unnormalised, all columns or two halves of them; the maximum of each
            row's logits; the sums of its weights.
        """
        (k_pages, v_pages), (b, head), (low, high) = pools, program, positions
        S, H, block = self.args.page_size, self.args.q.shape[-1], self.zeros.shape[0]

        def step(page: Any, carry: Any) -> Any:
            acc, highest, total = carry
            place = page_table[b, page], head
            position = page * S + jnp.arange(S, dtype=jnp.int32)
            inside = (position >= low) & (position < high)
            scores = self.masked(self.products(k_pages, place) * self.factor, position, inside)
            new = jnp.maximum(highest, scores.max(1))
            weights = jnp.exp2(scores - new[:, None])
            shrink = jnp.exp2(highest - new)
            added = self.weighted(v_pages, place, weights, inside)
            acc = [old * shrink[:, None] + part for old, part in zip(acc, added, strict=True)]
            return acc, new, total * shrink + weights.sum(1)

        parts = 2 if is_int4(v_pages) else 1
        acc = [jnp.zeros((block, H // parts), jnp.float32)] * parts
        sums: tuple[list[jax.Array], jax.Array, jax.Array]
        sums = lax.fori_loop(*pages, step, (acc, self.zeros + _LOWEST, self.zeros))
        return sums

    def products(self, k_pages: Any, place: tuple[Any, Any]) -> jax.Array:
        """Products of the queries and the keys of a page, [block, S]."""
        if is_int4(k_pages):
            return int4_products(self.queries, k_pages, place, self.is_plain)
        width = self.queries[0].shape[1]
        keys = [k_pages[*place, :, pl.ds(i * width, width)] for i in range(len(self.queries))]
        dots = [pltriton.dot(q, k.astype(q.dtype).T) for q, k in zip(self.queries, keys, strict=True)]
        return functools.reduce(jnp.add, dots)

    def weighted(self, v_pages: Any, place: tuple[Any, Any], weights: jax.Array, inside: jax.Array) -> list[jax.Array]:
        """Sums of a page's values, weighted; all columns, or two halves of them."""
        if is_int4(v_pages):
            return int4_weighted(weights, v_pages, place, inside, self.is_plain)
        dtype = self.args.compute_dtype
        # Values outside the visible range load as zeros: they may be NaN, and 0 * NaN is NaN.
        values = pltriton.load(v_pages.at[place], mask=inside[:, None], other=0.0)
        return [pltriton.dot(weights.astype(dtype), values.astype(dtype))]

    def over_fresh(
        self, heads: Fresh, program: tuple[Any, Any], pools: tuple[Any, Any], scales: tuple[Any, Any]
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Write the fresh tokens' keys and values to the pools, and attend to them; results as of ``over_pages``.

        The sums of weighted values come in two halves of the columns. ``scales`` are references to those of keys and
        values.
        """
        dtype = self.args.compute_dtype
        number = jnp.arange(fresh.rows(self.args.q.shape[1]), dtype=jnp.int32)
        k, v = fresh.stored(heads, program, number, pools, (scales[0][program[1]], scales[1][program[1]]))
        position = self.length - self.tokens + number
        dots = [pltriton.dot(q, half.astype(dtype).T) for q, half in zip(self.queries, k, strict=True)]
        scores = self.masked(functools.reduce(jnp.add, dots) * self.factor, position, number < self.tokens)
        highest = jnp.maximum(scores.max(1), _LOWEST)
        weights = jnp.exp2(scores - highest[:, None])
        exists = (number < self.tokens)[:, None]
        values = [jnp.where(exists, half.astype(dtype), jnp.zeros((), dtype)) for half in v]
        return [pltriton.dot(weights.astype(dtype), half) for half in values], highest, weights.sum(1)


def _share(first: Any, last: Any, split: Any, splits: int) -> tuple[Any, Any]:
    """Half-open range of the pages of one split; all get equally many, but the last non-empty one may get fewer."""
    pages = pl.cdiv(last - first, splits)
    begin = first + split * pages
    return begin, jnp.minimum(begin + pages, last)
