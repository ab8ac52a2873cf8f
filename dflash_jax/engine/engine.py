"""The host loop: admit sequences, prefill prompts, enqueue a round, and read the tokens of the step before.

The host runs one round behind the device: while a round computes, the host reads the tokens of the previous round and
prepares the next. A sequence that has ended therefore takes part in one more round, whose tokens are dropped.
The engine handles tokens; `Sequence` turns them into text and decides where a completion ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager

import jax

from dflash_jax.base.outputs import EngineStats
from dflash_jax.engine.device.budget import device_bytes, log_plan
from dflash_jax.engine.device.memory import plan_layout
from dflash_jax.engine.device.model import Model
from dflash_jax.engine.device.shapes import Load, Shapes, StepShape
from dflash_jax.engine.device.slots import Emitted, StepSpec, Tables
from dflash_jax.engine.host import inputs
from dflash_jax.engine.host.adaptive import BlockLengths, RoundClock
from dflash_jax.engine.host.callers import Callers
from dflash_jax.engine.host.in_flight import InFlight, ScoreInFlight
from dflash_jax.engine.host.outputs import EmissionCounts, stats_of, take_emitted, take_prompt_logprobs, tokens_of_rows
from dflash_jax.engine.host.scheduler import Running, Scheduler, begin_round
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.engine.host.snapshots import Move, Snapshots
from dflash_jax.engine.programs.planner import PlannedChunk, PlannedRound, Planner, lacks_controls
from dflash_jax.engine.programs.runner import ModelRunner
from dflash_jax.engine.programs.store import compile_counter
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.progress import Phase, phase
from dflash_jax.spec import DraftConfig, TargetConfig

PATIENCE = 0.05  # seconds that a step waits for a program to be compiled; commands and aborts wait as long
logger = logging.getLogger(__name__)


class Engine:
    """Runs sequences on a target with or without a drafter: continuously batched, over a paged KV cache."""

    def __init__(self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig):
        assert isinstance(target.config, TargetConfig)
        draft_config = draft.config if draft and isinstance(draft.config, DraftConfig) else None
        self.target, self.draft, self.mesh, self.config = target, draft, mesh, config
        parameters = [device_bytes(model.params) if model else 0 for model in (target, draft)]
        self.spec = StepSpec(target.config, draft_config, config.num_speculative_tokens + 1, mesh)
        self.layout = plan_layout(target.config, draft_config, config, sum(parameters))
        log_plan(target.config, draft_config, self.layout, config, parameters)
        self.shapes = Shapes.of(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            table_width=self.layout.table_width,
            block=self.spec.block,
            adaptive=config.adaptive_speculation,
            on_cpu=mesh.is_cpu,
            has_snapshots=self.layout.snapshots is not None,
            has_experts=target.config.experts is not None,
        )
        self.scheduler = Scheduler(self.layout, config.max_num_seqs)
        self.snapshots = Snapshots(self.scheduler, config.max_num_seqs)
        self._emissions = EmissionCounts()
        self.runner = ModelRunner(target, draft, mesh=mesh, config=config, spec=self.spec, layout=self.layout)
        lengths = BlockLengths(self.shapes.lengths, config.max_num_seqs) if config.adaptive_speculation else None
        self.planner = Planner(self.shapes, self.layout, self.runner, lengths)
        self._forget_steps()
        self._changed: dict[int, Sequence] = {}  # in the present step
        self._callers = Callers()
        self._compiled_at_start = compile_counter().count
        if mesh.is_accelerator if config.compile_at_start is None else config.compile_at_start:
            self.compile()
        elif config.compile_at_start is None:
            self.runner.request(self.shapes.of_lone_requests(), is_urgent=False)  # what a first request will need

    def compile(
        self, load: Load | None = None, *, within: Callable[..., AbstractContextManager[Phase]] = phase
    ) -> None:
        """Compile the programs that a load needs, several at a time; `num_compiles` counts from then on.

        Args:
            load: what will be asked; None compiles every program.
            within: begins the phase in which a command shows the progress.
        """
        pages = None if load is None else self.planner.pages_for(load.total_tokens)
        needed = self.shapes.programs(load, max_pages=pages)
        missing = [shape for shape in needed if not self.runner.is_ready([shape])]
        if missing:
            began = time.perf_counter()
            with within("compiling", len(missing)) as now:
                loaded = self.runner.compile(missing, now.advance)
            seconds = time.perf_counter() - began
            logger.info("compiled %d programs and loaded %d in %.0f s", len(missing) - loaded, loaded, seconds)
        self._compiled_at_start = compile_counter().count

    @property
    def num_compiles(self) -> int:
        """Programs that the process has compiled since the engine was ready."""
        return compile_counter().count - self._compiled_at_start

    def _forget_steps(self) -> None:
        """Start without any step in flight."""
        self._in_flight: deque[InFlight | ScoreInFlight] = deque()
        self._follows_prefill = True
        self._clock = RoundClock()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences; raises QueueFullError, and queues none, if more would wait than may."""
        self.scheduler.queue(sequences, self.config.max_num_queued_seqs)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; its output keeps what was emitted."""
        if not sequence.finished:
            self.scheduler.drop(sequence)
            sequence.output.finish_reason = "abort"

    def run(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Advance these sequences until all have ended; yield, after each step, those of them that changed.

        Several callers may take turns: each advances the sequences of all.
        """
        self.add(sequences)
        news = self._callers.begin(sequences)
        try:
            while news or not all(sequence.finished for sequence in sequences):
                if not news:
                    self._callers.tell(self.step())
                changed = list(news.values())
                news.clear()
                yield changed
        finally:  # a caller may leave early
            for sequence in sequences:
                self.abort(sequence)
            self._callers.end(sequences)
            if self._in_flight and not (self.scheduler.waiting or self.scheduler.running):
                self._callers.tell(self.step())  # reads the round that ran ahead
            self.check_integrity()

    def replace_draft(self, draft: Model) -> None:
        """Draft with another drafter of the same configuration from now on, and forget the K/V of the old one.

        Raises:
            RuntimeError: a sequence waits or runs, or a step is in flight.
        """
        if not self.is_idle:
            raise RuntimeError("the drafter of an engine at work cannot be replaced; wait until it is idle.")
        self.runner.replace_draft(draft)
        self.scheduler.flush_cache()

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs and no step is in flight."""
        return not (self.scheduler.waiting or self.scheduler.running or self._in_flight)

    @property
    def stats(self) -> EngineStats:
        """The current load, and counts since the start."""
        return stats_of(self.scheduler, self.snapshots, self._emissions, self.num_compiles)

    def step(self) -> list[Sequence]:
        """Enqueue a chunk of prompts and a round, read every other step in flight, and return which sequences changed.

        If the step fails, the contents of the cache are lost: the sequences that ran are computed again, each alone
        until it has completed a round. A sequence that fails alone ends with the error.
        """
        self._changed = {}
        try:
            self._step()
        except Exception as error:
            logger.exception("a step failed; its sequences are computed again, one by one")
            self._recover(error)
        if self.is_idle and self.planner.lengths is not None:
            self.planner.lengths.end_batch()
        return list(self._changed.values())

    def check_integrity(self) -> None:
        """Check the books of pages and slots now and then, if the engine is idle.

        Call it when what a step has changed is published: it takes milliseconds where many pages are cached.
        """
        if self.is_idle:
            self.scheduler.repair()

    def _step(self) -> None:
        now = time.perf_counter()
        if self.scheduler.has_suspects_behind:
            self._read(len(self._in_flight))
            self.scheduler.set_aside()
        for running in self.scheduler.admit():
            running.sequence.started = running.sequence.started or now
            self.runner.start(running.slot, running.sequence)
            self._copy_states(self.snapshots.at_start(running))
            if self.planner.lengths is not None:
                self.planner.lengths.forget(running.slot)
        has_prefilled = self._enqueue_chunk()
        sequences = self._reserve_rounds()
        planned = self.planner.round(sequences) if sequences else None
        self.runner.share_cores(has_streams=planned is not None)
        if planned is not None:
            self._enqueue_round(planned)
        if self.scheduler.running and not (has_prefilled or planned or self._in_flight):
            self.runner.wait(PATIENCE)  # for a program
        self._read(len(self._in_flight) - (planned is not None))

    def _recover(self, error: Exception) -> None:
        """Recover from a failed step: make the device's state anew, and end a sequence that failed alone."""
        ran = self.scheduler.requeue()
        if not ran and not self._in_flight:
            ran = list(self.scheduler.waiting)[:1]  # the step failed while it admitted this one
        self._forget_steps()
        self.runner.reset()
        for sequence in ran:
            if sequence.suspect or len(ran) == 1:
                self.scheduler.drop(sequence)
                sequence.fail(f"{type(error).__name__}: {error}")
                self._changed[id(sequence)] = sequence
            sequence.suspect = True

    def _enqueue_chunk(self) -> bool:
        """Prefill the next part of the oldest prompts.

        Returns:
            Whether a prefill was enqueued: there was a prompt left, and a compiled program for it.
        """
        pending = [r for r in self.scheduler.running if not r.is_prefilled]
        if not pending:
            return False
        if pending[0].sequence.wants_prompt_logprobs:
            pending = pending[:1]
        else:
            pending = [r for r in pending if not r.sequence.wants_prompt_logprobs]
        if (planned := self.planner.prefill(pending)) is not None:
            self._prefill(planned)
        return planned is not None

    def _prefill(self, planned: PlannedChunk) -> None:
        """Enqueue a prefill, and a commit that samples the first token of each prompt that ends in it."""
        first, width = planned.running[0], planned.width
        for running in filter(lacks_controls, planned.running):
            self.runner.set_controls(running.slot, running.sequence)
            running.has_controls = True
        tables = inputs.tables_of(self.scheduler, planned.running, planned.rows, planned.programs[0].pages)
        chunk = inputs.chunk_of(planned.running, planned.rows, width, tables)
        last, before = self.runner.prefill(chunk)
        self._follows_prefill = True
        if first.sequence.wants_prompt_logprobs:
            scored = self.runner.score(chunk, before, inputs.following_of(first, width))
            self._push(ScoreInFlight(first, first.prefilled, scored))
        for running in planned.running:
            running.prefilled = min(running.prefilled + width, running.chunk_end)
            self.scheduler.remember(running)
            self._copy_states(self.snapshots.after_chunk(running))
        if any(planned.starting):
            self._push(InFlight(planned.starting, self._commit(planned.starting, planned.rows, last, None)))

    def _reserve_rounds(self) -> list[Running]:
        """Reserve pages for the next round, and return its sequences.

        When pages run out, the steps in flight are read first, since they may end sequences. If pages are still short,
        the sequences that came last are preempted.
        """
        rounds: list[Running] = []
        was_short = False
        for running in list(self.scheduler.running):
            if not running.may_emit:
                continue
            rounds.append(running)
            while not self.scheduler.reserve_round(running):
                was_short = True
                if self._in_flight:
                    self._read(len(self._in_flight))
                else:
                    self.scheduler.preempt_last()
                if not running.may_emit:
                    break
        return [r for r in rounds if r.may_emit] if was_short else rounds

    def _enqueue_round(self, planned: PlannedRound) -> None:
        """Enqueue draft, verify and commit, as one program where it is greedy."""
        rounds, rows, length = planned.running, planned.rows, planned.length
        by_pages: dict[int, Tables] = {}

        def tables(step: StepShape) -> Tables:
            if step.pages not in by_pages:
                by_pages[step.pages] = self.runner.place(inputs.tables_of(self.scheduler, rounds, rows, step.pages))
            return by_pages[step.pages]

        steps = {step.step: step for step in planned.programs}
        before = compile_counter().count, self.runner.num_first_runs
        is_alone = not self._follows_prefill and not self.runner.is_compiling
        if "catch_up" in steps:
            self.runner.catch_up(tables(steps["catch_up"]), inputs.deferred_of(rounds, rows))
            for running in rounds:
                running.deferred = 0
        if length == 1 and self.spec.block > 1:  # the round drafts nothing: its features wait
            for running in rounds:
                running.deferred += 1
        self._copy_states(self.snapshots.before_rounds(rounds))
        if "greedy_round" in steps:
            emitted = self.runner.greedy_round(tables(steps["greedy_round"]), length)
            begin_round(rounds)
        else:
            block = self.runner.draft(tables(steps["draft"])) if length > 1 else None
            hidden = self.runner.verify(tables(steps["verify"]), block, length) if "verify" in steps else None
            if hidden is not None:
                begin_round(rounds)  # before others are read: the device's states are beyond what they tell
            if any(r.sequence.constraint for r in rounds):
                # A mask depends on all tokens before it: read the earlier rounds while this one computes.
                self._read(len(self._in_flight))
            if hidden is not None:
                emitted = self._commit(rounds, rows, hidden, block)
            else:
                allowed = inputs.masks_of(rounds, rows, length, block, self.spec.target.vocab_size)
                emitted = self.runner.verify_commit(
                    tables(steps["verify_commit"]), block, length, allowed, needed=planned.mode
                )
                begin_round(rounds)
        is_timed = is_alone and (compile_counter().count, self.runner.num_first_runs) == before
        self._push(InFlight(rounds, emitted, length, rows, is_timed))
        self._follows_prefill = False

    def _copy_states(self, moves: list[Move]) -> None:
        """Enqueue copies of recurrent states, if there are any."""
        if moves:
            self.runner.copy_states(moves, self.shapes.moves)

    def _commit(self, running: Seq[Running | None], rows: int, hidden: jax.Array, block: jax.Array | None) -> Emitted:
        """Sample the tokens that follow `hidden` [B, T, D], and emit them; rows without a sequence take no part."""
        slots = inputs.slots_of(running, rows, padding=self.config.max_num_seqs)
        needed = inputs.mode_of_all([r.sequence for r in running if r])
        allowed = inputs.masks_of(running, rows, hidden.shape[1], block, self.spec.target.vocab_size)
        return self.runner.commit(slots, hidden, block, allowed, mode=self.shapes.mode(needed), needed=needed)

    def _push(self, step: InFlight | ScoreInFlight) -> None:
        """Begin to copy the results of a step to the host, and note that they have not been read."""
        for array in jax.tree.leaves(step.emitted if isinstance(step, InFlight) else step.scored):
            array.copy_to_host_async()
        self._in_flight.append(step)

    def _read(self, steps: int) -> None:
        """Hand the results of the oldest steps in flight to their sequences, which `step` returns even if it fails."""
        for _ in range(steps):
            step = self._in_flight.popleft()
            if isinstance(step, ScoreInFlight):
                take_prompt_logprobs(step.running.sequence, jax.device_get(step.scored), step.start)
                continue
            was_ready = step.emitted.packed.is_ready()  # type: ignore[attr-defined]  # jax.Array has it, JAX's stubs do not
            emitted = jax.device_get(step.emitted)
            self._learn(step, emitted, was_ready=was_ready)
            tokens, length = tokens_of_rows(emitted), step.length
            taken: list[int] = []
            for row, running in enumerate(step.running):
                if running is None:
                    continue
                if length > 0:  # a round, not a prefill
                    running.in_flight -= 1
                    running.num_rounds += 1
                if not running.released:
                    taken.append(self._take(running, tokens[row], emitted, row, length))
                    self._changed[id(running.sequence)] = running.sequence
            self._emissions.observe(length, taken)

    def _take(self, running: Running, tokens: list[int] | None, emitted: Emitted, row: int, length: int) -> int:
        """Hand one sequence its tokens, None for NaN, and return how many it took; an error ends this one alone."""
        sequence, taken = running.sequence, 0
        if tokens is None:
            self.scheduler.forget(running)
            self.snapshots.forget(running)
            sequence.fail("the target's logits are not numbers (NaN); check the checkpoint and its dtype.")
        else:
            try:
                taken = take_emitted(sequence, tokens, emitted, row, length=length)
                self.scheduler.remember(running)
                if self.snapshots.is_active:
                    self._copy_states(self.snapshots.after_read(running))
            except Exception as error:
                logger.exception("a sequence failed")
                sequence.fail(f"{type(error).__name__}: {error}")
        if length > 0:  # it has completed a round
            sequence.suspect = False
        if sequence.finished:
            self.scheduler.release(running)
        return taken

    def _learn(self, step: InFlight, emitted: Emitted, *, was_ready: bool) -> None:
        """Tell the planner how many tokens a round emitted, and its seconds if no other step ran before it."""
        if not step.is_timed or not self._in_flight or self.runner.is_compiling:
            self._clock.restart()
        seconds = self._clock.read(time.perf_counter(), was_ready=was_ready)
        self.planner.learn(step, emitted.count, seconds)
