"""What an engine enqueues next: which sequences, and with which of the compiled programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.engine.device.shapes import Shapes, StepShape
from dflash_jax.engine.device.slots import DEFERRED, SamplingMode
from dflash_jax.engine.host.adaptive import BlockLengths
from dflash_jax.engine.host.in_flight import InFlight
from dflash_jax.engine.host.inputs import mode_of_all, uses_controls
from dflash_jax.engine.host.scheduler import Running
from dflash_jax.engine.programs.runner import ModelRunner
from dflash_jax.state.layout import Layout


@dataclass(frozen=True)
class PlannedChunk:
    """A prefill of the next tokens of some prompts.

    Attributes:
        running: the prompts, oldest first.
        starting: for each prompt, its sequence if the prompt ends in this chunk and its first token follows, else None.
        rows: rows of the program.
        width: tokens a row.
        programs: programs to run, the prefill first.
    """

    running: list[Running]
    starting: list[Running | None]
    rows: int
    width: int
    programs: list[StepShape]


@dataclass(slots=True)
class PlannedRound:
    """A round of some sequences.

    Attributes:
        running: the sequences.
        rows: rows of its programs.
        length: tokens to verify.
        mode: sampling mode that the most demanding sequence needs.
        programs: programs to run, in their order.
    """

    running: list[Running]
    rows: int
    length: int
    mode: SamplingMode
    programs: list[StepShape]


class Offer(NamedTuple):
    """A round that could be enqueued now, once its length is chosen.

    Attributes:
        running: its sequences.
        rows: rows of its programs.
        mode: sampling mode that the most demanding sequence needs.
        programs: programs by the length to verify, ascending.
        ready: lengths whose programs are compiled; at least one.
    """

    running: list[Running]
    rows: int
    mode: SamplingMode
    programs: dict[int, list[StepShape]]
    ready: list[int]


class Needs(NamedTuple):
    """What some sequences need of the programs of their rounds.

    Attributes:
        running: the sequences.
        mode: sampling mode that the most demanding one needs.
        pages: width of a page table that holds the longest of them, whatever it grows to.
        may_change: whether the mode may be another in the next round.
        speculates: whether any of them wants drafts.
    """

    running: list[Running]
    mode: SamplingMode
    pages: int
    may_change: bool
    speculates: bool


class Planner:
    """Picks among the compiled programs, and has better ones compiled meanwhile.

    No stream has to wait while programs for another request are compiled. Where no compiled program can run any
    sequence, programs of one row are compiled first: all sequences can use them in turns.

    Attributes:
        lengths: chooses how many tokens a round verifies; None if every round verifies the whole block.
    """

    def __init__(self, shapes: Shapes, layout: Layout, runner: ModelRunner, lengths: BlockLengths | None):
        self._shapes, self._layout, self._runner = shapes, layout, runner
        self.lengths = lengths
        self._by_length: dict[tuple, dict[int, list[StepShape]]] = {}
        self._num_rounds = 0
        self._needs = Needs([], "greedy", 0, may_change=True, speculates=False)

    def prefill(self, pending: list[Running]) -> PlannedChunk | None:
        """The next prefill of prompts that wait, oldest first; None if no compiled programs can do one."""
        best = self.best_prefill(pending)
        if self._runner.is_ready(best.programs):
            return best
        chosen = self._ready_prefill(pending)
        if chosen is None:
            least = self._chunk(pending, 1, self._shapes.chunk_for_all)
            self._runner.request([*least.programs, *self._least_round(least.running).programs], is_urgent=True)
        self._runner.request([*best.programs, *self.best_round(best.running).programs], is_urgent=False)
        return chosen

    def best_prefill(self, pending: list[Running]) -> PlannedChunk:
        """The prefill that would be run if every program were compiled."""
        longest = max(map(left_of, pending))
        if pending[0].sequence.wants_prompt_logprobs:
            return self._chunk(pending, *self._shapes.scored_chunk(longest))
        return self._chunk(pending, *self._shapes.chunk(len(pending), longest))

    def _ready_prefill(self, pending: list[Running]) -> PlannedChunk | None:
        """The compiled prefill that processes most tokens, with at most three quarters padding; None without one."""
        widest = max(4 * max(map(left_of, pending)), self._shapes.chunk_for_all)
        fitting = [(r, w) for r, w in self._shapes.prefills() if w <= widest and r <= 4 * len(pending)]
        most_first = sorted(fitting, key=lambda size: -sum(min(left_of(r), size[1]) for r in pending[: size[0]]))
        chunks = (self._chunk(pending, rows, width) for rows, width in most_first)
        return next((chunk for chunk in chunks if self._runner.is_ready(chunk.programs)), None)

    def _chunk(self, pending: list[Running], rows: int, width: int) -> PlannedChunk:
        """A prefill of so many rows and tokens a row, of the first of these prompts."""
        pending = pending[:rows]
        starting = [r if ends_within(r, width) and not r.sequence.output.token_ids else None for r in pending]
        mode = mode_of_all([r.sequence for r in starting if r]) if any(starting) else None
        is_scored, pages = pending[0].sequence.wants_prompt_logprobs, self._pages_of(pending)
        programs = self._shapes.of_prefill(rows, width, pages, mode, is_scored=is_scored)
        if any(lacks_controls(r) for r in pending):
            programs.append(StepShape("set_controls"))
        return PlannedChunk(pending, starting, rows, width, programs)

    def round(self, running: list[Running]) -> PlannedRound | None:
        """The next round of these sequences; None if no compiled programs can do one.

        It may have more rows than it needs, or another length than would be best. Where no compiled program takes all
        sequences, they take turns, so that all of them advance.
        """
        offer = self._offer(running) or self._turn(running)
        if offer is None:
            self._runner.request(self._least_round(running).programs, is_urgent=True)
            self._runner.request(self.best_round(running).programs, is_urgent=False)
            return None
        self._num_rounds += 1
        planned = self._chosen(offer)
        if len(planned.running) < len(running):
            for member in planned.running:
                member.last_round = self._num_rounds
            self._runner.request(self.best_round(running).programs, is_urgent=True)
        elif planned.rows > self._shapes.batch(len(running)):
            self._runner.request(self.best_round(running).programs, is_urgent=False)
        return planned

    def _turn(self, running: list[Running]) -> Offer | None:
        """A round of as many sequences as a compiled program takes: those whose last round is longest ago.

        Who has had none waits behind all others: a stream would stand still for the first rounds of all who come.
        """
        for member in running:
            member.last_round = member.last_round or self._num_rounds
        by_turn = sorted(running, key=lambda r: r.last_round)
        able = [r for r in by_turn if self._offer([r])]
        full = [rows for rows in reversed(self._shapes.batches) if rows < len(able)]
        offers = (self._offer(able[:number]) for number in (len(able), *full) if able)
        return next(filter(None, offers), None)

    def _least_round(self, running: list[Running]) -> PlannedRound:
        """A round of the oldest sequence, with the fewest programs that a round can take."""
        mode, length = mode_of_all([running[0].sequence]), self._lengths_at(1, wants_drafts=speculates(running[:1]))[0]
        return PlannedRound(running[:1], 1, length, mode, self.programs(running[:1], 1, length, mode))

    def best_round(self, running: list[Running]) -> PlannedRound:
        """The longest round of all these sequences that might be chosen if every program were compiled."""
        rows, mode = self._shapes.batch(len(running)), mode_of_all([r.sequence for r in running])
        length = self._lengths_at(rows, wants_drafts=speculates(running))[-1]
        return PlannedRound(running, rows, length, mode, self.programs(running, rows, length, mode))

    def _offer(self, running: list[Running]) -> Offer | None:
        """A round of all these sequences, with the fewest rows for which programs are compiled."""
        needs = self._needs_of(running)
        mode = needs.mode
        for rows in self._shapes.batches:
            if rows >= len(running):
                programs = self._programs_by_length(needs, rows)
                ready = [length for length in programs if self._runner.is_ready(programs[length])]
                if ready:
                    return Offer(running, rows, mode, programs, ready)
        return None

    def _needs_of(self, running: list[Running]) -> Needs:
        """What these sequences need; kept while they run, since asking 32 of them anew costs each round 6 us."""
        if self._needs.may_change or running != self._needs.running:
            sequences = [r.sequence for r in running]
            may_change = any(s.params.min_tokens > 0 for s in sequences)
            pages = self._shapes.table(self._pages_of(running))
            self._needs = Needs(running, mode_of_all(sequences), pages, may_change, speculates(running))
        return self._needs

    def _programs_by_length(self, needs: Needs, rows: int) -> dict[int, list[StepShape]]:
        """Programs by the length to verify; kept, since making the list anew would cost the host time in each round."""
        mode, pages, deferred = needs.mode, needs.pages, most_deferred(needs.running)
        lengths = self._lengths_at(rows, wants_drafts=needs.speculates)
        key = rows, lengths, pages, mode, deferred
        if key not in self._by_length:
            self._by_length[key] = {
                length: self._shapes.of_round(rows, length, pages, mode, catches_up=catches_up(deferred, length))
                for length in lengths
            }
        return self._by_length[key]

    def _chosen(self, offer: Offer) -> PlannedRound:
        """The round of the compiled length that pays most; has a length that would pay more compiled meanwhile."""
        running, rows, mode, programs, ready = offer
        length = ready[-1]
        if len(programs) > 1 and self.lengths is not None:
            slots, is_timed = [r.slot for r in running], not self._runner.is_compiling
            length, wanted = self.lengths.choose_ready(rows, slots, tuple(programs), ready, is_timed=is_timed)
            if wanted not in ready:
                self._runner.request(programs[wanted], is_urgent=False)
        return PlannedRound(running, rows, length, mode, programs[length])

    def learn(self, step: InFlight, count: Any, seconds: float | None) -> None:
        """Tell `BlockLengths`, if there is one, what a round emitted and took.

        Args:
            step: the round; a prefill teaches nothing.
            count: tokens that each row emitted, int32 [B] on the host.
            seconds: that the round took; None where that is not known.
        """
        if self.lengths is not None and step.length:
            still_running = [(row, r.slot) for row, r in enumerate(step.running) if r and not r.released]
            rows, slots = [row for row, _ in still_running], [slot for _, slot in still_running]
            self.lengths.observe(step.batch, step.length, slots, np.maximum(count[rows], 1).tolist(), seconds)

    def programs(self, running: list[Running], rows: int, length: int, mode: SamplingMode) -> list[StepShape]:
        """Programs of a round of these sequences."""
        is_late = catches_up(most_deferred(running), length)
        return self._shapes.of_round(rows, length, self._pages_of(running), mode, catches_up=is_late)

    def _lengths_at(self, rows: int, *, wants_drafts: bool) -> tuple[int, ...]:
        """How many tokens a round of so many rows may verify, ascending; outputs do not depend on the choice."""
        if not wants_drafts:
            return (1,)
        return self._shapes.lengths_at(rows) if self.lengths else (self._layout.block,)

    def _pages_of(self, running: list[Running]) -> int:
        """Pages that the longest of these sequences can grow to, so that the width of tables seldom changes."""
        return self.pages_for(max([r.most_tokens for r in running]))

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence of so many tokens, and of two rounds in flight."""
        return self._layout.pages_for(tokens + 2 * self._layout.block)


def left_of(running: Running) -> int:
    """Tokens of a prompt that the next chunk may take."""
    return running.chunk_end - running.prefilled


def ends_within(running: Running, width: int) -> bool:
    """Whether a prompt ends in its next chunk, if that has so many tokens."""
    return len(running.text) == running.chunk_end <= running.prefilled + width


def lacks_controls(running: Running) -> bool:
    """Whether it uses penalties, biases or stops that the device has not been told."""
    return not running.has_controls and uses_controls(running.sequence)


def speculates(running: list[Running]) -> bool:
    """Whether any of these sequences wants drafts."""
    return any(r.sequence.params.speculation for r in running)


def most_deferred(running: list[Running]) -> int:
    """The most tokens of any of these sequences whose features are deferred."""
    return max([r.deferred for r in running])


def catches_up(deferred: int, length: int) -> bool:
    """Whether a round must write deferred context first: it drafts, or no more may be deferred."""
    return deferred == DEFERRED or (length > 1 and deferred > 0)
