"""How the Triton kernels of the experts are cut up, by the number of tokens and the GPU."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels import _compat
from pallas_kernels.experts.sort import rows_of
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS

MANY_ROWS = 64  # of a block, from which on parts are rounded: else they would be a third of the time
_HOPPER_BYTES, _OTHER_BYTES = 224 * 1024, 96 * 1024  # of shared memory that a program may have; sm_86 and sm_89 least


class Tile(NamedTuple):
    """What a program of one product has.

    Attributes:
        rows: of the weight (of gate and of up as many each).
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


def default_config(tokens: int, k: int, experts: int, width: int, inputs: int) -> Config:
    """The configuration of a call, `fitted` to nothing yet.

    Few rows of the weight are for few experts, so that there are programs enough for all multiprocessors: the down
    product of one token of 35B takes 11.0 us with 32 rows and 16.4 with 64.
    """
    rows = MAX_STREAM_TOKENS if tokens <= MAX_STREAM_TOKENS else rows_of(tokens * k, experts, MAX_STREAM_TOKENS)
    if rows >= MANY_ROWS:
        return Config(rows, Tile(128, 64, 3, 8), Tile(128, 64, 4, 8))
    touched = min(tokens * k, experts)
    gate_up = 64 if touched * width >= 64 * _compat.sm_count() else 32
    down = Tile(64, 128, 4) if touched * inputs >= 256 * _compat.sm_count() else Tile(32, 64, 6)
    return Config(rows, Tile(gate_up, 128, 4), down)


def fitted(config: Config, width: int, inputs: int) -> Config:
    """The configuration with tiles that divide the weights, and steps that the GPU's shared memory holds.

    Args:
        config: wanted.
        width: M, of an expert.
        inputs: D, of a token.
    """
    return config._replace(
        gate_up=_fitted(config.gate_up, width, inputs, 2, config.tokens),
        down=_fitted(config.down, inputs, width, 1, config.tokens),
    )


def _fitted(tile: Tile, rows: int, depth: int, parts: int, tokens: int) -> Tile:
    tile = tile._replace(rows=_power_of_two_in(rows, tile.rows), depth=_power_of_two_in(depth, tile.depth))
    step = 2 * tile.depth * (parts * tile.rows + tokens)  # bytes
    capability = _compat.compute_capability()
    is_large = capability is None or capability >= (9, 0)
    stages = (_HOPPER_BYTES if is_large else _OTHER_BYTES) // step
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))


def _power_of_two_in(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to ``most``."""
    return min(size & -size, most)
