"""Hidden units of an MLP from the products of gate and up, on their way to memory (Mosaic GPU).

A consumer has 32 rows of gate and the 32 of up with the same units, in turns of 8: so wgmma leaves both products of a
unit and a token with one thread.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import BFloat16, Float

from pallas_kernels import _compat
from pallas_kernels.lib.shared_memory import WIDEST, transforms
from pallas_kernels.quantized_product.registers import TILE
from pallas_kernels.quantized_product.rescaled import ROWS
from pallas_kernels.quantized_product.staged import PIECE

HALF = ROWS // 2  # rows of gate, and rows of up, that a consumer has
BUFFERS = 2  # of a consumer: threads still read one while others write the next
_UNITS = 8  # of a thread: it copies 16 bytes of a token at a time
_CHUNKS = WIDEST // (2 * _UNITS)  # of a row of shared memory; the swizzle trades them within 8 rows
_SCALAR = plgpu.Layout.WG_SPLAT(())


def store(sums: Float[jax.Array, "64 T"], out: Any, place: tuple[Any, Any], me: Any, staged: Any) -> None:
    """Store the hidden units of a consumer's sums, ``silu(gate) * up``, of tokens that exist.

    Args:
        sums: in wgmma's layout, in turns 8 rows of gate and the 8 of up; both are rounded to bfloat16 first.
        out: [1, tokens, F] in global memory, bfloat16.
        place: first token and first unit.
        me: the number of the consumer.
        staged: shared memory, [consumers, 2, 16, 64] (`staged.scratch`).
    """
    token, unit = place
    gate, up = (_of_units(sums, half).astype(out.dtype).astype(jnp.float32) for half in range(2))
    hidden = (gate / (1 + jnp.exp(-gate)) * up).astype(out.dtype)
    for piece in range(sums.shape[1] // (2 * PIECE)):
        turned = plgpu.layout_cast(hidden[:, piece * PIECE :][:, :PIECE], plgpu.Layout.WGMMA_TRANSPOSED)
        buffer = staged.at[me, piece % BUFFERS]
        _compat.smem_transpose(buffer)[...] = turned
        _copy_out(buffer, out, token + piece * 2 * PIECE, unit)


def _of_units(sums: Float[jax.Array, "64 T"], half: int) -> Float[jax.Array, "64 T/2"]:
    """The sums of gate, or of up: in turns 8 rows of 16 tokens, and the same rows of the next 16."""
    columns = sums.shape[1] // 2
    held = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=held)
    def pick(ctx: Any, sums: FragmentedArray) -> FragmentedArray:
        del ctx
        # The second axis counts tiles of 8 columns, the only other one of two numbers the rows of a thread.
        rows = sums.registers.shape.index(2, 2)
        registers = np.take(sums.registers, half, axis=rows)
        tiles = np.arange(columns // TILE)
        piece, within = tiles // (PIECE // TILE), tiles % (PIECE // TILE)
        of_first = 2 * piece * (PIECE // TILE) + within
        picked = np.stack([registers[:, of_first + i * (PIECE // TILE)] for i in range(2)], axis=rows)
        return FragmentedArray(_registers=picked, _layout=sums.layout, _is_signed=None)

    array: jax.Array = pick(sums)
    return array


def _copy_out(buffer: BFloat16[Any, "16 64"], out: Any, token: Any, unit: Any) -> None:
    """Copy what a consumer's threads have written to a buffer: 16 bytes each."""
    _, tokens, width = out.shape
    references = plgpu.RefType(transforms(WIDEST, buffer.dtype)), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*references, _SCALAR, _SCALAR))
    def copy(ctx: Any, buffer: Any, out: Any, *corner: FragmentedArray) -> None:
        del ctx
        utils.warpgroup_barrier()
        first, start = (at.registers.item() for at in corner)
        thread = arith.remui(utils.thread_idx(), _number(utils.WARPGROUP_SIZE))
        line, chunk = _divided(thread, _CHUNKS)
        warp, turn = _divided(chunk, 2)
        swizzled = arith.xori(chunk, arith.remui(line, _number(_CHUNKS)))
        place = arith.addi(arith.muli(line, _number(ROWS)), arith.muli(swizzled, _number(_UNITS)))
        number = ir.BF16Type.get()
        read = utils.getelementptr(utils.memref_ptr(buffer), [place], number)
        units = llvm.load(ir.VectorType.get((_UNITS,), number), read)
        row = arith.addi(first, arith.addi(arith.muli(turn, _number(PIECE)), line))
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, _number(tokens))):
            wide = ir.IntegerType.get_signless(64)
            column = arith.extui(wide, arith.addi(start, arith.muli(warp, _number(_UNITS))))
            offset = arith.addi(arith.muli(arith.extui(wide, row), utils.c(width, wide)), column)
            memory: Any = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(out))
            llvm.store(units, utils.getelementptr(memory, [offset], number))

    copy(buffer, out, *(jnp.asarray(at, jnp.int32) for at in (token, unit)))


def _divided(value: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder."""
    return arith.divui(value, _number(by)), arith.remui(value, _number(by))


def _number(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
