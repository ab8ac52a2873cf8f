"""16 tokens of 128 channels in the registers of a warp (Mosaic GPU): convolution, SiLU and norm.

A thread has two neighbouring tokens, whose windows share three rows of five, and the 8 of each 32 channels that it
loads by one instruction.
"""

from __future__ import annotations

import itertools
import math as host
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.gated_delta.columns import SIZE
from pallas_kernels.gated_delta.reference import L2_EPS

TOKENS = 16
OWN = 2  # tokens of a thread, neighbours
LANES = 4  # threads that have the same tokens
RUN = 8  # channels that a thread loads by one instruction
STEP = LANES * RUN  # channels from one run of a thread to the next
RUNS = SIZE // STEP
WORDS = 4  # 32-bit words that an instruction stores
MOST = 87.0  # whose power of e has a reciprocal
ATANH_TERMS = 9  # of a series up to 1/3, where the last is below 2**-27 of the first
Take = Callable[[Any, list[list[Any]], list[Any]], list[Any]]


class Lane(NamedTuple):
    """What a thread of a warp has: i32 values.

    Attributes:
        warp: its number.
        token: its first token.
        channel: its first channel.
    """

    warp: Any
    token: Any
    channel: Any

    @staticmethod
    def of(thread: Any) -> Lane:
        """The lane of a thread of a warpgroup, an i32."""
        lane = arith.remui(thread, i32(32))
        first = arith.muli(arith.remui(lane, i32(LANES)), i32(RUN))
        return Lane(arith.divui(thread, i32(32)), arith.muli(arith.divui(lane, i32(LANES)), i32(OWN)), first)


def convolved(lane: Lane, window: Any, conv: Any, limit: Any, take: Take, carried: list[Any]) -> list[Any]:
    """Convolve a warp's channels run by run, apply SiLU, and round to the dtype of the inputs.

    Runs are turns of a loop: written out, a CTA's code is longer than what a multiprocessor keeps of it.

    Args:
        lane: of the thread.
        window: inputs [warps, J + 16, 128] in shared memory: of the J tokens before, then of the tokens.
        conv: the J + 1 taps of each channel, one after another, [warps, J + 1, 128] in shared memory.
        limit: rows of the window that hold inputs, i32; those behind count as zeros.
        take: is given the first channel of a run, the words of each token (`in_words`), and what is carried.
        carried: into the first turn.

    Returns:
        What is carried out of the last turn.
    """
    (_, window_rows, _), dtype = ir.MemRefType(window.type).shape, ir.MemRefType(window.type).element_type
    taps = ir.MemRefType(conv.type).shape[1]
    first = arith.muli(arith.addi(arith.muli(lane.warp, i32(window_rows)), lane.token), i32(SIZE))
    of_warp = arith.muli(lane.warp, i32(SIZE))
    rows = [arith.cmpi(arith.CmpIPredicate.slt, arith.addi(lane.token, i32(k)), limit) for k in range(taps + OWN - 1)]

    def turn(channel: Any, carried: list[Any]) -> list[Any]:
        inputs = place(window, arith.addi(first, channel))
        weights = place(conv, arith.muli(arith.addi(of_warp, channel), i32(taps)))
        by_tap = _taps(weights, taps, ir.MemRefType(conv.type).element_type)
        raw = [load(inputs, k * SIZE, dtype, exists) for k, exists in enumerate(rows)]
        tokens = []
        for token in range(OWN):
            mixed = [arith.mulf(x, w) for x, w in zip(raw[token], by_tap[0], strict=True)]
            for tap in range(1, taps):
                mixed = [math.fma(x, w, m) for x, w, m in zip(raw[token + tap], by_tap[tap], mixed, strict=True)]
            tokens.append(in_words([_silu(x, dtype) for x in mixed], dtype))
        return take(channel, tokens, carried)

    return over_runs(lane, turn, carried)


def over_runs(lane: Lane, turn: Callable[[Any, list[Any]], list[Any]], carried: list[Any]) -> list[Any]:
    """Take a turn for each run of channels; it is given its first channel, and what is carried."""

    @utils.fori(i32(RUNS), carried)
    def runs(run: Any, carried: list[Any]) -> list[Any]:
        return turn(arith.addi(lane.channel, arith.muli(run, i32(STEP))), carried)

    results: list[Any] = runs.results
    return results


def squares(words: list[Any], dtype: Any) -> Any:
    """Sum of the squares of a run."""
    total = f32(0.0)
    for x in out_of_words(words, dtype):
        total = math.fma(x, x, total)
    return total


def unit_of(total: Any) -> Any:
    """What makes the L2 norm of a token 1, of the squares of this thread's channels."""
    for distance in (1, 2):
        total = arith.addf(total, utils.shfl_bfly(total, distance))
    return asm("rsqrt.approx.ftz.f32 $0, $1;", arith.addf(total, f32(L2_EPS)))


def in_words(values: list[Any], dtype: Any) -> list[Any]:
    """Float32 values rounded to a dtype: 32-bit words of two numbers of 16 bits, by one instruction, or of one."""
    if dtype == ir.F32Type.get():
        return values
    kind = "bf16" if dtype == ir.BF16Type.get() else "f16"
    text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [llvm.inline_asm(i32(0).type, list(pair), text, "=r,f,f", has_side_effects=False) for pair in pairs]


def out_of_words(words: list[Any], dtype: Any) -> list[Any]:
    """The float32 values of words."""
    if dtype == ir.F32Type.get():
        return words
    narrow, wide = (ir.VectorType.get((2,), kind) for kind in (dtype, ir.F32Type.get()))
    one = ir.VectorType.get((1,), i32(0).type)
    pairs = [arith.extf(wide, vector.bitcast(narrow, vector.broadcast(one, word))) for word in words]
    return [element(pair, i) for pair in pairs for i in range(2)]


def store(pointer: Any, words: list[Any]) -> None:
    """Write a run's words behind a pointer, 16 bytes an instruction."""
    for i in range(0, len(words), WORDS):
        four = vector.from_elements(ir.VectorType.get((WORDS,), words[i].type), words[i : i + WORDS])
        llvm.store(four, utils.getelementptr(pointer, [i], words[i].type), alignment=16)


def load(pointer: Any, offset: int, dtype: Any, exists: Any = None) -> list[Any]:
    """Load a run of numbers behind a pointer as float32; zeros where they do not exist."""
    words = []
    kind = dtype if dtype == ir.F32Type.get() else i32(0).type
    for first in range(0, RUN, WORDS * 32 // utils.bitwidth(dtype)):
        at = utils.getelementptr(pointer, [offset + first], dtype)
        four = llvm.load(ir.VectorType.get((WORDS,), kind), at, alignment=16)
        words += [element(four, i) for i in range(WORDS)]
    if exists is not None:
        words = [arith.select(exists, word, f32(0.0) if kind == dtype else i32(0)) for word in words]
    return out_of_words(words, dtype)


def place(ref: Any, index: Any) -> Any:
    """Pointer to an element of a reference whose elements lie one after another, i32 elements behind its first."""
    return utils.getelementptr(utils.memref_ptr(ref), [index], ir.MemRefType(ref.type).element_type)


def exp(x: Any) -> Any:
    """e**x within 2 units of the last place, NaN of NaN: what rounding x log2(e) leaves is multiplied in."""
    x = arith.minimumf(x, f32(MOST))
    power = arith.mulf(x, f32(host.log2(host.e)))
    left = math.fma(x, f32(host.log2(host.e)), arith.negf(power))
    near = asm("ex2.approx.ftz.f32 $0, $1;", power)
    return math.fma(near, arith.mulf(left, f32(host.log(2))), near)


def softplus(x: Any) -> Any:
    """log(1 + e**x)."""
    below = exp(arith.negf(math.absf(x)))  # in (0, 1]: log(1 + below) = 2 atanh(s)
    s = arith.divf(below, arith.addf(below, f32(2.0)))
    square, series = arith.mulf(s, s), f32(1 / (2 * ATANH_TERMS - 1))
    for n in reversed(range(ATANH_TERMS - 1)):
        series = math.fma(series, square, f32(1 / (2 * n + 1)))
    return arith.addf(arith.maximumf(x, f32(0.0)), arith.mulf(arith.addf(s, s), series))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x)."""
    return arith.divf(f32(1.0), arith.addf(exp(arith.negf(x)), f32(1.0)))


def _silu(x: Any, dtype: Any) -> Any:
    """X / (1 + e**-x), as exact as a dtype needs."""
    if dtype == ir.F32Type.get():
        power = exp(arith.negf(x))
    else:
        power = asm("ex2.approx.ftz.f32 $0, $1;", arith.mulf(x, f32(-host.log2(host.e))))
    return arith.mulf(x, asm("rcp.approx.ftz.f32 $0, $1;", arith.addf(power, f32(1.0))))


def _taps(weights: Any, taps: int, dtype: Any) -> list[list[Any]]:
    """Taps of a run's channels, which lie together: by tap and channel."""
    loaded = list(itertools.chain(*(load(weights, RUN * i, dtype) for i in range(taps))))
    return [loaded[tap::taps] for tap in range(taps)]


def element(values: Any, i: int) -> Any:
    return vector.extract(values, dynamic_position=[], static_position=[i])


def asm(text: str, value: Any) -> Any:
    """One instruction that makes a float32 number of another."""
    return llvm.inline_asm(ir.F32Type.get(), [value], text, "=f,f", has_side_effects=False)


def i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))


def f32(value: float) -> Any:
    return utils.c(value, ir.F32Type.get())
