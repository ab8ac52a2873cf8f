"""A product of a few rows by the warps of one CTA, straight from memory, on Pallas' Mosaic GPU backend (Hopper).

For multiprocessors that a larger product leaves idle: it needs no ring, no tensor maps and no producer. Each warp
multiplies all rows by its share of the inputs (mma.sync: 16 rows of the weight, 8 tokens), and sums meet in shared
memory. In which order inputs are summed is free, so a thread multiplies the eight neighbours that one load brings.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.lib.shared_memory import ALIGNED, swizzle_of, transforms

_WARPS = 4  # of a warpgroup
_STRIP, _FRAGMENT = 16, 64  # rows of an mma, and of wgmma's layout, of which a warp has 16
_LINE = 128  # bytes that memory brings at once
_DEPTH = 32  # inputs that a warp multiplies at a time: 16 bytes of a row a thread
_PAD = 4  # floats behind the rows of a token in shared memory, so that a warp's stores have banks of their own
_SCALAR = plgpu.Layout.WG_SPLAT(())


def refusal(width: int, dtype: Any, warpgroups: int) -> str | None:
    """Why warps cannot multiply rows of so many inputs, or None."""
    share = _DEPTH * _WARPS * warpgroups
    if dtype != jnp.bfloat16 or width % share:
        return f"Rows of a weight beside need bf16 and a width that {share} divides; these are {width} of {dtype}."
    return None


def bytes_of(rows: int, tokens: int, warpgroups: int) -> int:
    """Bytes of shared memory in which sums of so many rows meet."""
    return 4 * _WARPS * warpgroups * _padded(tokens) * (rows + _PAD)


def multiply(x: Any, weight: Any, out: Any, first: Any, rows: int, warpgroups: int, staged: Any, met: Any) -> None:
    """The body of one CTA's consumers: some rows of the weight by all tokens.

    Args:
        x: reference to the tokens [>= T, D] in global memory, bf16.
        weight: reference to the weight [O, D].
        out: reference to the product [1, T, O].
        first: first row.
        rows: how many, a multiple of 8.
        warpgroups: consumers.
        staged: reference to shared memory of at least `bytes_of`, in tiles, that nothing else uses meanwhile.
        met: barrier that expects ``warpgroups`` arrivals.
    """
    warps, tokens = _WARPS * warpgroups, _padded(out.shape[1])
    zeros = jnp.zeros((_FRAGMENT * -(-rows // _STRIP), tokens), jnp.float32)

    turns = x.shape[1] // (_DEPTH * warps)
    together = 2 - turns % 2  # turns whose loads are under way at once

    def step(k: Any, sums: jax.Array) -> jax.Array:
        return _added(sums, x, weight, first, (k, together), rows, warps)

    _fetch(weight, first, rows, warps)
    sums = lax.fori_loop(0, turns // together, step, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
    _stage(sums, staged, rows)
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)
    _finish(staged, out, first, rows, warps)


def _padded(tokens: int) -> int:
    return -(-tokens // ALIGNED) * ALIGNED


def _fetch(weight: Any, first: Any, rows: int, warps: int) -> None:
    """Have rows brought into L2, since memory that a larger product keeps busy answers each of a warp's loads late."""
    lines, threads = rows * weight.shape[1] * 2 // _LINE, warps * utils.WARP_SIZE

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def run(ctx: Any, weight: Any, first: FragmentedArray) -> None:
        del ctx
        start = _global(weight, first.registers.item(), _i32(0))
        for turn in range(-(-lines // threads)):
            line = arith.addi(utils.thread_idx(), _i32(turn * threads))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, line, _i32(lines))):
                place = arith.muli(line, _i32(_LINE // 2))
                address = utils.getelementptr(start, [place], ir.BF16Type.get())
                llvm.inline_asm(None, [address], "prefetch.global.L2 [$0];", "l", has_side_effects=True)

    run(weight, jnp.asarray(first, jnp.int32))


def _added(sums: jax.Array, x: Any, weight: Any, first: Any, step: tuple[Any, int], rows: int, warps: int) -> jax.Array:
    """Sums plus the products of each warp's inputs of a step; rows and tokens that do not exist repeat the last one.

    Args:
        sums: [64 * strips, tokens] float32, of which a warp has 16 rows of each 64.
        x: reference to the tokens.
        weight: reference to the weight.
        first: first row.
        step: its number, and how many times a warp multiplies 32 inputs in it.
        rows: how many.
        warps: of the CTA.
    """
    held = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    last_token, (number, together) = x.shape[0] - 1, step

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR), return_type=held
    )
    def run(ctx: Any, sums: FragmentedArray, x: Any, weight: Any, *at: FragmentedArray) -> FragmentedArray:
        del ctx
        first, number = (scalar.registers.item() for scalar in at)
        line, quarter = _lane()
        registers = sums.registers.reshape(sums.shape[0] // _FRAGMENT, sums.shape[1] // ALIGNED, 2).copy()
        strips, tiles = registers.shape[:2]
        for turn in range(together):
            share = arith.addi(arith.muli(number, _i32(warps * together)), _i32(warps * turn))
            share = arith.addi(share, utils.warp_idx())
            column = arith.addi(arith.muli(share, _i32(_DEPTH)), arith.muli(quarter, _i32(_DEPTH // 4)))
            tokens = [arith.minui(arith.addi(line, _i32(tile * ALIGNED)), _i32(last_token)) for tile in range(tiles)]
            inputs = [_load(x, token, column) for token in tokens]
            for strip in range(strips):
                halves = [arith.addi(line, _i32(strip * _STRIP + half * ALIGNED)) for half in range(2)]
                of = [arith.addi(first, arith.minui(row, _i32(rows - 1))) for row in halves]
                words = [_load(weight, row, column) for row in of]
                for tile, pair in itertools.product(range(tiles), range(0, 4, 2)):
                    operand = [words[half][pair + i] for i in range(2) for half in range(2)]
                    registers[strip, tile] = _mma(operand, inputs[tile][pair : pair + 2], registers[strip, tile])
        return FragmentedArray(_registers=registers.reshape(sums.registers.shape), _layout=sums.layout, _is_signed=None)

    array: jax.Array = run(sums, x, weight, *(jnp.asarray(at, jnp.int32) for at in (first, number)))
    return array


def _stage(sums: jax.Array, staged: Any, rows: int) -> None:
    """Write a warp's sums to shared memory, float32 [warps, tokens, rows + 4]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _in_tiles(staged)))
    def run(ctx: Any, sums: FragmentedArray, staged: Any) -> None:
        del ctx
        base, tokens, warp, (line, quarter) = utils.memref_ptr(staged), sums.shape[1], utils.warp_idx(), _lane()
        registers = sums.registers.reshape(sums.shape[0] // _FRAGMENT, tokens // ALIGNED, 2)
        for (strip, tile, half), numbers in np.ndenumerate(registers):
            row = arith.addi(line, _i32(strip * _STRIP + half * ALIGNED))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, _i32(rows))):
                for i in range(2):
                    token = arith.addi(arith.muli(quarter, _i32(2)), _i32(tile * ALIGNED + i))
                    place = arith.addi(arith.muli(warp, _i32(tokens)), token)
                    place = arith.addi(arith.muli(place, _i32(rows + _PAD)), row)
                    llvm.store(_part(numbers, i), utils.getelementptr(base, [place], ir.F32Type.get()))

    run(sums, staged)


def _finish(staged: Any, out: Any, first: Any, rows: int, warps: int) -> None:
    """Add up what warps have of each row, one after another, and store it."""
    tokens, threads = out.shape[1], warps * utils.WARP_SIZE

    @plgpu.inline_mgpu(arg_types=(_in_tiles(staged), plgpu.RefType(), _SCALAR))
    def run(ctx: Any, staged: Any, out: Any, first: FragmentedArray) -> None:
        del ctx
        f32, index, base = ir.F32Type.get(), ir.IndexType.get(), utils.memref_ptr(staged)
        for turn in range(-(-rows * tokens // threads)):
            number = arith.addi(utils.thread_idx(), _i32(turn * threads))
            token, row = arith.divui(number, _i32(rows)), arith.remui(number, _i32(rows))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, _i32(rows * tokens))):
                total = utils.c(0.0, f32)
                for warp in range(warps):
                    line = arith.addi(token, _i32(warp * _padded(tokens)))
                    place = arith.addi(arith.muli(line, _i32(rows + _PAD)), row)
                    total = arith.addf(total, llvm.load(f32, utils.getelementptr(base, [place], f32)))
                rounded = arith.truncf(ir.MemRefType(out.type).element_type, total)
                place = arith.addi(first.registers.item(), row)
                memref.store(rounded, out, [utils.c(0, index), *(arith.index_cast(index, at) for at in (token, place))])

    run(staged, out, jnp.asarray(first, jnp.int32))


def _in_tiles(staged: Any) -> Any:
    """The type of a reference to shared memory that `shared_memory.tiled` laid out."""
    return plgpu.RefType(transforms(swizzle_of(staged.shape[-1], staged.dtype), staged.dtype))


def _lane() -> tuple[Any, Any]:
    """A thread's row within 8, and its quarter of that row, in mma's layouts."""
    lane = arith.remui(utils.thread_idx(), _i32(utils.WARP_SIZE))
    return arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))


def _global(ref: Any, row: Any, column: Any) -> Any:
    """The address of a number of a matrix in global memory."""
    wide, width = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type).shape[1]
    memory: Any = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    offset = arith.addi(arith.muli(arith.extui(wide, row), utils.c(width, wide)), arith.extui(wide, column))
    return utils.getelementptr(memory, [offset], ir.BF16Type.get())


def _load(ref: Any, row: Any, column: Any) -> list[Any]:
    """Four registers of two numbers, 16 bytes of a row of global memory."""
    pairs = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    loaded = llvm.load(pairs, _global(ref, row, column), alignment=16)
    return [_part(loaded, i) for i in range(4)]


def _mma(weight: list[Any], x: list[Any], sums: np.ndarray) -> list[Any]:
    """Sums of 16 rows and 8 tokens, two tokens a register, plus a product over 16 inputs."""
    f32 = ir.F32Type.get()
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    before = [_part(numbers, i) for numbers in sums for i in range(2)]
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    after: Any = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*weight, *x, *before], text, constraints)
    numbers = [llvm.extractvalue(f32, after, [i]) for i in range(4)]
    pair = ir.VectorType.get((2,), f32)
    return [vector.from_elements(pair, numbers[i : i + 2]) for i in (0, 2)]


def _part(numbers: Any, i: int) -> Any:
    return vector.extract(numbers, dynamic_position=[], static_position=[i])


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
