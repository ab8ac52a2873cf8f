"""What the threads of a CTA of the first kernel do (Mosaic GPU, `first`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from pallas_kernels.gated_delta.columns import REF, SCALAR, SIZE
from pallas_kernels.gated_delta.tile import (
    OWN,
    TOKENS,
    Lane,
    convolved,
    exp,
    f32,
    i32,
    in_words,
    load,
    out_of_words,
    over_runs,
    place,
    sigmoid,
    softplus,
    squares,
    store,
    unit_of,
)

WARPS = 4
KEYS, QUERIES, TAPE = 0, 1, 2  # warps, and slots of windows, of keys and queries
BEHIND_VECTORS = 4  # slot of 16 rows behind keys and queries, and what rounding left of them
GATES = 3  # the warp of gates
ROW = SIZE + 8  # numbers from one vector to the next: eight rows have banks of their own
FACTORS = 2 * TOKENS + 2  # rows of a head's factors
FACTORS_OF_THREAD = 4  # at a time, so that no load waits for the one before
ORIGINS = TOKENS + 1  # what reaches a token: the state before the block, and 16 tokens
LESS, NOT_LESS, MORE = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge, arith.CmpIPredicate.sgt
EQUAL, NOT_EQUAL = arith.CmpIPredicate.eq, arith.CmpIPredicate.ne


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        group: value heads of a key head.
        heads: key heads.
        before: inputs that a token's convolution has before its own.
        tape: tokens of a tape.
        block: tokens of a block; 0 without one.
        by_pairs: whether the block's tokens are put in pairs.
    """

    group: int
    heads: int
    before: int
    tape: int
    block: int
    by_pairs: bool


def keys_and_queries(sizes: Sizes, refs: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Write a key head's keys of the tape, keys and queries of the block, and what pairs of these have in common."""

    def emit(m: SimpleNamespace) -> None:
        lane = Lane.of(m.thread)
        first = _sum(_product(m.b, i32(sizes.heads)), m.key)
        with _when(EQUAL, lane.warp, i32(GATES)):
            _write_gates(sizes, m)
        with _when(LESS, lane.warp, i32(TAPE + 1)) if sizes.block else _when(EQUAL, lane.warp, i32(TAPE)):
            is_query, is_tape = (_is(EQUAL, lane.warp, i32(warp)) for warp in (QUERIES, TAPE))
            limit = _sum(arith.select(is_tape, m.folded, m.length), i32(sizes.before))
            scale = arith.select(is_query, f32(SIZE**-0.5), f32(1.0))
            raw, dtype = _rows_of(m, lane, is_tape), ir.MemRefType(m.window.type).element_type

            def keep(channel: Any, tokens: list[list[Any]], totals: list[Any]) -> list[Any]:
                for i, words in enumerate(tokens):
                    store(raw(i, channel), words)
                return [arith.addf(total, squares(words, dtype)) for total, words in zip(totals, tokens, strict=True)]

            totals = convolved(lane, m.window, m.conv, limit, keep, [f32(0.0)] * OWN)
            units = [unit_of(total) for total in totals]

            def give(channel: Any, nothing: list[Any]) -> list[Any]:
                tokens = [
                    [arith.mulf(arith.mulf(x, unit), scale) for x in load(raw(i, channel), 0, dtype)]
                    for i, unit in enumerate(units)
                ]
                with _when(EQUAL, lane.warp, i32(TAPE)):
                    _write(lane, tokens, m.tape_keys, _product(first, i32(sizes.tape)), m.folded, channel)
                if sizes.block and sizes.by_pairs:
                    with _when(LESS, lane.warp, i32(TAPE)):
                        _write_vectors(lane, tokens, m, first, channel, sizes.block)
                elif sizes.block:
                    for warp, ref in ((KEYS, m.keys), (QUERIES, m.queries)):
                        with _when(EQUAL, lane.warp, i32(warp)):
                            _write(lane, tokens, ref, _product(first, i32(sizes.block)), i32(sizes.block), channel)
                return nothing

            over_runs(lane, give, [])
        if sizes.by_pairs:
            utils.warpgroup_barrier()
            with _when(LESS, lane.warp, i32(TAPE)):
                _multiply(m.thread, lane.warp, m.shared, m.products)
            with _when(NOT_LESS, lane.warp, i32(TAPE)):
                _accumulate(sizes, m)
            utils.warpgroup_barrier()
            _write_factors(sizes, m, _product(first, i32(sizes.group)))

    _inline(emit, refs, scalars)


def values_of_heads(sizes: Sizes, refs: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Write the values of two heads, of block (even warps) and tape (odd ones)."""

    def emit(m: SimpleNamespace) -> None:
        lane = Lane.of(m.thread)
        pair, is_odd = _divided(lane.warp, 2)
        member = arith.select(_is(EQUAL, pair, i32(0)), m.one, m.other)
        head = _sum(_product(_sum(_product(m.b, i32(sizes.heads)), m.key), i32(sizes.group)), member)
        is_tape = _is(EQUAL, is_odd, i32(1))
        limit = _sum(arith.select(is_tape, m.folded, m.length), i32(sizes.before))
        goals = [(1, m.tape_values, sizes.tape, m.folded)]
        if sizes.block:
            goals.append((0, m.values, sizes.block, i32(sizes.block)))
        is_first = _is(EQUAL, pair, i32(0))
        is_mine = arith.ori(is_first, _is(NOT_EQUAL, m.one, m.other))  # an odd number of heads has the last one twice
        is_mine = arith.andi(is_mine, _is(NOT_LESS, is_odd, i32(0 if sizes.block else 1)))
        with utils.when(is_mine):

            def write(channel: Any, tokens: list[list[Any]], nothing: list[Any]) -> list[Any]:
                for kind, ref, size, count in goals:
                    with _when(EQUAL, is_odd, i32(kind)):
                        _write(lane, tokens, ref, _product(head, i32(size)), count, channel)
                return nothing

            convolved(lane, m.window, m.conv, limit, write, [])

    _inline(emit, refs, scalars)


def _write_gates(sizes: Sizes, m: SimpleNamespace) -> None:
    """Write decay and strength of a key head's tokens, and make the block's gates those of the tape: warp 3."""
    total = sizes.group * TOKENS
    for begin in range(0, total, 32):
        item = _sum(m.thread, i32(begin - GATES * 32))
        with _when(LESS, item, i32(total)):
            member, t = _divided(item, TOKENS)
            head = _sum(_product(m.key, i32(sizes.group)), member)
            rate, bias = exp(_of_member(sizes, m, "rate", member)), _of_member(sizes, m, "bias", member)
            with _when(LESS, t, m.folded):
                g, beta = _log_and_strength(_raw(m.kept_gates, m.row, t, head), rate, bias)
                _store(exp(g), m.tape_decay, m.b, head, t)
                _store(beta, m.tape_strength, m.b, head, t)
            if sizes.block:
                raw = _raw(m.block_gates, m.b, arith.minsi(t, i32(sizes.block - 1)), head)
                _write_gates_of_block(sizes, m, raw, _log_and_strength(raw, rate, bias), (member, head, t))


def _write_gates_of_block(sizes: Sizes, m: SimpleNamespace, raw: Any, computed: Any, place: tuple[Any, ...]) -> None:
    member, head, t = place
    is_token = _is(LESS, t, m.length)
    g, beta = (arith.select(is_token, value, f32(0.0)) for value in computed)
    if sizes.by_pairs:
        _store(g, m.logs, member, t)
        _store(beta, m.strengths, member, t)
    with _when(LESS, t, i32(sizes.block)):
        if not sizes.by_pairs:
            _store(exp(g), m.decay, m.b, head, t)
            _store(beta, m.strength, m.b, head, t)
        with _when(EQUAL, m.is_sequence, i32(1)):
            for i, value in enumerate(raw):
                _store(value, m.kept_gates, m.row, t, head, i32(i))


def _log_and_strength(raw: tuple[Any, Any], rate: Any, bias: Any) -> tuple[Any, Any]:
    """Log of the decay, and strength, of a token's projections b and a."""
    b, a = (_wide(x) for x in raw)
    return arith.negf(arith.mulf(rate, softplus(arith.addf(a, bias)))), sigmoid(b)


def _inline(emit: Callable[[SimpleNamespace], None], refs: dict[str, Any], scalars: dict[str, Any]) -> None:
    """Emit instructions that see references and scalars by name, and the number of their thread."""
    names = [*refs, *scalars]

    @plgpu.inline_mgpu(arg_types=(*(REF for _ in refs), *(SCALAR for _ in scalars)))
    def run(ctx: Any, *arguments: Any) -> None:
        del ctx
        values = [*arguments[: len(refs)], *(scalar.registers.item() for scalar in arguments[len(refs) :])]
        thread = arith.index_cast(i32(0).type, gpu.thread_id(gpu.Dimension.x))
        emit(SimpleNamespace(thread=thread, **dict(zip(names, values, strict=True))))

    run(*refs.values(), *map(jnp.asarray, scalars.values()))


def _write(lane: Lane, tokens: list[list[Any]], ref: Any, first: Any, count: Any, channel: Any) -> None:
    """Write a run's words of the first `count` tokens to rows of 128 from row `first` on."""
    for t, words in _of_thread(lane, tokens):
        with _when(LESS, t, count):
            store(place(ref, _sum(_product(_sum(first, t), i32(SIZE)), channel)), words)


def _write_vectors(
    lane: Lane, tokens: list[list[Any]], m: SimpleNamespace, first: Any, channel: Any, block: int
) -> None:
    """Write a run of keys or queries in two bfloat16, zeros for padding, to memory and to shared memory."""
    narrow, part = ir.BF16Type.get(), _product(lane.warp, i32(TOKENS))
    for t, wide in _of_thread(lane, tokens):
        exists, at = _is(LESS, t, i32(block)), _sum(part, t)
        values = [arith.select(exists, x, f32(0.0)) for x in wide]
        words = in_words(values, narrow)
        left = [arith.subf(x, near) for x, near in zip(values, out_of_words(words, narrow), strict=True)]
        in_memory = _sum(_product(_sum(_product(first, i32(2 * TOKENS)), at), i32(SIZE)), channel)
        for which, (ref, numbers) in enumerate(((m.vectors, words), (m.rest, in_words(left, narrow)))):
            store(place(ref, in_memory), numbers)
            row = _product(_sum(at, i32(which * 2 * TOKENS)), i32(ROW))
            store(place(m.shared, _sum(row, channel)), numbers)


def _rows_of(m: SimpleNamespace, lane: Lane, is_tape: Any) -> Callable[[int, Any], Any]:
    """Says where a channel of the thread's token i waits for its norm in shared memory.

    Numbers of 16 bits wait where the vectors will lie, if there are any: 13 KB more would leave room for fewer CTAs.
    """
    if hasattr(m, "raw"):
        ref, slot = m.raw, lane.warp
    else:
        ref, slot = m.shared, arith.select(is_tape, i32(BEHIND_VECTORS), lane.warp)
    first = _sum(_product(slot, i32(TOKENS)), lane.token)
    return lambda i, channel: place(ref, _sum(_product(_sum(first, i32(i)), i32(ROW)), channel))


def _multiply(thread: Any, warp: Any, shared: Any, products: Any) -> None:
    """Multiply 16 keys (warp 0) or queries (1) with the keys, in three products of bfloat16."""
    row, q = _divided(arith.remui(thread, i32(32)), 4)
    column = _product(q, i32(2))
    of_warp = place(shared, _sum(_product(_sum(_product(warp, i32(TOKENS)), row), i32(ROW)), column))
    of_keys = place(shared, _sum(_product(row, i32(ROW)), column))
    rest, below = 2 * TOKENS * ROW, 8 * ROW

    @utils.fori(i32(SIZE // 16), [[f32(0.0)] * 4 for _ in range(2)])
    def sums(k: Any, sums: list[list[Any]]) -> list[list[Any]]:
        inputs = _product(k, i32(16))
        queries, keys = (utils.getelementptr(x, [inputs], ir.BF16Type.get()) for x in (of_warp, of_keys))
        left = [[_word(queries, part + i) for i in (0, below, 8, below + 8)] for part in (0, rest)]
        for n in range(2):
            right = [[_word(keys, part + n * below + i) for i in (0, 8)] for part in (0, rest)]
            for of_left, of_right in ((0, 0), (1, 0), (0, 1)):
                sums[n] = _mma(sums[n], left[of_left], right[of_right])
        return sums

    for n, numbers in enumerate(sums.results):
        for i, number in enumerate(numbers):
            at = _sum(row, i32(i // 2 * 8)), _sum(column, i32(n * 8 + i % 2))
            _store(number, products, warp, *at)


def _accumulate(sizes: Sizes, m: SimpleNamespace) -> None:
    """Write what of each origin is left at each token: warps 2 and 3, an origin of a head each.

    These are sums over the tokens between, not differences of sums from the first on, which cancel.
    """
    threads = (WARPS - TAPE) * 32
    for first in range(0, ORIGINS * sizes.group, threads):
        item = _sum(m.thread, i32(first - TAPE * 32))
        with _when(LESS, item, i32(ORIGINS * sizes.group)):
            member, origin = _divided(item, ORIGINS)
            between = f32(0.0)
            for t in range(TOKENS):
                is_behind = _is(MORE, i32(t + 1), origin)
                between = arith.select(is_behind, arith.addf(between, _load(m.logs, member, i32(t))), f32(0.0))
                _store(exp(between), m.left, member, origin, i32(t))


def _write_factors(sizes: Sizes, m: SimpleNamespace, first: Any) -> None:
    """Write the factors of a key head's value heads, of which `first` is the first one of all."""
    pointer = place(m.factors, _product(first, i32(FACTORS * TOKENS)))
    total, at_once = sizes.group * FACTORS * TOKENS, WARPS * 32 * FACTORS_OF_THREAD

    @utils.fori(i32(-(-total // at_once)), [])
    def _(turn: Any, nothing: list[Any]) -> list[Any]:
        begin = _sum(m.thread, _product(turn, i32(at_once)))
        items = [_sum(begin, i32(i * WARPS * 32)) for i in range(FACTORS_OF_THREAD)]
        for item, value in [(item, _factor(m, arith.minsi(item, i32(total - 1)))) for item in items]:
            with _when(LESS, item, i32(total)):
                llvm.store(value, utils.getelementptr(pointer, [item], value.type))
        return nothing


def _factor(m: SimpleNamespace, item: Any) -> Any:
    """One of the factors of a key head's value heads."""
    row_of_all, t = _divided(item, TOKENS)
    member, row = _divided(row_of_all, FACTORS)
    which, s = _divided(row, TOKENS)  # what is written, what is read, and the last two rows
    of_pairs = _is(LESS, row, i32(2 * TOKENS))
    left = _load(m.left, member, arith.select(of_pairs, _sum(s, i32(1)), i32(0)), t)
    beta = _load(m.strengths, member, t)
    product = _load(m.products, arith.minsi(which, i32(1)), t, s)
    written = arith.mulf(arith.mulf(arith.negf(beta), product), left)
    written = arith.select(_is(MORE, t, s), written, f32(0.0))
    read = arith.select(_is(NOT_LESS, t, s), arith.mulf(product, left), f32(0.0))
    last = arith.select(_is(EQUAL, s, i32(0)), left, beta)
    return arith.select(of_pairs, arith.select(_is(EQUAL, which, i32(0)), written, read), last)


def _of_thread(lane: Lane, tokens: list[list[Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """The numbers of the thread's tokens, and their values."""
    for i in range(OWN):
        yield _sum(lane.token, i32(i)), tokens[i]


def _raw(ref: Any, *at: Any) -> tuple[Any, Any]:
    """The projections b and a as they lie in memory."""
    b, a = (memref.load(ref, [*map(_index, at), _index(i32(i))]) for i in range(2))
    return b, a


def _of_member(sizes: Sizes, m: SimpleNamespace, name: str, member: Any) -> Any:
    """The scalar of one of a key head's value heads."""
    chosen, *others = (getattr(m, f"{name}_{i}") for i in range(sizes.group))
    for i, other in enumerate(others, 1):
        chosen = arith.select(_is(EQUAL, member, i32(i)), other, chosen)
    return chosen


def _load(ref: Any, *at: Any) -> Any:
    return _wide(memref.load(ref, list(map(_index, at))))


def _store(value: Any, ref: Any, *at: Any) -> None:
    memref.store(value, ref, list(map(_index, at)))


def _wide(value: Any) -> Any:
    f = ir.F32Type.get()
    return value if value.type == f else arith.extf(f, value)


def _word(pointer: Any, offset: int) -> Any:
    """Two numbers of 16 bits behind a pointer."""
    return llvm.load(i32(0).type, utils.getelementptr(pointer, [offset], ir.BF16Type.get()))


def _mma(sums: list[Any], left: list[Any], right: list[Any]) -> list[Any]:
    """Add the product of [16, 16] and [8, 16] transposed to a warp's sums [16, 8]."""
    f = ir.F32Type.get()
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    result: Any = llvm.inline_asm(
        llvm.StructType.get_literal([f] * 4),
        [*left, *right, *sums],
        text,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
    )
    return [llvm.extractvalue(f, result, [i]) for i in range(4)]


@contextmanager
def _when(compare: Any, left: Any, right: Any) -> Iterator[None]:
    with utils.when(_is(compare, left, right)):
        yield


def _is(compare: Any, left: Any, right: Any) -> Any:
    return arith.cmpi(compare, left, right)


def _divided(value: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a value that is not negative."""
    return arith.divui(value, i32(by)), arith.remui(value, i32(by))


def _sum(left: Any, right: Any) -> Any:
    return arith.addi(left, right)


def _product(left: Any, right: Any) -> Any:
    return arith.muli(left, right)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)
