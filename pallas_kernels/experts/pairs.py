"""Pairs of a token and one of its experts inside of a Mosaic kernel: which experts are touched, and what pairs get."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_WIDTH = utils.WARPGROUP_SIZE


def list_touched(chosen: Any, experts: int, touched: Any, copy: Any, flags: Any) -> None:
    """Let a warpgroup list the experts that occur among pairs, by their numbers.

    Args:
        chosen: [P] int32 in global memory; numbers outside of 0..X-1 are none of an expert.
        experts: X.
        touched: [P + 1] int32 in shared memory; gets the experts, and in the last place how many they are.
        copy: [P] int32 in shared memory; gets what was chosen.
        flags: [X + 4] int32 in shared memory, for the warpgroup's own use.
    """
    pairs = chosen.shape[0]

    @plgpu.inline_mgpu(arg_types=(_REF,) * 4)
    def run(ctx: Any, chosen: Any, touched: Any, copy: Any, flags: Any) -> None:
        del ctx
        me, each = _thread(), -(-experts // _WIDTH)
        for turn in range(each):
            at = arith.addi(me, _i32(turn * _WIDTH))
            with utils.when(_less(at, _i32(experts))):
                _store(_i32(0), flags, at)
        utils.warpgroup_barrier()
        for turn in range(-(-pairs // _WIDTH)):
            pair = arith.addi(me, _i32(turn * _WIDTH))
            with utils.when(_less(pair, _i32(pairs))):
                expert = _load(chosen, pair)
                _store(expert, copy, pair)
                with utils.when(_less(expert, _i32(experts))):  # unsigned: -1 is not
                    _store(_i32(1), flags, expert)
        utils.warpgroup_barrier()
        first = arith.muli(me, _i32(each))
        mine = []
        for i in range(each):
            at = arith.addi(first, _i32(i))
            is_one = _less(at, _i32(experts))
            flag = _load(flags, arith.minui(at, _i32(experts - 1)))
            mine.append((at, arith.select(is_one, flag, _i32(0))))
        count = functools.reduce(arith.addi, [flag for _, flag in mine])
        lane, warp = arith.remui(me, _i32(32)), arith.divui(me, _i32(32))
        before = count
        for distance in (1, 2, 4, 8, 16):
            other = _shuffled_up(before, distance)
            before = arith.addi(before, arith.select(_less(lane, _i32(distance)), _i32(0), other))
        with utils.when(_equal(lane, _i32(31))):
            _store(before, flags, arith.addi(warp, _i32(experts)))
        utils.warpgroup_barrier()
        place = arith.subi(before, count)
        for other in range(_WIDTH // 32):
            total = _load(flags, _i32(experts + other))
            place = arith.addi(place, arith.select(_less(_i32(other), warp), total, _i32(0)))
        for at, flag in mine:
            with utils.when(_equal(flag, _i32(1))):
                _store(at, touched, place)
            place = arith.addi(place, flag)
        with utils.when(_equal(me, _i32(_WIDTH - 1))):
            _store(place, touched, _i32(pairs))
        utils.warpgroup_barrier()

    run(chosen, touched, copy, flags)


def store_chosen(
    sums: list[jax.Array], parts: Any, rows: list[Any], expert: Any, chosen: Any, weights: Any, tokens: int
) -> None:
    """Store an expert's outputs of the tokens that chose it, weighted.

    Args:
        sums: [64, tokens] in wgmma's layout, of each run of rows.
        parts: [k T or more, D] float32 in global memory: row ``j T + t`` is that of token t's choice j.
        rows: the first row of each run.
        expert: its number.
        chosen: [T k] in shared memory.
        weights: [T k] float32 in global memory.
        tokens: T.
    """
    k = chosen.shape[0] // tokens
    layouts = (plgpu.Layout.WGMMA,) * len(sums)

    @plgpu.inline_mgpu(arg_types=(*layouts, _REF, _REF, _REF, *(_SCALAR,) * (len(rows) + 1)))
    def run(ctx: Any, *given: Any) -> None:
        del ctx
        arrays, (parts, chosen, weights), scalars = given[: len(sums)], given[len(sums) :][:3], given[len(sums) + 3 :]
        expert, *firsts = (scalar.registers.item() for scalar in scalars)
        for tile, i in _columns(arrays[0]):
            token = _token(tile, i)
            safe = arith.minui(token, _i32(tokens - 1))
            choice = _i32(k)
            for j in range(k):
                other = _load(chosen, arith.addi(arith.muli(safe, _i32(k)), _i32(j)))
                choice = arith.select(_equal(other, expert), _i32(j), choice)
            is_chosen = arith.andi(_less(choice, _i32(k)), _less(token, _i32(tokens)))
            with utils.when(is_chosen):
                weight = _load(weights, arith.addi(arith.muli(safe, _i32(k)), choice))
                target = arith.addi(arith.muli(choice, _i32(tokens)), safe)
                _put(arrays, firsts, parts, (tile, i), target, weight)

    run(*sums, parts, chosen, weights, *(jnp.asarray(number, jnp.int32) for number in (expert, *rows)))


def store_weighted(sums: list[jax.Array], parts: Any, rows: list[Any], first: int, weights: Any, tokens: int) -> None:
    """Store outputs of all tokens, weighted, into rows from the first one on; arguments as for `store_chosen`."""
    layouts = (plgpu.Layout.WGMMA,) * len(sums)

    @plgpu.inline_mgpu(arg_types=(*layouts, _REF, _REF, *(_SCALAR,) * len(rows)))
    def run(ctx: Any, *given: Any) -> None:
        del ctx
        arrays, (parts, weights), scalars = given[: len(sums)], given[len(sums) :][:2], given[len(sums) + 2 :]
        firsts = [scalar.registers.item() for scalar in scalars]
        for tile, i in _columns(arrays[0]):
            token = _token(tile, i)
            with utils.when(_less(token, _i32(tokens))):
                _put(arrays, firsts, parts, (tile, i), arith.addi(token, _i32(first)), _load(weights, token))

    run(*sums, parts, weights, *(jnp.asarray(number, jnp.int32) for number in rows))


def _columns(array: FragmentedArray) -> list[tuple[int, int]]:
    """Tiles of 8 tokens, and which of a thread's two neighbours in them."""
    return [(tile, i) for tile in range(array.shape[1] // 8) for i in range(2)]


def _token(tile: int, i: int) -> Any:
    """The token of a thread's number in wgmma's layout."""
    quarter = arith.remui(_thread(), _i32(4))
    return arith.addi(arith.muli(quarter, _i32(2)), _i32(8 * tile + i))


def _put(
    arrays: tuple[FragmentedArray, ...],
    firsts: list[Any],
    parts: Any,
    column: tuple[int, int],
    target: Any,
    weight: Any,
) -> None:
    """Store a thread's numbers of a token, weighted."""
    tile, i = column
    row = arith.addi(arith.muli(arith.divui(_thread(), _i32(32)), _i32(16)), _line())
    for array, first in zip(arrays, firsts, strict=True):
        registers = array.registers.reshape(array.shape[1] // 8, 2)  # tiles of 8 tokens, rows 8 apart
        for half in range(2):
            value = vector.extract(registers[tile, half], dynamic_position=[], static_position=[i])
            at = arith.addi(first, arith.addi(row, _i32(8 * half)))
            memref.store(arith.mulf(value, weight), parts, [_index(target), _index(at)])


def _line() -> Any:
    return arith.divui(arith.remui(_thread(), _i32(32)), _i32(4))


def _thread() -> Any:
    return arith.remui(utils.thread_idx(), _i32(_WIDTH))


def _shuffled_up(value: Any, distance: int) -> Any:
    text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
    return llvm.inline_asm(value.type, [value], text, "=r,r", has_side_effects=True)


def _load(ref: Any, at: Any) -> Any:
    return memref.load(ref, [_index(at)])


def _store(value: Any, ref: Any, at: Any) -> None:
    memref.store(value, ref, [_index(at)])


def _less(left: Any, right: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, left, right)


def _equal(left: Any, right: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, left, right)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _i32(value: int) -> Any:
    return utils.c(value, ir.IntegerType.get_signless(32))
