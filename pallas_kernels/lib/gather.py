"""Rows that lie anywhere in global memory, copied into a tile of shared memory (Mosaic GPU).

TMA gathers rows from Blackwell on. On Hopper all threads of a warpgroup copy 16 bytes at a time (``cp.async``), which
no thread waits for: `commit` closes a step's copies, and `arrived` waits for those of an earlier step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector
from jaxtyping import Array, Int

from pallas_kernels.lib.shared_memory import WIDEST, transforms

_BYTES = 16  # of a copy, the most that a thread copies at once
_CHUNKS = WIDEST // _BYTES  # of a row; the swizzle trades them within 8 rows
_LINES = utils.WARPGROUP_SIZE // _CHUNKS  # rows that a warpgroup copies at once
_NONE = -1  # a row of zeros
_SCALAR = plgpu.Layout.WG_SPLAT(())
# The bytes behind a step's are those of the next: fetched into L2 along with them, they spare 1.5 % of experts' gate_up
# (H100, 556 to 548 us). A policy for L2 beside it (evict_last) ended in illegal instructions where steps are few.
_COPY = f"cp.async.cg.shared.global.L2::256B [$0], [$1], {_BYTES}, $2;"


def rows(row_of: Any, first: Any, count: Any, length: int) -> Int[Array, " N"]:
    """The rows that each thread copies, in its registers.

    Loaded for every step they made experts' gate_up 16 % slower (H100).

    Args:
        row_of: global memory [R], int32: rows of the source of `start`.
        first: where in ``row_of`` the row that comes first is named.
        count: of rows; those behind them, up to ``length``, are zeros.
        length: a multiple of 16.
    """
    places, layout = length // _LINES, _layout(length)
    held = plgpu.ShapeDtypeStruct((length * _CHUNKS,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=held)
    def load(ctx: Any, row_of: Any, *scalars: FragmentedArray) -> FragmentedArray:
        del ctx
        first, count = (scalar.registers.item() for scalar in scalars)
        line, _ = _place_of_thread()
        numbers = []
        for place in range(places):
            row = arith.addi(line, _number(place * _LINES))
            exists = arith.cmpi(arith.CmpIPredicate.slt, row, count)
            number = memref.load(row_of, [arith.index_cast(ir.IndexType.get(), arith.addi(first, row))])
            numbers.append(arith.select(exists, number, _number(_NONE)))
        together = vector.from_elements(ir.VectorType.get((places,), _integer(32)), numbers)
        return FragmentedArray(_registers=np.array([together]), _layout=layout.to_mgpu(), _is_signed=True)

    array: jax.Array = load(row_of, *(jnp.asarray(scalar, jnp.int32) for scalar in (first, count)))
    return array


def start(source: Any, rows: Int[Array, " N"], target: Any, column: Any) -> None:
    """Start to copy 128 bytes of each row; all threads of a warpgroup call it.

    Args:
        source: global memory [T, D] of a 16-bit dtype; D is a multiple of 8.
        rows: from `rows`.
        target: shared memory [length, 64] in tiles with the widest swizzle.
        column: first column, a multiple of 8.
    """
    length, columns = target.shape
    references = plgpu.RefType(), plgpu.RefType(transforms(WIDEST, target.dtype))

    @plgpu.inline_mgpu(arg_types=(*references, _layout(length), _SCALAR))
    def copy(ctx: Any, source: Any, target: Any, rows: FragmentedArray, column: FragmentedArray) -> None:
        del ctx
        size, byte, void = WIDEST // columns, _integer(8), ir.Type.parse("!llvm.void")
        line, chunk = _place_of_thread()
        swizzled = arith.xori(chunk, arith.remui(line, _number(_CHUNKS)))  # alike for all rows of a thread
        corner = arith.addi(arith.muli(line, _number(WIDEST)), arith.muli(swizzled, _number(_BYTES)))
        shared = utils.getelementptr(utils.memref_ptr(target), [corner], byte)
        begin = arith.addi(arith.muli(column.registers.item(), _number(size)), arith.muli(chunk, _number(_BYTES)))
        memory: Any = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(source))
        memory = utils.getelementptr(memory, [begin], byte)
        width = utils.c(ir.MemRefType(source.type).shape[1] * size, _integer(64))
        for place in range(length // _LINES):
            row = vector.extract(rows.registers.item(), [], [place])
            exists = arith.cmpi(arith.CmpIPredicate.ne, row, _number(_NONE))
            offset = arith.muli(arith.extui(_integer(64), arith.select(exists, row, _number(0))), width)
            to = utils.getelementptr(shared, [place * _LINES * WIDEST], byte)
            read = arith.select(exists, _number(_BYTES), _number(0))  # the hardware fills up with zeros
            operands = [to, utils.getelementptr(memory, [offset], byte), read]
            llvm.inline_asm(void, operands, _COPY, "r,l,r,~{memory}", has_side_effects=True)

    copy(source, target, rows, jnp.asarray(column, jnp.int32))


def commit() -> None:
    """Close a thread's copies that have been started since the last call: they are those of a step."""

    @plgpu.inline_mgpu()
    def close(ctx: Any) -> None:
        del ctx
        nvvm.cp_async_commit_group()

    close()


def arrived(later: int) -> None:
    """Wait until the copies of all steps but the last ``later`` have arrived, and may be read by wgmma."""

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        del ctx
        nvvm.cp_async_wait_group(later)

    wait()
    plgpu.commit_smem()


def _layout(length: int) -> Any:
    """How the result of `rows` lies in registers: a thread holds every sixteenth row."""
    return plgpu.Layout.WG_STRIDED((length * _CHUNKS,), length // _LINES)


def _place_of_thread() -> tuple[Any, Any]:
    """The first row that a thread copies, and which 16 bytes of its rows."""
    thread = arith.remui(utils.thread_idx(), _number(utils.WARPGROUP_SIZE))
    return arith.divui(thread, _number(_CHUNKS)), arith.remui(thread, _number(_CHUNKS))


def _number(value: int) -> Any:
    return utils.c(value, _integer(32))


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)
