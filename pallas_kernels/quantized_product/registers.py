"""Numbers of few bits in the registers of a warpgroup (Mosaic GPU), by instructions that Pallas does not offer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import BFloat16, Int16, UInt16

from pallas_kernels import _compat
from pallas_kernels.quantized_product.layout import E4M3_BITS, LONGEST, PLACES
from pallas_kernels.quantized_product.reference import MIDDLE

TILE = 8  # columns of a tile of wgmma's layout
_TURN = 8  # rows of a warp, of which a thread of wgmma's layout has one, before the next 8
RUN = LONGEST // PLACES  # words of a group
EXACT = 128  # a bfloat16 from here to 255 has its integer in its last seven bits
_BIAS = 0x7B807B80  # 2**120 twice in bfloat16
HALF = LONGEST // 2  # inputs of a product: 128 bytes of a token, the width of a tile of shared memory


def numbers(words: UInt16[jax.Array, "R W"], first: int, places: tuple[int, int]) -> BFloat16[jax.Array, "R C"]:
    """128 more than the 4-bit numbers in two places of a run of 16-bit words, side by side, in bfloat16.

    An integer that is put into the last bits of the number 128 is 128 more than itself, so no integer is converted.
    Two words are shifted, masked and joined as one: LLVM does not see that it can.

    Args:
        words: of some rows, in wgmma's layout.
        first: word of the run.
        places: 0 is the lowest four bits.
    """
    shape = (words.shape[0], len(places) * RUN)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def unpack(ctx: Any, words: FragmentedArray) -> FragmentedArray:
        del ctx
        run = words.registers[:, first // TILE : (first + RUN) // TILE]  # the second axis counts tiles of columns
        unpacked = np.concatenate([_in_place(run, place) for place in places], axis=1)
        return FragmentedArray(_registers=unpacked, _layout=words.layout, _is_signed=None)

    array: jax.Array = unpack(words)
    return array


def _in_place(run: np.ndarray, place: int) -> np.ndarray:
    """Registers of two numbers each for registers of two words."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    text = (f"shr.b32 $0, $1, {4 * place};\n" if place else "mov.b32 $0, $1;\n") + (
        "lop3.b32 $0, $0, 0x000f000f, 0x43004300, 0xea;"  # (a & b) | c
    )
    unpacked = np.empty_like(run)
    for index, register in np.ndenumerate(run):
        bits: Any = llvm.inline_asm(i32, [llvm.bitcast(i32, register)], text, "=r,r")
        unpacked[index] = llvm.bitcast(pair, bits)
    return unpacked


def e4m3_numbers(words: Int16[jax.Array, "R W"], first: int, place: int) -> BFloat16[jax.Array, "R C"]:
    """The e4m3 numbers in one of the two places of a run of 16-bit words, in bfloat16; NaN is 480.

    Their bits are those of a bfloat16 whose exponent has another bias, by which it is multiplied (`tiles.small_e4m3`).
    """
    shape = (words.shape[0], HALF)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def unpack(ctx: Any, words: FragmentedArray) -> FragmentedArray:
        del ctx
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        moved = E4M3_BITS[place].format("bits")
        text = "{ .reg .b32 bits, high, low;\n" + moved + "mul.rn.bf16x2 $0, bits, $2; }"
        run = words.registers[:, first // TILE : (first + HALF) // TILE]
        unpacked = np.empty_like(run)
        for index, register in np.ndenumerate(run):
            bits: Any = llvm.inline_asm(i32, [llvm.bitcast(i32, register), utils.c(_BIAS, i32)], text, "=r,r,r")
            unpacked[index] = llvm.bitcast(pair, bits)
        return FragmentedArray(_registers=unpacked, _layout=words.layout, _is_signed=None)

    array: jax.Array = unpack(words)
    return array


def from_e4m3(ref: Any) -> BFloat16[jax.Array, "R C"]:
    """Numbers in e4m3 of shared memory [R, C] in bfloat16, as the first operand of wgmma.

    Threads load four neighbours each and trade two of them with their neighbours; conversions go by float16.
    """
    values = plgpu.layout_cast(_compat.smem_load(ref, plgpu.Layout.WGMMA_UPCAST_2X), plgpu.Layout.WGMMA)
    return values.astype(jnp.float16).astype(jnp.bfloat16)


def loaded(weight: Any) -> Any:
    """What `widened` takes of 64 rows in shared memory: words in registers, or e4m3 numbers where they are."""
    return weight if weight.dtype == jnp.float8_e4m3fn else _compat.smem_load(weight, plgpu.Layout.WGMMA)


def widened(weight: Any, zeros: list[jax.Array], groups: int) -> Iterator[tuple[int, Any, jax.Array]]:
    """The numbers of a step, half a group at a time: groups, inputs within the step, and numbers [64, 64] in bfloat16.

    Args:
        weight: 64 rows, `loaded`.
        zeros: zero points of the rows of each group, or none.
        groups: of the step.
    """
    if weight.dtype == jnp.uint16:
        return _widened_4_bits(weight, zeros, groups)
    return _widened_words(weight, groups) if weight.dtype == jnp.int16 else _widened_8_bits(weight, groups)


def _widened_4_bits(words: jax.Array, zeros: list[jax.Array], groups: int) -> Iterator[tuple[int, Any, jax.Array]]:
    """As `widened`, less zero points.

    A product takes the numbers in two places of the words of a group, since those are 64 inputs: 128 bytes of a token,
    the width of a tile of shared memory.
    """
    for group, half in itertools.product(range(groups), range(2)):
        halves = numbers(words, group * RUN, (2 * half, 2 * half + 1))
        offset = jnp.bfloat16(EXACT + MIDDLE)
        if zeros:
            by_row = zeros[group].astype(jnp.bfloat16) + EXACT
            offset = lax.broadcast_in_dim(by_row, halves.shape, (0,))
        yield group, pl.ds(group * LONGEST + half * HALF, HALF), halves - offset


def _widened_words(words: jax.Array, groups: int) -> Iterator[tuple[int, Any, jax.Array]]:
    """As `widened`, of words of two e4m3 numbers."""
    for group, half in itertools.product(range(groups), range(2)):
        yield group, pl.ds(group * LONGEST + half * HALF, HALF), e4m3_numbers(words, group * HALF, half)


def _widened_8_bits(weight: Any, groups: int) -> Iterator[tuple[int, Any, jax.Array]]:
    """As `widened`."""
    for group in range(groups):
        of_group = from_e4m3(weight.at[:, pl.ds(group * LONGEST, LONGEST)])
        for half in range(2):
            inputs = pl.ds(group * LONGEST + half * HALF, HALF)
            yield group, inputs, of_group[:, half * HALF :][:, :HALF]


def load(ref: Any, layout: Any) -> jax.Array:
    """A column of global memory in a layout; neighbouring rows may lie apart."""
    return _compat.smem_load(ref, layout, optimized=False)


def load_in_turns(ref: Any, first: Any, second: Any, column: Any) -> jax.Array:
    """Load a column of floats of 64 rows of global memory, in turns 8 from ``first`` on and 8 from ``second`` on."""
    layout, scalar = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT(())
    held = plgpu.ShapeDtypeStruct((2 * _TURN * utils.WARPS_IN_WARPGROUP,), ref.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar, scalar), return_type=held)
    def load(ctx: Any, ref: Any, *at: FragmentedArray) -> FragmentedArray:
        del ctx
        first, second, column = (number.registers.item() for number in at)
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        row = arith.divui(thread, utils.c(utils.WARP_SIZE // _TURN, i32))  # 8 of each warp
        mosaic_layout = layout.to_mgpu()
        loaded = np.empty(mosaic_layout.registers_shape(held.shape), object)
        for (place, _), start in zip(np.ndenumerate(loaded), (first, second), strict=True):
            indices = [arith.index_cast(index, number) for number in (arith.addi(start, row), column)]
            value = memref.load(ref, indices)
            loaded[place] = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
        return FragmentedArray(_registers=loaded, _layout=mosaic_layout, _is_signed=None)

    array: jax.Array = load(ref, *(jnp.asarray(number, jnp.int32) for number in (first, second, column)))
    return array
