"""What the engine is about to enqueue: sequences, and the programs that run them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.engine.inputs import uses_controls
from dflash_jax.engine.scheduler import Running
from dflash_jax.engine.shapes import StepShape
from dflash_jax.engine.state import DEFERRED, SamplingMode


@dataclass(frozen=True)
class PlannedChunk:
    """A prefill of the next tokens of some prompts.

    Attributes:
        running: the prompts, oldest first.
        starting: of each, the sequence if its first token follows, else None.
        rows: of the program.
        width: tokens a row.
        programs: that it takes, the prefill first.
    """

    running: list[Running]
    starting: list[Running | None]
    rows: int
    width: int
    programs: list[StepShape]


@dataclass(frozen=True)
class PlannedRound:
    """A round of some sequences.

    Attributes:
        running: the sequences.
        rows: of its programs.
        length: tokens to verify.
        mode: what the most demanding sequence needs.
        programs: that it takes, in their order.
    """

    running: list[Running]
    rows: int
    length: int
    mode: SamplingMode
    programs: list[StepShape]


def left_of(running: Running) -> int:
    """Tokens of a prompt that are still to be prefilled."""
    return len(running.text) - running.prefilled


def lacks_controls(running: Running) -> bool:
    """Whether the device must still be told its penalties, biases and stops."""
    return not running.has_controls and uses_controls(running.sequence)


def catches_up(running: list[Running], length: int) -> bool:
    """Whether a round must write the drafter's context first: one that drafts needs it, and little may wait."""
    most = max(r.deferred for r in running)
    return most == DEFERRED or (length > 1 and most > 0)
