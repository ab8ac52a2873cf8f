"""How a product of up to 64 tokens with a weight in few bits is cut up (``mosaic``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _compat
from pallas_kernels.lib import warp_product
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED, SHARED_MEMORY
from pallas_kernels.lib.weight_first import tiles_of
from pallas_kernels.quantized_product.layout import LONGEST
from pallas_kernels.quantized_product.rescaled import ROWS

MAX_TOKENS = 64
THREADS = 128  # of a warpgroup
_REGISTERS, _MOST_REGISTERS, _PRODUCER_REGISTERS = 1 << 16, 248, 40  # of a multiprocessor, and of a thread
MIN_STAGES, MAX_STAGES = 3, 4  # of a ring; more in flight measured slower
_MOST_OF_FOUR = 16  # tokens that four consumers multiply


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        consumers: warpgroups that multiply 64 rows of the weight each.
        groups: of inputs that a step has.
        stages: steps in the ring.
    """

    consumers: int
    groups: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each CTA computes.

    Attributes:
        config: how the product is cut up.
        tiles: of rows of the weight.
        steps: of a tile.
        tokens: of the call, padded.
        is_packed: whether numbers have 4 bits: then the words of the next step are in registers before a step ends.
    """

    config: Config
    tiles: int
    steps: int
    tokens: int
    is_packed: bool

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return ROWS * self.config.consumers

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return LONGEST * self.config.groups

    @property
    def run(self) -> int:
        """Steps of each CTA; the last one may have fewer."""
        return pl.cdiv(self.tiles * self.steps, _compat.sm_count())

    @property
    def ctas(self) -> int:
        """CTAs that have anything to do."""
        return pl.cdiv(self.tiles * self.steps, self.run)

    @property
    def parts(self) -> int:
        """CTAs, at most, that share a tile."""
        if self.steps % self.run == 0 or self.run % self.steps == 0:
            return max(1, self.steps // self.run)
        return pl.cdiv(self.steps - 1, self.run) + 1

    def tiles_beside(self, other: Any) -> int:
        """Tiles of another weight, on multiprocessors that are left; 0 if it is None or has no such tiles.

        The ring must have room for the sums of a tile.
        """
        if other is None or not len(other):
            return 0
        tiles = next(tiles_of(len(other), _compat.sm_count() - self.ctas), 0)
        ring = self.config.stages * self.rows * self.depth // (2 if self.is_packed else 1)
        size = warp_product.bytes_of(len(other) // max(tiles, 1), self.tokens, self.config.consumers)
        return tiles if size <= ring else 0


def registers_of(consumers: int) -> tuple[int, int]:
    """Registers of a thread of the producer and of a consumer, who gets what the producer gives back.

    More than the CTA was launched with would never be granted; without the request, ptxas spills them.
    """
    warpgroups = consumers + 1
    launched = min(_MOST_REGISTERS, _REGISTERS // (THREADS * warpgroups)) // 8 * 8
    most = min(_MOST_REGISTERS, (launched * warpgroups - _PRODUCER_REGISTERS) // consumers) // 8 * 8
    return _PRODUCER_REGISTERS, most


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why this kernel cannot do this call, or None; any dtype of the result will do."""
    del zeros, dtype
    if (tokens := tokens_of(x)) > MAX_TOKENS:
        return f"The Mosaic product with few bits takes up to {MAX_TOKENS} tokens; these are {tokens}."
    return unfit(x, values, scales)


def unfit(x: Any, values: Any, scales: Any) -> str | None:
    """Why the Mosaic backend cannot multiply such operands, or None."""
    if x.dtype != jnp.bfloat16:
        return f"The Mosaic product with few bits takes bf16; this is {x.dtype}."
    if (group := x.shape[-1] // scales.shape[1]) != LONGEST:
        return f"The Mosaic product with few bits needs groups of {LONGEST} inputs; these have {group}."
    if values.dtype == jnp.int16:
        return "The Mosaic product with few bits takes e4m3 numbers one by one; these are words of two (int16)."
    if len(values) % ROWS:
        return f"The Mosaic product with few bits needs a multiple of {ROWS} rows; these are {len(values)}."
    return None


def default_config(x: Any, values: Any, scales: Any) -> Config:
    """Two consumers; four of up to 16 tokens in 4 bits unless tiles have more parts then; one for odd blocks of rows.

    Fewer parts are fewer bytes to write and to add up (BENCH.md). Numbers of 4 bits take longer to widen than to read
    (gate_up of 27B, H200, 16 tokens: 32.6 us with two consumers, 29.5 with four), those of 8 bits do not (49.5 and
    50.8). Beyond 16 tokens one of four has no registers for the words of its next step.
    """
    tokens = _padded(x)
    counts = (4, 2) if values.dtype == jnp.uint16 and tokens <= _MOST_OF_FOUR else (2,)
    configs = [_config(count, tokens, values, scales) for count in counts if len(values) % (ROWS * count) == 0]
    configs = configs or [_config(1, tokens, values, scales)]
    return min(configs, key=lambda config: plan_of(config, x, values, scales).parts)


def _config(consumers: int, tokens: int, values: Any, scales: Any) -> Config:
    """So many consumers, and the longest step of which the ring holds enough."""
    numbers = 2 if values.dtype == jnp.uint16 else 1  # of a byte
    config = Config(consumers, 1, 1)
    for groups in (2, 1):
        width = LONGEST * groups
        size = consumers * ROWS * width // numbers + 2 * tokens * width
        config = Config(consumers, groups, min(MAX_STAGES, SHARED_MEMORY // size))
        if scales.shape[1] % groups == 0 and config.stages >= MIN_STAGES:
            break
    return config


def plan_of(config: Config, x: Any, values: Any, scales: Any) -> Plan:
    """The plan of a call that is cut up like this."""
    tiles, steps = len(values) // (ROWS * config.consumers), scales.shape[1] // config.groups
    return Plan(config, tiles, steps, _padded(x), values.dtype == jnp.uint16)


def _padded(x: Any) -> int:
    return -(-tokens_of(x) // ALIGNED) * ALIGNED
