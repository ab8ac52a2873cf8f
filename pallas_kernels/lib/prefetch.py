"""Rows of global memory fetched into L2 ahead of the loads that need them (Mosaic GPU)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_GRAIN = 16  # bytes; starts and sizes of such copies are multiples
_ASSEMBLY = "cp.async.bulk.prefetch.L2.global [$0], $1;"


def into_l2(array: Any, first: Any, count: int) -> None:
    """Let a warpgroup fetch rows of an array into L2, by one instruction of one thread that waits for nothing.

    Memory that copies by TMA keep busy answers a warp's loads late: scales are fetched before they are needed.

    Args:
        array: [R, G] in global memory, a row behind the other.
        first: row; where it begins is a multiple of 16 bytes.
        count: of rows, whose bytes are a multiple of 16.
    """
    row = array.shape[1] * jnp.dtype(array.dtype).itemsize
    assert count * row % _GRAIN == 0, "a copy in bulk has whole pieces of 16 bytes"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def run(ctx: Any, array: Any, first: FragmentedArray) -> None:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, utils.c(0, i32))):
            memory: Any = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(array))
            place = arith.muli(arith.extui(i64, first.registers.item()), utils.c(row, i64))
            start = utils.getelementptr(memory, [place], ir.IntegerType.get_signless(8))
            llvm.inline_asm(None, [start, utils.c(count * row, i32)], _ASSEMBLY, "l,r", has_side_effects=True)

    run(array, jnp.asarray(first, jnp.int32))
