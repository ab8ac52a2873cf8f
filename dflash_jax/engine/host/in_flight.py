"""Steps that were enqueued and whose results the host has not read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from dflash_jax.engine.device.slots import Emitted, Logprobs
from dflash_jax.engine.host.scheduler import Running


@dataclass(frozen=True)
class InFlight:
    """A step whose tokens have not been read.

    Attributes:
        running: the sequence of each row, None for a row that emits nothing.
        emitted: tokens of a round, or the first tokens after prompts.
        length: tokens that a round verified; 0 for a prefill.
        batch: rows that a round was padded to.
        is_timed: whether the step before it was a round too, no program was compiled, and none ran for the first time,
            which takes an H100 57 ms more with Qwen3.5-35B: only then its time is a round's.
    """

    running: Seq[Running | None]
    emitted: Emitted
    length: int = 0
    batch: int = 0
    is_timed: bool = False


@dataclass(frozen=True)
class ScoreInFlight:
    """Log-probabilities of a prompt's tokens from position `start` + 1 on, which have not been read."""

    running: Running
    start: int
    scored: Logprobs
