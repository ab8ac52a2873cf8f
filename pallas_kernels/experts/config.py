"""How the Triton kernels of the experts are cut up, by the number of tokens and the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels import _compat
from pallas_kernels.experts.sort import rows_of
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS
from pallas_kernels.quantized_product.layout import LONGEST, FewBits, span_of_group

MANY_ROWS = 64  # of a block, from which on parts are rounded: else they would be a third of the time
_HOPPER_BYTES, _OTHER_BYTES = 224 * 1024, 96 * 1024  # of shared memory that a program may have; sm_86 and sm_89 least


class Tile(NamedTuple):
    """What a program of one product has.

    Attributes:
        rows: of the weight (of gate and of up as many each); at least 16 together.
        depth: inputs of a step.
        num_stages: steps in flight.
        num_warps: of a program.
    """

    rows: int
    depth: int
    num_stages: int
    num_warps: int = 4


class Config(NamedTuple):
    """How a call is cut up.

    Attributes:
        tokens: rows of a block.
        gate_up: tiles of the first product.
        down: tiles of the second.
    """

    tokens: int
    gate_up: Tile
    down: Tile


def default_config(tokens: int, k: int, gate_up: Any, down: Any) -> Config:
    """The configuration of a call with weights [X, 2, M, D] and [X, D, M], `fitted` to nothing yet.

    Few rows of the weight are for few experts, so that there are programs enough for all multiprocessors: the down
    product of one token of 35B takes 11.0 us with 32 rows and 16.4 with 64.
    """
    experts, _, width, inputs = gate_up.shape
    rows = MAX_STREAM_TOKENS if tokens <= MAX_STREAM_TOKENS else rows_of(tokens * k, experts, MAX_STREAM_TOKENS)
    touched = min(tokens * k, experts)
    return Config(
        rows,
        _few_bits_tile(gate_up, rows, touched * width, 2)
        if isinstance(gate_up, FewBits)
        else _gate_up_tile(rows, touched * width),
        _few_bits_tile(down, rows, touched * inputs, 1)
        if isinstance(down, FewBits)
        else _down_tile(rows, touched * inputs),
    )


def _gate_up_tile(rows: int, outputs: int) -> Tile:
    if rows >= MANY_ROWS:
        return Tile(128, 64, 3, 8)
    if outputs < 32 * _compat.sm_count():  # one token of 35B: 13.9 us, 14.5 with 32 rows
        return Tile(8, 256, 4, 1)
    return Tile(64 if outputs >= 64 * _compat.sm_count() else 32, 128, 4)


def _down_tile(rows: int, outputs: int) -> Tile:
    if rows >= MANY_ROWS:
        return Tile(128, 64, 4, 8)
    return Tile(64, 128, 3) if outputs >= 256 * _compat.sm_count() else Tile(32, 64, 6)


def _few_bits_tile(weight: FewBits, rows: int, outputs: int, parts: int) -> Tile:
    """A tile for a weight in few bits, whose numbers a program widens in registers.

    Few steps in flight leave shared memory to more programs, which overlap widening with each other's products. 32 rows
    are not multiplied by warpgroups: gate_up of one token in e4m3 takes 31 us with them and 20 with 64, but as many
    programs are short of work in 4 bits, 15 and 17 us (122B over 2, BENCH.md).
    """
    of_each = outputs / _compat.sm_count()
    if rows >= MANY_ROWS and _has_warpgroups():
        return Tile(64, LONGEST, 3, 8 if parts == 2 else 4)
    if rows >= MANY_ROWS:  # with more rows, or fewer warps, registers are spilled, by the machine code for 8.0 and 8.9
        return Tile(64 if parts == 1 else 32, LONGEST, 3, 8)
    if parts == 2:
        return Tile(32 if weight.is_packed and of_each < 64 else 64, LONGEST, 6 if weight.is_packed else 3)
    return Tile(128, LONGEST, 3) if of_each >= (256 if weight.is_packed else 1024) else Tile(64, LONGEST, 4)


def fitted(config: Config, gate_up: Any, down: Any) -> Config:
    """The configuration with tiles that divide the weights, and steps that the GPU's shared memory holds.

    Args:
        config: wanted.
        gate_up: [X, 2, M, D].
        down: [X, D, M].
    """
    return config._replace(
        gate_up=_fitted(config.gate_up, gate_up, 2, config.tokens),
        down=_fitted(config.down, down, 1, config.tokens),
    )


def _fitted(tile: Tile, weight: Any, parts: int, tokens: int) -> Tile:
    *_, rows, inputs = weight.shape
    is_few = isinstance(weight, FewBits)
    depth = span_of_group(weight.group) if is_few else power_of_two_in(inputs, tile.depth)
    tile = tile._replace(rows=power_of_two_in(rows, tile.rows), depth=depth)
    step = depth * parts * tile.rows * _bits(weight) // 8 + 2 * depth * tokens  # bytes
    stages = min((_HOPPER_BYTES if _has_warpgroups() else _OTHER_BYTES) // step, inputs // depth + 1)
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))


def _has_warpgroups() -> bool:
    """Whether the GPU is a Hopper or newer; without any, what it would have."""
    capability = _compat.compute_capability()
    return capability is None or capability >= (9, 0)


def _bits(weight: Any) -> int:
    """Bits of a number."""
    if not isinstance(weight, FewBits):
        return 16
    return 4 if weight.is_packed else 8


def power_of_two_in(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to ``most``."""
    return min(size & -size, most)
