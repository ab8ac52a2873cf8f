"""Columns of a head's state as the first operand of wgmma (Mosaic GPU): four threads share two columns.

A block's keys and queries are multiplied by the state at once, on tensor cores (`first`): S^T, in two bfloat16, from
registers. Its sums over rows are added in the order of `columns`: a state has the same bits, whichever of the two folds
tokens into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_kernels import _compat
from pallas_kernels.gated_delta import columns as by_columns
from pallas_kernels.gated_delta.columns import COLUMNS, REF, SCALAR, SIZE
from pallas_kernels.gated_delta.tile import TOKENS

QUAD = 4  # threads that share columns, neighbours in a warp
PAIR = 2  # columns of a thread, 8 apart; and rows that lie beside each other in it
SPAN = QUAD * PAIR  # rows of a quad by one instruction
HALF = SIZE // 2  # rows of a product: 128 bytes of bfloat16, the width of a tile of shared memory


class Quads(by_columns.Columns):
    """What a warpgroup does with 64 columns of a state; arrays that it passes around are containers.

    Register ``32 c + 2 j + i`` of a state is row ``8 j + 2 q + i`` of column c of the thread, q being its place in the
    quad; register c of a value a column is that of its column c.
    """

    threads = QUAD
    sums = PAIR

    def __init__(self) -> None:
        super().__init__(COLUMNS)

    def _rows_of_tile(self) -> list[Any]:
        first = arith.muli(_place(), by_columns.index_of(PAIR))
        return [arith.addi(first, by_columns.index_of(i)) for i in range(PAIR)]

    def _numbers(self, ref: Any) -> Iterator[Any]:
        return by_columns.numbers_of(ref, arith.muli(_place(), by_columns.index_of(PAIR)), PAIR, SPAN)

    def _columns(self) -> list[Any]:
        return _columns()

    def products(self, state: jax.Array, vectors: Any, rest: Any) -> jax.Array:
        """Products of the columns with vectors [N, dk] in two bfloat16 in shared memory: [64, N] in wgmma's layout."""
        rounded, left = self._split(state)

        def product(sums: Any) -> None:
            for part, inputs in enumerate((pl.ds(0, HALF), pl.ds(HALF, HALF))):
                first, second = (_compat.smem_transpose(operand.at[:, inputs]) for operand in (vectors, rest))
                plgpu.wgmma(sums, rounded[part], first)
                plgpu.wgmma(sums, left[part], first)
                plgpu.wgmma(sums, rounded[part], second)

        zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, vectors.shape[0]), jnp.float32), plgpu.Layout.WGMMA)
        sums: jax.Array = pl.run_state(product)(plgpu.ACC.init(zeros))
        return sums

    def _split(self, state: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """S^T [64, 128] by halves of its rows [64, 64] in bfloat16: rounded, and what rounding left."""
        layout = plgpu.Layout.WGMMA
        half = plgpu.ShapeDtypeStruct((COLUMNS, HALF), jnp.bfloat16, layout=layout)

        @plgpu.inline_mgpu(arg_types=(self.state,), return_type=(half, half, half, half))
        def split(ctx: Any, state: FragmentedArray) -> tuple[FragmentedArray, ...]:
            del ctx
            shape = layout.to_mgpu().registers_shape((COLUMNS, HALF))
            wide, narrow = (ir.VectorType.get((PAIR,), kind.get()) for kind in (ir.F32Type, ir.BF16Type))
            parts = [np.empty(shape, dtype=object) for _ in range(4)]
            values = [by_columns.first_of(register) for register in state.registers.flat]
            for part, (rounded, left) in enumerate(zip(parts[:2], parts[2:], strict=True)):
                for n, index in enumerate(np.ndindex(shape)):
                    j, c = divmod(n, PAIR)  # tiles of 8 rows of S, each of two columns
                    at = c * self.rows + PAIR * (part * HALF // SPAN + j)
                    pair: Any = vector.from_elements(wide, values[at : at + PAIR])
                    in_16: Any = arith.truncf(narrow, pair)
                    rounded[index] = in_16
                    left[index] = arith.truncf(narrow, arith.subf(pair, arith.extf(wide, in_16)))
            return tuple(FragmentedArray(_registers=part, _layout=layout.to_mgpu(), _is_signed=None) for part in parts)

        arrays: list[jax.Array] = list(split(state))
        return arrays[:2], arrays[2:]

    def run(self, products: jax.Array, values: Any, factors: Any, outputs: Any, at: Any) -> None:
        """Run a block token by token, and write its outputs (`first`).

        Args:
            products: of the columns with 16 keys, then with 16 queries.
            values: of the tokens [T, 64], in shared memory.
            factors: as `Pairs.factors`, of the head, in shared memory.
            outputs: [B, T, HV, dv] in global memory.
            at: sequence, head and first column.
        """
        tokens = outputs.shape[1]

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, REF, REF, REF, SCALAR, SCALAR, SCALAR))
        def run(
            ctx: Any, products: FragmentedArray, values: Any, factors: Any, outputs: Any, *at: FragmentedArray
        ) -> None:
            del ctx
            index = ir.IndexType.get()
            b, head, first = (arith.index_cast(index, scalar.registers.item()) for scalar in at)
            block = _Block(products, values, factors, tokens)
            for s in range(tokens):
                block.write(s)
            dtype = ir.MemRefType(outputs.type).element_type
            for token, column, value in block.outputs():
                target = [b, token, head, arith.addi(first, column)]
                value = value if value.type == dtype else arith.truncf(dtype, value)
                if tokens == TOKENS:
                    memref.store(value, outputs, target)
                    continue
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, by_columns.index_of(tokens))):
                    memref.store(value, outputs, target)

        run(products, values, factors, outputs, *(jnp.asarray(scalar, jnp.int32) for scalar in at))


class _Block:
    """A block's tokens in the registers of a thread: of its two columns, tokens 8 n + 2 q + i, for n and i 0 and 1."""

    def __init__(self, products: FragmentedArray, values: Any, factors: Any, tokens: int):
        self._factors = factors
        first = arith.muli(_place(), by_columns.index_of(PAIR))
        self._tokens = [arith.addi(first, by_columns.index_of(SPAN * n + i)) for n, i in _OWN]
        kept, strength = (self._row(2 * TOKENS + row) for row in range(2))
        f32, last = ir.F32Type.get(), by_columns.index_of(tokens - 1)
        parts = [[_parts(register) for register in column] for column in _by_column(products)]
        self._read = [
            [arith.mulf(decay, parts[c][2 + n][i]) for (n, i), decay in zip(_OWN, kept, strict=True)]
            for c in range(PAIR)
        ]
        self._written: list[list[Any]] = [[] for _ in range(PAIR)]
        for c, column in enumerate(_columns()):
            for (n, i), token, decay, beta in zip(_OWN, self._tokens, kept, strength, strict=True):
                value = memref.load(values, [arith.minui(token, last), column])
                value = value if value.type == f32 else arith.extf(f32, value)
                missing = math.fma(arith.negf(decay), parts[c][n][i], value)
                self._written[c].append(arith.mulf(beta, missing))

    def write(self, s: int) -> None:
        """Let the tokens from s on know what token s writes, which is final."""
        (n_s, rest), later = divmod(s, SPAN), by_columns.index_of(s)
        q_s, i_s = divmod(rest, PAIR)
        written, read = self._row(s), self._row(TOKENS + s)
        final = [_of_quad(self._written[c][_OWN.index((n_s, i_s))], q_s) for c in range(PAIR)]
        for at, ((n, _), token) in enumerate(zip(_OWN, self._tokens, strict=True)):
            if n < n_s:
                continue  # before s, as all of the quad
            for c, value in enumerate(final):
                added = [math.fma(factors[at], value, old[c][at]) for factors, old in self._sums(written, read)]
                if n == n_s:  # NaN of a token must reach none before it, though the factor is 0
                    is_behind = (arith.cmpi(p, token, later) for p in (_GREATER, _GREATER_OR_EQUAL))
                    pairs = zip(is_behind, added, (self._written[c][at], self._read[c][at]), strict=True)
                    added = [arith.select(chosen, new, old) for chosen, new, old in pairs]
                self._written[c][at], self._read[c][at] = added

    def outputs(self) -> Iterator[tuple[Any, Any, Any]]:
        """Tokens, columns and outputs."""
        for c, column in enumerate(_columns()):
            yield from zip(self._tokens, itertools.repeat(column), self._read[c])

    def _sums(self, written: list[Any], read: list[Any]) -> tuple[tuple[list[Any], Any], tuple[list[Any], Any]]:
        return (written, self._written), (read, self._read)

    def _row(self, row: int) -> list[Any]:
        """The thread's numbers of a row of the factors."""
        first = arith.addi(arith.muli(_place(), by_columns.index_of(PAIR)), by_columns.index_of(row * TOKENS))
        return list(by_columns.numbers_of(self._factors, first, PAIR, SPAN, TOKENS))


_OWN = [(n, i) for n in range(TOKENS // SPAN) for i in range(PAIR)]
_GREATER, _GREATER_OR_EQUAL = arith.CmpIPredicate.ugt, arith.CmpIPredicate.uge


def _by_column(products: FragmentedArray) -> list[list[Any]]:
    """Registers of each of the thread's columns, 8 tokens each."""
    registers = list(products.registers.flat)
    return [registers[c::PAIR] for c in range(PAIR)]


def _parts(register: Any) -> list[Any]:
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(PAIR)]


def _of_quad(value: Any, place: int) -> Any:
    """The value that a thread of the quad has."""
    text = f"shfl.sync.idx.b32 $0, $1, {place}, 0x1c1f, 0xffffffff;"  # among 4 lanes
    return llvm.inline_asm(ir.F32Type.get(), [value], text, "=f,f", has_side_effects=True)


def _columns() -> list[Any]:
    """The thread's columns: each warp has 16, of which a quad has two that are 8 apart."""
    thread = by_columns.thread()
    warp, quad = by_columns.divided(thread, 32), by_columns.divided(arith.remui(thread, by_columns.index_of(32)), QUAD)
    first = arith.addi(arith.muli(warp, by_columns.index_of(16)), quad)
    return [first, arith.addi(first, by_columns.index_of(8))]


def _place() -> Any:
    """The thread's place in its quad."""
    return arith.remui(by_columns.thread(), by_columns.index_of(QUAD))
