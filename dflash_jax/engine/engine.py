"""The host loop: admit, prefill, enqueue a round, and read what the step before has emitted.

The host runs one round behind the device: while a round computes, its predecessor's tokens are read and the next is
prepared. A sequence that has ended therefore takes part in one more round, whose tokens are dropped.
The engine knows tokens, not text: what a token means to a completion is `Sequence`'s business.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import jax
import numpy as np

from dflash_jax.config import DraftConfig, EngineConfig, TargetConfig
from dflash_jax.core import EngineStats
from dflash_jax.engine.adaptive import BlockLengths, RoundClock
from dflash_jax.engine.in_flight import InFlight, ScoreInFlight
from dflash_jax.engine.inputs import chunk_of, masks_of, mode_of_all, slots_of, tables_of
from dflash_jax.engine.memory import log_capacity, plan_layout
from dflash_jax.engine.model import Model
from dflash_jax.engine.outputs import EmissionCounts, take_emitted, take_prompt_logprobs
from dflash_jax.engine.runner import ModelRunner
from dflash_jax.engine.scheduler import Running, Scheduler
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.shapes import Shapes
from dflash_jax.engine.sharding import Mesh
from dflash_jax.engine.state import (
    DEFERRED,
    Emitted,
    StepSpec,
    Tables,
)
from dflash_jax.engine.warmup import compile_counter
from dflash_jax.errors import QueueFullError

logger = logging.getLogger(__name__)


class Engine:
    """Runs sequences on a target with or without a drafter: continuously batched, over a paged KV cache."""

    def __init__(self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig):
        assert isinstance(target.config, TargetConfig)
        draft_config = draft.config if draft and isinstance(draft.config, DraftConfig) else None
        self.target, self.draft = target, draft
        self.mesh, self.config = mesh, config
        self.spec = StepSpec(target.config, draft_config, config.num_speculative_tokens + 1, mesh.mesh)
        self.layout = plan_layout(target.config, draft_config, config)
        log_capacity(target.config, draft_config, self.layout, config)
        self.shapes = Shapes.of(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            table_width=self.layout.table_width,
            page_size=config.page_size,
            block=self.spec.block,
            adaptive=config.adaptive_speculation,
        )
        self.scheduler = Scheduler(self.layout, config.max_num_seqs)
        self.lengths = BlockLengths(self.shapes.lengths, config.max_num_seqs) if config.adaptive_speculation else None
        self._emissions = EmissionCounts()
        self.runner = ModelRunner(target, draft, mesh=mesh, config=config, spec=self.spec, layout=self.layout)
        self._forget_steps()
        self._compiled_at_start = compile_counter().count
        if mesh.is_accelerator if config.compile_at_start is None else config.compile_at_start:
            self.compile()

    def compile(self) -> None:
        """Compile every step for every shape that can come up, and start to count what is compiled after that."""
        logger.info("compiled %d programs", self.runner.compile(self.shapes))
        self._compiled_at_start = compile_counter().count

    @property
    def num_compiles(self) -> int:
        """Programs that the process has compiled since the engine was ready."""
        return compile_counter().count - self._compiled_at_start

    def _forget_steps(self) -> None:
        """Nothing is in flight."""
        self._in_flight: deque[InFlight | ScoreInFlight] = deque()
        self._follows_prefill = True
        self._clock = RoundClock()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences, all or none.

        Raises:
            QueueFullError: more would wait than may.
        """
        limit, waiting = self.config.max_num_queued_seqs, len(self.scheduler.waiting)
        if limit is not None and waiting + len(sequences) > limit:
            raise QueueFullError(
                f"{waiting} sequences wait, and with {len(sequences)} more there would be more than "
                f"max_num_queued_seqs={limit}; try again later or raise it."
            )
        self.scheduler.waiting.extend(sequences)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; what it has emitted stays."""
        if not sequence.finished:
            self.scheduler.drop(sequence)
            sequence.output.finish_reason = "abort"

    def run(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Advance these sequences until all have ended; after each step, yields those that changed."""
        self.add(sequences)
        try:
            while not all(sequence.finished for sequence in sequences):
                yield self.step()
        finally:  # a caller may leave early
            for sequence in sequences:
                self.abort(sequence)
            if self._in_flight and not (self.scheduler.waiting or self.scheduler.running):
                self.step()  # reads the round that ran ahead

    def replace_draft(self, draft: Model) -> None:
        """Draft with another drafter of the same configuration from now on, and forget the K/V that the old one left.

        Raises:
            RuntimeError: something waits, runs or is in flight.
        """
        if not self.is_idle:
            raise RuntimeError("an engine at work keeps its drafter; wait until it is idle.")
        self.runner.replace_draft(draft)
        self.scheduler.flush_cache()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return not (self.scheduler.waiting or self.scheduler.running or self._in_flight)

    @property
    def stats(self) -> EngineStats:
        """What it is at, and what has happened."""
        scheduler, emissions = self.scheduler, self._emissions
        accepted = emissions.num_accepted_tokens_per_pos
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - scheduler.full.num_free / scheduler.full.num_pages,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_compiles=self.num_compiles,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=emissions.num_tokens,
            num_drafts=sum(emissions.rounds_by_accepted),
            num_draft_tokens=emissions.num_draft_tokens,
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=accepted,
        )

    def step(self) -> list[Sequence]:
        """Enqueue a chunk of prompts and a round, then read all but that round; returns what changed.

        A step that fails costs what is in the cache, and no more: those that ran are computed again, each alone until
        it has got through a round. One that fails alone ends with the error.
        """
        try:
            changed = self._step()
        except Exception as error:
            logger.exception("a step failed; its sequences are computed again, one by one")
            changed = self._recover(error)
        if self.is_idle:
            self.scheduler.check_integrity()
            if self.lengths is not None:
                self.lengths.end_batch()
        return changed

    def _step(self) -> list[Sequence]:
        now = time.perf_counter()
        for running in self.scheduler.admit():
            running.sequence.started = running.sequence.started or now
            self.runner.start(running.slot, running.sequence)
            if self.lengths is not None:
                self.lengths.forget(running.slot)
        self._enqueue_chunk()
        rounds, changed = self._reserve_rounds()
        if rounds:
            changed += self._enqueue_round(rounds)
        return changed + self._read(len(self._in_flight) - bool(rounds))

    def _recover(self, error: Exception) -> list[Sequence]:
        """After a failed step: make the state anew, and end the sequence that has now failed alone."""
        ran = self.scheduler.requeue()
        if not ran and not self._in_flight:
            ran = list(self.scheduler.waiting)[:1]  # who could not even be admitted
        self._forget_steps()
        self.runner.reset()
        for sequence in ran:
            if sequence.suspect or len(ran) == 1:
                self.scheduler.drop(sequence)
                sequence.fail(f"{type(error).__name__}: {error}")
            sequence.suspect = True
        return [sequence for sequence in ran if sequence.finished]

    def _enqueue_chunk(self) -> None:
        """Prefill the next part of the prompts that came first."""
        pending = [r for r in self.scheduler.running if not r.is_prefilled]
        if not pending:
            return
        first = pending[0]
        is_scored = first.sequence.wants_prompt_logprobs
        pending = [first] if is_scored else [r for r in pending if not r.sequence.wants_prompt_logprobs]
        rows, width = self.shapes.chunk(len(pending), max(len(r.text) - r.prefilled for r in pending))
        pending = pending[:rows]
        tables = tables_of(self.scheduler, pending, rows, self._table_width(pending))
        chunk = chunk_of(pending, rows, width, tables)
        last, before = self.runner.prefill(chunk)
        self._follows_prefill = True
        if is_scored:
            following = first.text[first.prefilled + 1 : first.prefilled + 1 + width]
            padded = np.array([[*following, *[0] * (width - len(following))]], np.int32)
            self._push(ScoreInFlight(first, first.prefilled, self.runner.score(chunk, before, padded)))
        for running in pending:
            running.prefilled = min(running.prefilled + width, len(running.text))
            self.scheduler.remember(running)
        starting = [r if r.is_prefilled and not r.sequence.output.token_ids else None for r in pending]
        if any(starting):
            self._push(InFlight(starting, self._commit(starting, rows, last, None)))

    def _reserve_rounds(self) -> tuple[list[Running], list[Sequence]]:
        """The sequences of the next round, with pages for it; and those that changed on the way.

        When pages run out, what is in flight is read first: it may end sequences. Then those that came last wait.
        """
        changed: list[Sequence] = []
        rounds: list[Running] = []
        was_short = False
        for running in [r for r in self.scheduler.running if r.may_emit]:
            if was_short and not running.may_emit:
                continue
            rounds.append(running)
            while not self.scheduler.reserve_round(running):
                was_short = True
                if self._in_flight:
                    changed += self._read(len(self._in_flight))
                else:
                    self.scheduler.preempt_last()
                if not running.may_emit:
                    break
        return [r for r in rounds if r.may_emit] if was_short else rounds, changed

    def _enqueue_round(self, rounds: list[Running]) -> list[Sequence]:
        """Draft, verify and commit, at once if it can be; returns the sequences that changed on the way."""
        rows, compiled = self.shapes.batch(len(rounds)), compile_counter().count
        length = self._round_length(rounds, rows)
        tables = self.runner.place(tables_of(self.scheduler, rounds, rows, self._table_width(rounds)))
        if self.spec.block > 1:
            self._defer_or_catch_up(rounds, tables, is_drafted=length > 1)
        changed = []
        mode, _ = mode_of_all([r.sequence for r in rounds])
        if mode == "greedy":
            emitted = self.runner.greedy_round(tables, length)
        else:
            block = self.runner.draft(tables) if length > 1 else None
            hidden = self.runner.verify(tables, block, length)
            if mode == "constrained":
                # A mask depends on every token before it, so the rounds before this one are read while it computes.
                changed = self._read(len(self._in_flight))
            emitted = self._commit(rounds, rows, hidden, block)
        for running in rounds:
            running.in_flight += 1
        is_timed = not self._follows_prefill and compile_counter().count == compiled
        self._push(InFlight(rounds, emitted, length, rows, is_timed))
        self._follows_prefill = False
        return changed

    def _defer_or_catch_up(self, rounds: list[Running], tables: Tables, *, is_drafted: bool) -> None:
        """Before a round: write the drafter's context that it needs, or that there is no more room to keep waiting."""
        most = max(r.deferred for r in rounds)
        if most == DEFERRED or (is_drafted and most):
            deferred = np.zeros(len(tables.packed), np.int32)
            deferred[: len(rounds)] = [r.deferred for r in rounds]
            self.runner.catch_up(tables, deferred)
            for running in rounds:
                running.deferred = 0
        for running in rounds:
            running.deferred += not is_drafted

    def _round_length(self, rounds: list[Running], rows: int) -> int:
        """How many tokens a round verifies; the choice changes no output."""
        if not any(r.sequence.params.speculation for r in rounds):
            return 1
        return self.lengths.choose(rows, [r.slot for r in rounds]) if self.lengths else self.spec.block

    def _commit(self, running: Seq[Running | None], rows: int, hidden: jax.Array, block: jax.Array | None) -> Emitted:
        """Sample and emit tokens behind `hidden` [B, T, D]; rows without a sequence take no part."""
        slots = slots_of(running, rows, padding=self.config.max_num_seqs)
        mode, with_logprobs = mode_of_all([r.sequence for r in running if r])
        allowed = None
        if mode == "constrained":
            allowed = masks_of(running, rows, hidden.shape[1], block, self.spec.target.vocab_size)
        return self.runner.commit(slots, hidden, block, allowed, mode=mode, with_logprobs=with_logprobs)

    def _push(self, step: InFlight | ScoreInFlight) -> None:
        for array in jax.tree.leaves(step.emitted if isinstance(step, InFlight) else step.scored):
            array.copy_to_host_async()
        self._in_flight.append(step)

    def _read(self, steps: int) -> list[Sequence]:
        """Hand the results of the oldest steps in flight to their sequences; returns those that changed."""
        changed: dict[int, Sequence] = {}
        for _ in range(steps):
            step = self._in_flight.popleft()
            if isinstance(step, ScoreInFlight):
                take_prompt_logprobs(step.running.sequence, jax.device_get(step.scored), step.start)
                continue
            was_ready = step.emitted.packed.is_ready()  # type: ignore[attr-defined]  # jax.Array has it
            emitted = jax.device_get(step.emitted)
            self._learn(step, emitted, was_ready=was_ready)
            counts = emitted.count.tolist()
            for row, running in enumerate(step.running):
                if running is None:
                    continue
                running.in_flight -= step.length > 0
                if not running.released:
                    self._take(running, emitted, row, counts[row], length=step.length)
                    changed[id(running.sequence)] = running.sequence
        return list(changed.values())

    def _take(self, running: Running, emitted: Emitted, row: int, count: int, *, length: int) -> None:
        """Hand one sequence what a step emitted for it; what goes wrong here is its own affair."""
        sequence = running.sequence
        if count < 0:
            self.scheduler.forget(running)
            sequence.fail("the target's logits are not numbers (NaN); check the checkpoint and its dtype.")
        else:
            try:
                self._emissions.observe(length, take_emitted(sequence, emitted, row, count, length=length))
                self.scheduler.remember(running)
            except Exception as error:
                logger.exception("a sequence failed")
                sequence.fail(f"{type(error).__name__}: {error}")
        sequence.suspect &= length == 0
        if sequence.finished:
            self.scheduler.release(running)

    def _learn(self, step: InFlight, emitted: Emitted, *, was_ready: bool) -> None:
        """Tell the choice of block lengths what a round brought, and what it cost if nothing else ran before it."""
        if not step.is_timed or not self._in_flight:
            self._clock.restart()
        seconds = self._clock.read(time.perf_counter(), was_ready=was_ready)
        if self.lengths is not None and step.length:
            counts = np.maximum(emitted.count, 1).tolist()
            kept = [(r.slot, counts[i]) for i, r in enumerate(step.running) if r and not r.released]
            slots, counts = [slot for slot, _ in kept], [count for _, count in kept]
            self.lengths.observe(step.batch, step.length, slots, counts, seconds)

    def _table_width(self, running: list[Running]) -> int:
        """No wider than these sequences can grow, so that a width seldom changes while they run."""
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in (r.sequence for r in running))
        return self.shapes.table(self.layout.pages_for(longest + 2 * self.spec.block))
