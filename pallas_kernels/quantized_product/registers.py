"""Numbers of few bits in the registers of a warpgroup (Mosaic GPU), by instructions that Pallas does not offer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import BFloat16, UInt16

from pallas_kernels import _compat
from pallas_kernels.quantized_product.layout import LONGEST, PLACES

TILE = 8  # columns of a tile of wgmma's layout
RUN = LONGEST // PLACES  # words of a group
EXACT = 128  # a bfloat16 from here to 255 has its integer in its last seven bits


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


def from_e4m3(ref: Any) -> BFloat16[jax.Array, "R C"]:
    """Numbers in e4m3 of shared memory [R, C] in bfloat16, as the first operand of wgmma.

    Threads load four neighbours each and trade two of them with their neighbours; conversions go by float16.
    """
    values = plgpu.layout_cast(_compat.smem_load(ref, plgpu.Layout.WGMMA_UPCAST_2X), plgpu.Layout.WGMMA)
    return values.astype(jnp.float16).astype(jnp.bfloat16)


def load(ref: Any, layout: Any) -> jax.Array:
    """A column of global memory in a layout; neighbouring rows may lie apart."""
    return _compat.smem_load(ref, layout, optimized=False)


def store_transposed(array: jax.Array, out: Any, part: Any, row: Any) -> None:
    """Store an array [rows, tokens] into ``out[part, tokens, row + rows]`` of global memory, less tokens beyond it.

    Eight threads write 8 neighbouring rows of a token: a whole sector in float32.
    """
    tokens, columns = out.shape[1], array.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(()))
    )
    def store(ctx: Any, array: FragmentedArray, out: Any, part: FragmentedArray, row: FragmentedArray) -> None:
        del ctx
        index = ir.IndexType.get()
        first, place = (arith.index_cast(index, at.registers.item()) for at in (row, part))

        def put(value: Any, at: tuple[Any, ...]) -> None:
            target = [place, at[1], arith.addi(first, at[0])]
            if columns == tokens:
                memref.store(value, out, target)
                return
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, at[1], utils.c(tokens, index))):
                memref.store(value, out, target)

        array.astype(ir.MemRefType(out.type).element_type).foreach(put)

    store(array, out, part, row)
