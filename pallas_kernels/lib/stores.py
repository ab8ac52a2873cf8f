"""Stores of registers to global memory (Mosaic GPU), by instructions that Pallas does not offer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref


def store_transposed(array: jax.Array, out: Any, part: Any, row: Any, kept: tuple[int, int] | None = None) -> None:
    """Store an array [rows, tokens] into ``out[part, tokens, row + rows]`` of global memory, within its tokens.

    Eight threads write 8 neighbouring rows of a token: a whole sector in float32.

    Args:
        array: in wgmma's layout.
        out: [parts, tokens, rows].
        part: of ``out``.
        row: first row.
        kept: first and end of the array's rows that are stored, the others are dropped; None is all.
    """
    tokens = out.shape[1]
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), scalar, scalar))
    def store(ctx: Any, array: FragmentedArray, out: Any, *corner: FragmentedArray) -> None:
        del ctx
        index = ir.IndexType.get()
        place, row = (arith.index_cast(index, at.registers.item()) for at in corner)
        first_kept, end_kept = kept or (0, array.shape[0])

        def put(value: Any, at: tuple[Any, ...]) -> None:
            target = [place, at[1], arith.addi(row, at[0])]
            inside = []
            if tokens % array.shape[1]:
                inside.append(arith.cmpi(arith.CmpIPredicate.ult, at[1], utils.c(tokens, index)))
            if first_kept > 0:
                inside.append(arith.cmpi(arith.CmpIPredicate.uge, at[0], utils.c(first_kept, index)))
            if end_kept < array.shape[0]:
                inside.append(arith.cmpi(arith.CmpIPredicate.ult, at[0], utils.c(end_kept, index)))
            if not inside:
                memref.store(value, out, target)
                return
            with utils.when(functools.reduce(arith.andi, inside)):
                memref.store(value, out, target)

        array.astype(ir.MemRefType(out.type).element_type).foreach(put)

    store(array, out, *(jnp.asarray(at, jnp.int32) for at in (part, row)))
