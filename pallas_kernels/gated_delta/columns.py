"""A head's state in the registers of a warpgroup, a column a thread (Mosaic GPU): a column needs no other thread.

Keys and queries are read from shared memory, four numbers an instruction, the same for all threads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, memref, vector

SIZE = 128  # of keys and values of a head: as many columns as a warpgroup has threads
SUMS = 4  # partial sums of a column, so that no addition waits for the one before
COLUMN = plgpu.Layout.WG_STRIDED((SIZE,), vec_size=1)
STATE = plgpu.Layout.WG_STRIDED((SIZE, SIZE), vec_size=1)  # row i of the state is register i
SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()


def load_state(ref: Any) -> jax.Array:
    """A state [dk, dv] of shared memory."""

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=plgpu.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, layout=STATE))
    def load(ctx: Any, ref: Any) -> FragmentedArray:
        del ctx
        column = _thread()
        rows = [_one(memref.load(ref, [_index(row), column])) for row in range(SIZE)]
        return FragmentedArray(_registers=np.array(rows, dtype=object), _layout=_layout(SIZE, SIZE), _is_signed=None)

    array: jax.Array = load(ref)
    return array


def store_state(state: jax.Array, ref: Any) -> None:
    """Write a state to global memory [dk, dv]; a warp writes 128 bytes of a row."""

    @plgpu.inline_mgpu(arg_types=(STATE, REF))
    def store(ctx: Any, state: FragmentedArray, ref: Any) -> None:
        del ctx
        column = _thread()
        for row, register in enumerate(state.registers.flat):
            memref.store(_first(register), ref, [_index(row), column])

    store(state, ref)


def load_column(ref: Any) -> jax.Array:
    """A row [dv] of shared memory in float32, a number a thread."""

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=plgpu.ShapeDtypeStruct((SIZE,), jnp.float32, layout=COLUMN))
    def load(ctx: Any, ref: Any) -> FragmentedArray:
        del ctx
        value = memref.load(ref, [_thread()])
        f32 = ir.F32Type.get()
        wide = value if value.type == f32 else arith.extf(f32, value)
        return _column(wide)

    array: jax.Array = load(ref)
    return array


def store_column(column: jax.Array, ref: Any) -> None:
    """Write a row [dv] to global memory, rounded to its dtype."""

    @plgpu.inline_mgpu(arg_types=(COLUMN, REF))
    def store(ctx: Any, column: FragmentedArray, ref: Any) -> None:
        del ctx
        dtype = ir.MemRefType(ref.type).element_type
        value = _first(column.registers.flat[0])
        memref.store(value if dtype == value.type else arith.truncf(dtype, value), ref, [_thread()])

    store(column, ref)


def projected(state: jax.Array, key: Any) -> jax.Array:
    """The products [dv] of a key [dk] in shared memory with the columns of a state."""

    @plgpu.inline_mgpu(arg_types=(STATE, REF), return_type=plgpu.ShapeDtypeStruct((SIZE,), jnp.float32, layout=COLUMN))
    def project(ctx: Any, state: FragmentedArray, key: Any) -> FragmentedArray:
        del ctx
        sums = _Sums()
        for row, number in enumerate(_numbers(key)):
            sums.add(row, number, _first(state.registers.flat[row]))
        return _column(sums.total())

    array: jax.Array = project(state, key)
    return array


def written(
    state: jax.Array, decay: jax.Array, delta: jax.Array, key: Any, query: Any | None, following: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write a token to a state: ``decay * S + key delta^T``, in one pass over its rows.

    Args:
        state: before the token.
        decay: of the token.
        delta: what is written of each value, [dv].
        key: of the token, [dk] in shared memory.
        query: of the token, [dk] in shared memory; None gives no output.
        following: key of the next token.

    Returns:
        The state; its products with the query (zeros without one), and with the following key.
    """
    column = plgpu.ShapeDtypeStruct((SIZE,), jnp.float32, layout=COLUMN)
    whole = plgpu.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, layout=STATE)
    refs = (key, following) if query is None else (key, following, query)

    @plgpu.inline_mgpu(arg_types=(STATE, SCALAR, COLUMN, *(REF for _ in refs)), return_type=(whole, column, column))
    def write(
        ctx: Any, state: FragmentedArray, decay: FragmentedArray, delta: FragmentedArray, *refs: Any
    ) -> tuple[FragmentedArray, ...]:
        del ctx
        factor, added = decay.registers.item(), _first(delta.registers.flat[0])
        factor = _first(factor) if isinstance(factor.type, ir.VectorType) else factor
        outputs, products = _Sums(), _Sums()
        rows = np.empty_like(state.registers)
        for row, numbers in enumerate(zip(*map(_numbers, refs), strict=True)):
            old = arith.mulf(_first(state.registers.flat[row]), factor)
            new = math.fma(numbers[0], added, old)
            rows[row] = _one(new)
            products.add(row, numbers[1], new)
            for number in numbers[2:]:
                outputs.add(row, number, new)
        result = FragmentedArray(_registers=rows, _layout=state.layout, _is_signed=None)
        return result, _column(outputs.total()), _column(products.total())

    arrays: tuple[jax.Array, jax.Array, jax.Array] = write(state, decay, delta, *refs)
    return arrays


class _Sums:
    """A sum over rows, in parts."""

    def __init__(self) -> None:
        zero = utils.c(0.0, ir.F32Type.get())
        self._parts = [zero] * SUMS

    def add(self, row: int, left: Any, right: Any) -> None:
        self._parts[row % SUMS] = math.fma(left, right, self._parts[row % SUMS])

    def total(self) -> Any:
        first, second, third, fourth = self._parts
        return arith.addf(arith.addf(first, second), arith.addf(third, fourth))


def _numbers(ref: Any) -> Any:
    """The numbers of a row of shared memory, loaded four at a time."""
    f32 = ir.F32Type.get()
    quad, pointer = ir.VectorType.get((4,), f32), utils.memref_ptr(ref)
    for first in range(0, SIZE, 4):
        loaded = llvm.load(quad, utils.getelementptr(pointer, [first], f32), alignment=16)
        for i in range(4):
            yield vector.extract(loaded, dynamic_position=[], static_position=[i])


def _thread() -> Any:
    """Number of the thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    return arith.index_cast(ir.IndexType.get(), arith.remui(thread, utils.c(SIZE, i32)))


def _index(value: int) -> Any:
    return utils.c(value, ir.IndexType.get())


def _one(value: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((1,), value.type), [value])


def _first(register: Any) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _column(value: Any) -> FragmentedArray:
    registers = np.array([_one(value)], dtype=object)
    return FragmentedArray(_registers=registers, _layout=_layout(SIZE), _is_signed=None)


def _layout(*shape: int) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1).to_mgpu()
