"""The host loop: admit, prefill, enqueue a round, and read what the step before has emitted.

The host runs one round behind the device: while a round computes, its predecessor's tokens are read and the next is
prepared. A sequence that has ended therefore takes part in one more round, whose tokens are dropped.
The engine knows tokens, not text: what a token means to a completion is `Sequence`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoint.loader import KVScales, Params
from dflash_jax.config import DraftConfig, EngineConfig, TargetConfig
from dflash_jax.core import Logprob
from dflash_jax.engine.memory import log_capacity, make_caches, plan_layout
from dflash_jax.engine.round import prefill_chunk, run_round
from dflash_jax.engine.scheduler import Running, Scheduler
from dflash_jax.engine.sequence import Sequence, TokenLogprobs
from dflash_jax.engine.sharding import Mesh
from dflash_jax.engine.state import Chunk, Emitted, Sampler, SamplingMode, Slots, StepSpec, Tables

LEAST_CHUNK = 16  # tokens: prompts shorter than this share a compiled prefill
LEAST_TABLE = 4  # pages: likewise for page tables
COLDEST, HOTTEST = 1e-6, 1e6  # temperatures: beyond them, nothing but the range of float32 would change


@dataclass(frozen=True)
class Model:
    """Parameters and what they mean."""

    config: TargetConfig | DraftConfig
    params: Params
    kv_scales: KVScales | None = None


@dataclass(frozen=True)
class InFlight:
    """A step whose tokens have not been read: which row of it is whose."""

    rows: list[tuple[int, Running]]
    emitted: Emitted
    is_round: bool


class Engine:
    """Runs sequences on a target with or without a drafter: continuously batched, over a paged KV cache."""

    def __init__(self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig):
        assert isinstance(target.config, TargetConfig)
        self.target, self.draft = target, draft
        self.mesh, self.config = mesh, config
        self.block = config.num_speculative_tokens + 1
        self.params = (target.params, draft.params if draft else {})
        draft_config = draft.config if draft and isinstance(draft.config, DraftConfig) else None
        self.layout = plan_layout(target.config, draft_config, config)
        log_capacity(target.config, draft_config, self.layout, config)
        self.scheduler = Scheduler(self.layout, config.max_num_seqs, prefix_caching=config.enable_prefix_caching)
        kv_scales = (target.kv_scales, draft.kv_scales if draft else None)
        self._caches = make_caches(target.config, draft_config, self.layout, config, mesh, kv_scales)
        rows = config.max_num_seqs
        self._slots = mesh.replicate(Slots(*(jnp.zeros(rows, jnp.int32) for _ in range(3))))
        self._sampler_rows: list[Sequence | None] = [None] * rows
        self._sampler: Sampler | None = None
        self._in_flight: deque[InFlight] = deque()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.scheduler.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; what it has emitted stays."""
        if not sequence.finished:
            self.scheduler.drop(sequence)
            sequence.output.finish_reason = "abort"

    def run(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Advance these sequences until all have ended; after each step, yields those that changed."""
        for sequence in sequences:
            self.add(sequence)
        try:
            while not all(sequence.finished for sequence in sequences):
                yield self.step()
        finally:  # a caller may leave early
            for sequence in sequences:
                self.abort(sequence)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return not (self.scheduler.waiting or self.scheduler.running or self._in_flight)

    def step(self) -> list[Sequence]:
        """Enqueue a chunk of prompts and a round, then read all but that round; returns what changed."""
        for running in self.scheduler.admit():
            self._sampler_rows[running.slot] = running.sequence
            self._sampler = None
        self._enqueue_chunk()
        rounds, changed = self._reserve_rounds()
        if rounds:
            self._enqueue_round(rounds)
        return changed + self._read(len(self._in_flight) - bool(rounds))

    def _enqueue_chunk(self) -> None:
        """Prefill the next part of the prompts that came first."""
        pending = [r for r in self.scheduler.running if not r.is_prefilled]
        if not pending:
            return
        longest = max(len(r.text) - r.prefilled for r in pending)
        width = min(max(power_of_two(longest), LEAST_CHUNK), self.config.max_num_batched_tokens)
        pending = pending[: max(self.config.max_num_batched_tokens // width, 1)]
        chunk = self._make_chunk(pending, width)
        spec = self._spec([r.sequence for r in pending])
        self._slots, self._caches, emitted = prefill_chunk(
            self.params, self._slots, self._caches, chunk, self._device_sampler(), spec=spec
        )
        for running in pending:
            running.prefilled = min(running.prefilled + width, len(running.text))
            self.scheduler.remember(running)
        self._push(InFlight(list(enumerate(pending)), emitted, is_round=False))

    def _make_chunk(self, pending: list[Running], width: int) -> Chunk:
        rows = power_of_two(len(pending))
        tokens = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        slots = np.full(rows, self.config.max_num_seqs, np.int32)
        length, emitted, anchor = np.zeros((3, rows), np.int32)
        anchor -= 1
        for row, running in enumerate(pending):
            part = running.text[running.prefilled : running.prefilled + width]
            tokens[row, : len(part)] = part
            positions[row, : len(part)] = np.arange(running.prefilled, running.prefilled + len(part))
            before = running.sequence.output.token_ids  # of a preempted sequence
            slots[row], length[row], emitted[row] = running.slot, len(running.text), len(before)
            anchor[row] = before[-1] if before else -1
        return Chunk(
            rows=jnp.asarray(slots),
            tokens=jnp.asarray(tokens),
            positions=jnp.asarray(positions),
            length=jnp.asarray(length),
            emitted=jnp.asarray(emitted),
            anchor=jnp.asarray(anchor),
            tables=self._tables(np.minimum(slots, self.config.max_num_seqs - 1)),
        )

    def _reserve_rounds(self) -> tuple[list[Running], list[Sequence]]:
        """The sequences of the next round, with pages for it; and those that changed on the way.

        When pages run out, what is in flight is read first: it may end sequences. Then those that came last wait.
        """
        changed: list[Sequence] = []
        rounds: list[Running] = []
        for running in list(self.scheduler.running):
            while running.may_emit and not self.scheduler.reserve_round(running):
                if self._in_flight:
                    changed += self._read(len(self._in_flight))
                else:
                    self.scheduler.preempt_last()
            if running.may_emit:
                rounds.append(running)
        return [r for r in rounds if r.may_emit], changed

    def _enqueue_round(self, rounds: list[Running]) -> None:
        rows = power_of_two(max(r.slot for r in rounds) + 1)
        rows = min(rows, self.config.max_num_seqs)
        active = np.zeros(rows, np.bool_)
        active[[r.slot for r in rounds]] = True
        spec = self._spec([r.sequence for r in rounds])
        self._slots, self._caches, emitted = run_round(
            self.params,
            self._slots,
            self._caches,
            self._tables(np.arange(rows)),
            self._device_sampler(),
            jnp.asarray(active),
            spec=spec,
        )
        for running in rounds:
            running.in_flight += 1
        self._push(InFlight([(r.slot, r) for r in rounds], emitted, is_round=True))

    def _push(self, step: InFlight) -> None:
        for array in jax.tree.leaves(step.emitted):
            array.copy_to_host_async()
        self._in_flight.append(step)

    def _read(self, steps: int) -> list[Sequence]:
        """Hand the tokens of the oldest steps in flight to their sequences; returns those that changed."""
        changed: dict[int, Sequence] = {}
        for _ in range(steps):
            step = self._in_flight.popleft()
            emitted = jax.device_get(step.emitted)
            for row, running in step.rows:
                running.in_flight -= step.is_round
                count = int(emitted.count[row])
                if running.released or count == 0:
                    continue
                sequence = running.sequence
                take_emitted(sequence, emitted, row, count, is_round=step.is_round)
                changed[id(sequence)] = sequence
                self.scheduler.remember(running)
                if sequence.finished:
                    self.scheduler.release(running)
        return list(changed.values())

    def _tables(self, slots: np.ndarray) -> Tables:
        """Page tables of some slots, no wider than the sequences that run can grow, so that a width compiles once."""
        scheduler = self.scheduler
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in (r.sequence for r in scheduler.running))
        widest = self.layout.pages_for(longest + 2 * self.block)
        width = min(max(power_of_two(widest), LEAST_TABLE), self.layout.table_width)
        return Tables(
            full=jnp.asarray(scheduler.full_table[slots, :width]),
            sliding=jnp.asarray(scheduler.sliding_table[slots, :width]),
            sliding_from=jnp.asarray(scheduler.sliding_from[slots]),
        )

    def _device_sampler(self) -> Sampler:
        if self._sampler is None:
            vocab_size = self.target.config.vocab_size
            self._sampler = self.mesh.replicate(make_sampler(self._sampler_rows, vocab_size))
        return self._sampler

    def _spec(self, sequences: list[Sequence]) -> StepSpec:
        params = [s.params for s in sequences]
        mode: SamplingMode = "greedy"
        if any(p.temperature > 0 for p in params):
            mode = "random"
        if any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params):
            mode = "filtered"
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        assert isinstance(self.target.config, TargetConfig)
        return StepSpec(
            target=self.target.config,
            draft=self.draft.config if self.draft and isinstance(self.draft.config, DraftConfig) else None,
            block=self.block,
            sampling=mode,
            num_logprobs=max(wanted) if wanted else None,
        )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def temperature_of(sequence: Sequence) -> float:
    """The temperature as the device takes it; 0 is greedy."""
    temperature = sequence.params.temperature
    return temperature and min(max(temperature, COLDEST), HOTTEST)


def make_sampler(rows: list[Sequence | None], vocab_size: int) -> Sampler:
    """Sampling parameters of every slot; empty slots are greedy."""
    stop_ids = [s.stop_ids if s else () for s in rows]
    widest = power_of_two(max(1, *map(len, stop_ids)))

    def column(of: Callable[[Sequence], Any], empty: Any, dtype: type) -> jax.Array:
        return jnp.asarray(np.array([of(s) if s else empty for s in rows], dtype))

    return Sampler(
        temperature=column(temperature_of, 0, np.float32),
        top_p=column(lambda s: s.params.top_p, 1, np.float32),
        top_k=column(lambda s: min(s.params.top_k, vocab_size) if s.params.top_k > 0 else vocab_size, 0, np.int32),
        min_p=column(lambda s: s.params.min_p, 0, np.float32),
        min_tokens=column(lambda s: min(s.params.min_tokens, s.max_new_tokens), 0, np.int32),
        stop_ids=jnp.asarray(np.array([[*ids, *[-1] * (widest - len(ids))] for ids in stop_ids], np.int32)),
        key=column(lambda s: (s.seed >> 32, s.seed & 0xFFFFFFFF), (0, 0), np.uint32),
    )


def take_emitted(sequence: Sequence, emitted: Emitted, row: int, count: int, *, is_round: bool) -> None:
    """Hand a running sequence the tokens that a step emitted for it."""
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = [logprobs_at(emitted, row, i, sequence) for i in range(count)]
    taken = sequence.extend(emitted.tokens[row, :count].tolist(), logprobs)
    if is_round:
        sequence.acceptance_lengths.append(taken)


def logprobs_at(emitted: Emitted, row: int, column: int, sequence: Sequence) -> TokenLogprobs:
    """The likeliest alternatives of one emitted token, and the token itself."""
    found = emitted.logprobs
    assert found is not None
    assert sequence.params.logprobs is not None

    def entry(token: int, logprob: jax.Array, rank: jax.Array | int) -> Logprob:
        return Logprob(float(logprob), int(rank), sequence.decode_one(token))

    chosen = int(emitted.tokens[row, column])
    entries = {chosen: entry(chosen, found.chosen[row, column], found.rank[row, column])}
    for i, token in enumerate(found.top_tokens[row, column, : sequence.params.logprobs].tolist()):
        entries.setdefault(token, entry(token, found.top[row, column, i], i + 1))
    return entries
