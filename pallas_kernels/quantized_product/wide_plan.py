"""How a product of more than 64 tokens with a weight in few bits is cut up (``wide``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import SHARED_MEMORY
from pallas_kernels.quantized_product import staged
from pallas_kernels.quantized_product.hidden import HALF
from pallas_kernels.quantized_product.layout import LONGEST
from pallas_kernels.quantized_product.rescaled import ROWS, Rows

PAIR = 2  # CTAs of a cluster
BAND = 8  # tiles of tokens that CTAs work on together, so that what they read of both sides stays in L2
MOST_STAGES = 5
# Microseconds of a step by consumers and tokens, and of a tile, on an H200 with all multiprocessors at work (BENCH.md).
STEP_TIMES = {(3, 128): 1.02, (2, 128): 0.71, (2, 256): 1.34}
TWO_SIDED_STEP_TIMES = {(3, 128): 0.65, (2, 128): 0.47}
TILE_TIME = 2.0
MOST_SPLITS, MOST_OF_PARTS = 4, 512  # parts of the inputs, and tokens of a call that has any


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        consumers: warpgroups that multiply 64 rows of the weight each.
        tokens: of a tile.
        stages: steps in the ring; a step has the 128 inputs of a group.
        splits: parts of the inputs, each of which is a tile of its own.
        pair: CTAs that share a tile of tokens, 1 or 2.
        step_time: microseconds of a step, about.
    """

    consumers: int
    tokens: int
    stages: int
    splits: int = 1
    pair: int = PAIR
    step_time: float = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each pair of CTAs computes, tile after tile.

    Attributes:
        config: how the product is cut up.
        pieces: tiles along the rows of the weight, two to a pair.
        blocks: tiles along the tokens.
        steps: groups of inputs.
        units: hidden units of a part of an MLP's width, if the rows are gates and up projections: then a consumer has
            32 of each, and the results are hidden units (`hidden`). 0 are rows of anything.
    """

    config: Config
    pieces: int
    blocks: int
    steps: int
    units: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return ROWS * self.config.consumers

    @property
    def share(self) -> int:
        """Steps of a part of the inputs; the last one may have fewer."""
        return pl.cdiv(self.steps, self.config.splits)

    @property
    def count(self) -> int:
        """Tiles of a pair."""
        return self.pieces * self.blocks * self.config.splits

    @property
    def clusters(self) -> int:
        """Pairs that the kernel is launched with."""
        return min(self.count, _compat.sm_count() // self.config.pair)

    @property
    def cost(self) -> float:
        """Microseconds on an H200, about: of the busiest CTA, and to write and read parts."""
        config = self.config
        a_tile = config.step_time * self.share + TILE_TIME
        parts = config.splits * self.blocks * config.tokens * self.pieces * config.pair * self.rows
        return pl.cdiv(self.count, self.clusters) * a_tile + (parts * 8 / 5e6 if config.splits > 1 else 0)

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Piece, block and part of a tile: a band of blocks with all pieces and parts, then the next band."""
        each = self.pieces * self.config.splits
        band, rest = lax.div(tile, BAND * each), lax.rem(tile, BAND * each)
        width = jnp.minimum(BAND, self.blocks - band * BAND)
        block, rest = band * BAND + lax.rem(rest, width), lax.div(rest, width)
        return lax.rem(rest, self.pieces), block, lax.div(rest, self.pieces)

    def rows_of(self, row: Any) -> Rows:
        """The rows of the consumer that comes to `row` where each has the next 64."""
        if not self.units:
            return Rows(row)
        part, unit = self.unit_of(row)
        gate = 2 * self.units * part + unit
        return Rows(gate, gate + self.units)

    def unit_of(self, row: Any) -> tuple[Any, Any]:
        """The part, and its unit, where that consumer's 32 hidden units begin."""
        halves, half = self.units // HALF, lax.div(row, ROWS)
        return lax.div(half, halves), lax.rem(half, halves) * HALF

    def inputs(self, part: Any) -> tuple[Any, Any]:
        """First step of a part, and the one behind its last."""
        return part * self.share, jnp.minimum(self.steps, (part + 1) * self.share)


def configs(
    x: Any, values: Any, scales: Any, *, is_two_sided: bool = False, may_split: bool = True
) -> Iterator[Config]:
    """The configurations that fit into registers and shared memory, and whose parts all have steps."""
    tokens, steps, is_packed = tokens_of(x), scales.shape[1], values.dtype == jnp.uint16
    for (consumers, width), step_time in (TWO_SIDED_STEP_TIMES if is_two_sided else STEP_TIMES).items():
        if width > 128 and tokens <= 128:
            continue
        size = LONGEST * (consumers * ROWS // (2 if is_packed else 1) + width * (1 if is_two_sided else 2))
        stages = min(MOST_STAGES, (SHARED_MEMORY - staged.least_bytes(consumers)) // size)
        for splits in range(1, MOST_SPLITS + 1 if may_split and tokens <= MOST_OF_PARTS else 2):
            if pl.cdiv(steps, splits) * (splits - 1) >= steps:
                break
            yield Config(consumers, width, stages, splits, step_time=step_time)


def default_config(x: Any, values: Any, scales: Any, *, is_two_sided: bool = False, may_split: bool = True) -> Config:
    """The configuration of the least cost."""
    choices = configs(x, values, scales, is_two_sided=is_two_sided, may_split=may_split)
    return min(choices, key=lambda config: plan_of(config, x, values, scales).cost)


def plan_of(config: Config, x: Any, values: Any, scales: Any, units: int = 0) -> Plan:
    """The plan of a call that is cut up like this; ``units`` as in `Plan`."""
    pieces = pl.cdiv(len(values), ROWS * config.consumers * config.pair)
    return Plan(config, pieces, pl.cdiv(tokens_of(x), config.tokens), scales.shape[1], units)
