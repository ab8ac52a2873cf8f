"""Columns of a head's state in the registers of a warpgroup (Mosaic GPU): two threads a column, half of its rows each.

Keys and queries are read from shared memory, four numbers an instruction. Shared memory would be the limit if a thread
had a whole column: with 64 rows of two columns it reads half as much for as many multiplications. The four rows that a
thread reads lie beside those of the other thread, so that both reads have banks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, memref, vector

from pallas_kernels.lib.shared_memory import WIDEST, transforms

SIZE = 128  # of keys and values of a head
HALVES = 2  # threads of a column, neighbours in a warp
COLUMNS = SIZE // HALVES  # that a warpgroup has in one register of each thread
RUN = 4  # rows that a thread reads by one instruction
SUMS = 4  # partial sums of a thread, so that no addition waits for the one before
TILE_ROWS, TILE_COLUMNS = 8, WIDEST // 4  # of a state in shared memory
CHUNK = 4  # neighbours that a swizzle leaves together
SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()
TILED = plgpu.RefType(transforms(WIDEST, jnp.float32))


class Columns:
    """What a warpgroup does with `width` columns of a state, 64 or 128.

    Arrays that it passes around are containers: of a state, register ``64 j + i`` of a thread is row i of its half of
    its column ``64 j``; of a value a column, register j, which both threads of the column have. Another arrangement of
    columns and rows among threads overrides the methods that say which ones a thread has.
    """

    threads = HALVES  # of a column
    sums = SUMS  # partial sums of a thread

    def __init__(self, width: int):
        self.width, self.sets = width, self.threads * width // SIZE
        self.rows = SIZE // self.threads
        self.state = plgpu.Layout.WG_STRIDED((SIZE, width), vec_size=1)
        self.column = plgpu.Layout.WG_STRIDED((self.threads * width,), vec_size=1)
        self._state = plgpu.ShapeDtypeStruct((SIZE, width), jnp.float32, layout=self.state)
        self._column = plgpu.ShapeDtypeStruct((self.threads * width,), jnp.float32, layout=self.column)

    def load_state(self, ref: Any) -> jax.Array:
        """Columns of a state, [dk, width] of `tiled` shared memory."""

        @plgpu.inline_mgpu(arg_types=(TILED,), return_type=self._state)
        def load(ctx: Any, ref: Any) -> FragmentedArray:
            del ctx
            return array_of([llvm.load(ir.F32Type.get(), place) for place in self._places(ref)], self.state)

        array: jax.Array = load(ref)
        return array

    def keep_state(self, state: jax.Array, ref: Any) -> None:
        """Write columns of a state to `tiled` shared memory, for TMA to copy them."""

        @plgpu.inline_mgpu(arg_types=(self.state, TILED))
        def keep(ctx: Any, state: FragmentedArray, ref: Any) -> None:
            del ctx
            for place, register in zip(self._places(ref), state.registers.flat, strict=True):
                llvm.store(first_of(register), place)

        keep(state, ref)

    def store_state(self, state: jax.Array, ref: Any) -> None:
        """Write columns of a state to global memory [dk, width]; a warp writes whole sectors."""

        @plgpu.inline_mgpu(arg_types=(self.state, REF))
        def store(ctx: Any, state: FragmentedArray, ref: Any) -> None:
            del ctx
            places = [(row, column) for column in self._columns() for row in self._rows()]
            for place, register in zip(places, state.registers.flat, strict=True):
                memref.store(first_of(register), ref, list(place))

        store(state, ref)

    def load_column(self, ref: Any) -> jax.Array:
        """A value a column, [width] of shared memory, in float32."""

        @plgpu.inline_mgpu(arg_types=(REF,), return_type=self._column)
        def load(ctx: Any, ref: Any) -> FragmentedArray:
            del ctx
            f32, values = ir.F32Type.get(), [memref.load(ref, [column]) for column in self._columns()]
            return array_of([x if x.type == f32 else arith.extf(f32, x) for x in values], self.column)

        array: jax.Array = load(ref)
        return array

    def store_column(self, values: jax.Array, ref: Any) -> None:
        """Write a value a column to global memory [width], rounded to its dtype."""

        @plgpu.inline_mgpu(arg_types=(self.column, REF))
        def store(ctx: Any, values: FragmentedArray, ref: Any) -> None:
            del ctx
            dtype = ir.MemRefType(ref.type).element_type
            for column, register in zip(self._columns(), values.registers.flat, strict=True):
                value = first_of(register)
                memref.store(value if dtype == value.type else arith.truncf(dtype, value), ref, [column])

        store(values, ref)

    def projected(self, state: jax.Array, key: Any) -> jax.Array:
        """The product of each column with a key [dk] in shared memory."""

        @plgpu.inline_mgpu(arg_types=(self.state, REF), return_type=self._column)
        def project(ctx: Any, state: FragmentedArray, key: Any) -> FragmentedArray:
            del ctx
            sums = [self._sum() for _ in range(self.sets)]
            for row, number in enumerate(self._numbers(key)):
                for j, total in enumerate(sums):
                    total.add(row, number, first_of(state.registers.flat[j * self.rows + row]))
            return array_of([total.total() for total in sums], self.column)

        array: jax.Array = project(state, key)
        return array

    def written(
        self, state: jax.Array, decay: jax.Array, delta: jax.Array, key: Any, query: Any | None, following: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Write a token to a state: ``decay * S + key delta^T``, in one pass over its rows.

        Args:
            state: before the token.
            decay: of the token.
            delta: what is written of each value.
            key: of the token, [dk] in shared memory.
            query: of the token, [dk] in shared memory; None gives no output.
            following: key of the next token.

        Returns:
            The state; its products with the query (zeros without one), and with the following key.
        """
        refs = (key, following) if query is None else (key, following, query)

        @plgpu.inline_mgpu(
            arg_types=(self.state, SCALAR, self.column, *(REF for _ in refs)),
            return_type=(self._state, self._column, self._column),
        )
        def write(
            ctx: Any, state: FragmentedArray, decay: FragmentedArray, delta: FragmentedArray, *refs: Any
        ) -> tuple[FragmentedArray, ...]:
            del ctx
            factor = decay.registers.item()
            factor = first_of(factor) if isinstance(factor.type, ir.VectorType) else factor
            added = [first_of(register) for register in delta.registers.flat]
            outputs, products = ([self._sum() for _ in added] for _ in range(2))
            new: list[Any] = [None] * state.registers.size
            for row, numbers in enumerate(zip(*map(self._numbers, refs), strict=True)):
                for j, written in enumerate(added):
                    at = j * self.rows + row
                    new[at] = math.fma(numbers[0], written, arith.mulf(first_of(state.registers.flat[at]), factor))
                    products[j].add(row, numbers[1], new[at])
                    for number in numbers[2:]:
                        outputs[j].add(row, number, new[at])
            sums = (array_of([total.total() for total in part], self.column) for part in (outputs, products))
            return array_of(new, self.state), *sums

        arrays: tuple[jax.Array, jax.Array, jax.Array] = write(state, decay, delta, *refs)
        return arrays

    def _sum(self) -> _Sums:
        return _Sums(self.sums, self.threads)

    def _rows(self) -> list[Any]:
        """The thread's rows of a state."""
        return [arith.addi(row, index_of(first)) for first in range(0, SIZE, TILE_ROWS) for row in self._rows_of_tile()]

    def _rows_of_tile(self) -> list[Any]:
        """The thread's rows of 8."""
        first = arith.muli(_half(), index_of(RUN))
        return [arith.addi(first, index_of(row)) for row in range(RUN)]

    def _places(self, ref: Any) -> Iterator[Any]:
        """Pointers to the thread's numbers of a state in tiles of shared memory.

        The swizzle moves four neighbours at a time, each row of a tile its own way: so the rows that a warp reads at
        once have banks of their own. In plain rows it read 64 columns in four times as many cycles.
        """
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        across, size = self.width // TILE_COLUMNS, TILE_ROWS * TILE_COLUMNS
        pointer = utils.memref_ptr(ref)
        for column in self._columns():
            tile, within = divided(column, TILE_COLUMNS), arith.remui(column, index_of(TILE_COLUMNS))
            chunk, rest = divided(within, CHUNK), arith.remui(within, index_of(CHUNK))
            begin = arith.addi(arith.muli(tile, index_of(size)), rest)
            firsts = []
            for row in self._rows_of_tile():
                swizzled = arith.muli(arith.xori(chunk, row), index_of(CHUNK))
                place = arith.addi(arith.muli(row, index_of(TILE_COLUMNS)), swizzled)
                firsts.append(utils.getelementptr(pointer, [arith.index_cast(i32, arith.addi(begin, place))], f32))
            for at in range(0, SIZE // TILE_ROWS * across * size, across * size):
                yield from (utils.getelementptr(first, [at], f32) for first in firsts)

    def _numbers(self, ref: Any) -> Iterator[Any]:
        """The thread's numbers of a row [dk] of shared memory."""
        return _numbers(ref)

    def _columns(self) -> list[Any]:
        """The thread's columns."""
        first = divided(thread(), HALVES)
        return [arith.addi(first, index_of(j * COLUMNS)) for j in range(self.sets)]


class _Sums:
    """A sum over the rows of a column, in parts."""

    def __init__(self, parts: int, threads: int) -> None:
        zero = utils.c(0.0, ir.F32Type.get())
        self._parts, self._threads = [zero] * parts, threads

    def add(self, row: int, left: Any, right: Any) -> None:
        part = row % len(self._parts)
        self._parts[part] = math.fma(left, right, self._parts[part])

    def total(self) -> Any:
        """The sum over all threads of the column: its order is the same for two and for four threads."""
        parts, distance = self._parts, 1
        while len(parts) > 1:
            parts = [arith.addf(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        [total] = parts
        while distance < self._threads:
            total = arith.addf(total, utils.shfl_bfly(total, distance))
            distance *= 2
        return total


def _numbers(ref: Any) -> Any:
    """The thread's numbers of a row [dk] of shared memory."""
    yield from numbers_of(ref, arith.muli(_half(), index_of(RUN)), RUN, RUN * HALVES)


def numbers_of(ref: Any, first: Any, run: int, step: int, size: int = SIZE) -> Any:
    """Numbers in shared memory: a run from `first` on, by one instruction, and one after each step, `size` far."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    begin = arith.index_cast(i32, first)
    pointer = utils.getelementptr(utils.memref_ptr(ref), [begin], f32)
    for at in range(0, size, step):
        place = utils.getelementptr(pointer, [at], f32)
        loaded = llvm.load(ir.VectorType.get((run,), f32), place, alignment=4 * run)
        for i in range(run):
            yield vector.extract(loaded, dynamic_position=[], static_position=[i])


def thread() -> Any:
    """Number of the thread in its warpgroup."""
    return arith.remui(gpu.thread_id(gpu.Dimension.x), index_of(SIZE))


def _half() -> Any:
    """Which half of the rows the thread has."""
    return arith.remui(thread(), index_of(HALVES))


def divided(value: Any, by: int) -> Any:
    return arith.divui(value, index_of(by))


def index_of(value: int) -> Any:
    return utils.c(value, ir.IndexType.get())


def first_of(register: Any) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=[0])


def array_of(values: list[Any], layout: Any) -> FragmentedArray:
    registers = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        registers[i] = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)
