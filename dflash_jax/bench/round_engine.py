"""The engine that `bench round` measures: its rounds keep a fixed number of drafts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.base.errors import DFlashError
from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.base.values import SamplingParams
from dflash_jax.engine.device.acceptance import accepted
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.scheduler import Running
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.engine.programs.planner import PlannedChunk, PlannedRound, Planner


def keep_exactly(tokens: Int[Array, "B T"], drafts: Int[Array, "B R"], *, count: int) -> Int[Array, " B"]:
    """A replacement of `accepted` that confirms `count` drafts of each sequence, or all if there are fewer.

    The tokens are those that the target sampled, the next anchor among them. The drafts that agree are counted as well,
    so that a round does all of its usual work.
    """
    kept = jnp.full(len(drafts), min(count, drafts.shape[1]))
    kept, _ = jax.lax.optimization_barrier((kept, accepted(tokens, drafts)))
    return kept


class WaitingPlanner(Planner):
    """A planner that takes every program for compiled: it is compiled when called, while all sequences wait."""

    def prefill(self, pending: list[Running]) -> PlannedChunk:
        """The largest prefill."""
        return self.best_prefill(pending)

    def round(self, running: list[Running]) -> PlannedRound:
        """A round of all sequences and the full block."""
        return self.best_round(running)


class RoundEngine(Engine):
    """An engine for measurements only.

    Its steps are the usual ones: drafts are drafted and verified, but the number that is kept is fixed. Rounds begin
    when the prompts of all sequences are in the cache.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.planner = WaitingPlanner(self.shapes, self.layout, self.runner, self.planner.lengths)

    def keep(self, num_accepted_tokens: int) -> None:
        """Keep this number of drafts in each round from now on, whether they agree or not."""
        self.runner.confirm = partial(keep_exactly, count=num_accepted_tokens)

    def _reserve_rounds(self) -> list[Running]:
        is_prefilled = all(running.is_prefilled for running in self.scheduler.running)
        return super()._reserve_rounds() if is_prefilled else []

    def settle(self) -> None:
        """Wait for enqueued work, without reading its results."""
        jax.block_until_ready((self.runner.slots, self.runner.caches))


@dataclass(frozen=True)
class Rounds:
    """Measured rounds.

    Attributes:
        seconds: of each, from one return of `Engine.step` to the next.
        num_tokens: emitted by all rounds, over all sequences.
        kept: the numbers of tokens that rounds emitted for a sequence, each once.
        context: mean tokens of a sequence in the cache.
        prefill_seconds: until every sequence had its first token, compilation included.
        compiles: programs compiled during the rounds.
        preemptions: sequences that lost their pages during the rounds.
    """

    seconds: list[float]
    num_tokens: int
    kept: tuple[int, ...]
    context: float
    prefill_seconds: float
    compiles: int
    preemptions: int


def random_sequences(number: int, context: int, max_tokens: int, vocab_size: int, **options: Any) -> list[Sequence]:
    """Sequences with random prompts; they end after `max_tokens` and for no other reason.

    Args:
        number: of sequences.
        context: tokens of each prompt.
        max_tokens: of each completion.
        vocab_size: of the target.
        options: of `SamplingParams`, greedy without a temperature.
    """
    rng = random.Random(0)
    return [
        Sequence(
            prompt_token_ids=rng.choices(range(vocab_size), k=context),
            params=SamplingParams(**{"temperature": 0, **options}, max_tokens=max_tokens, ignore_eos=True),
            seed=0,
            eos_token_ids=(),
            max_new_tokens=max_tokens,
            tokenizer=None,
            output=CompletionOutput(index=0),
            cache_salt=None,
        )
        for _ in range(number)
    ]


def decode(engine: Engine, sequences: list[Sequence], *, warmup: int, rounds: int) -> Rounds:
    """Prefill the sequences and time rounds in which all of them decode; they are still running afterwards.

    Args:
        engine: idle.
        sequences: each may emit more tokens than warm-up and rounds do.
        warmup: rounds before the timed ones; the first may compile.
        rounds: to time.

    Raises:
        DFlashError: a sequence failed, ended or could not start.
    """
    began = time.perf_counter()
    engine.add(sequences)
    while min(len(s.output.token_ids) for s in sequences) == 0:
        step(engine, sequences)
    prefill_seconds = time.perf_counter() - began
    for _ in range(warmup):
        step(engine, sequences)
    before, compiles, preemptions = _progress(sequences), engine.num_compiles, engine.scheduler.num_preemptions
    times = [time.perf_counter()]
    for _ in range(rounds):
        step(engine, sequences)
        times.append(time.perf_counter())
    after = _progress(sequences)
    kept = {n for s, (_, past) in zip(sequences, before, strict=True) for n in s.acceptance_lengths[past:]}
    tokens = [(old, new) for (old, _), (new, _) in zip(before, after, strict=True)]
    return Rounds(
        seconds=[end - start for start, end in pairwise(times)],
        num_tokens=sum(new - old for old, new in tokens),
        kept=tuple(sorted(kept)),
        context=sum(len(s.prompt_token_ids) + sum(t) / 2 for s, t in zip(sequences, tokens, strict=True))
        / len(sequences),
        prefill_seconds=prefill_seconds,
        compiles=engine.num_compiles - compiles,
        preemptions=engine.scheduler.num_preemptions - preemptions,
    )


def time_prefill(engine: Engine, context: int, repeats: int) -> list[float]:
    """Seconds from the arrival of a single prompt of `context` tokens to its first token, after one untimed run.

    Raises:
        DFlashError: it failed.
    """
    seconds = []
    for _ in range(repeats + 1):
        sequences = random_sequences(1, context, 2, engine.spec.target.vocab_size)
        began = time.perf_counter()
        engine.add(sequences)
        while not sequences[0].output.token_ids:
            step(engine, sequences)
        seconds.append(time.perf_counter() - began)
        finish(engine, sequences)
    return seconds[1:]


def step(engine: Engine, sequences: Seq[Sequence]) -> None:
    """Run one step of the engine.

    Raises:
        DFlashError: it failed, a sequence ended in it, or one has no pages.
    """
    engine.step()
    for sequence in sequences:
        if sequence.finished:
            reason = sequence.output.error or f"it ended ({sequence.output.finish_reason}) while it was measured"
            raise DFlashError(f"a sequence of the benchmark failed: {reason}.")
        if sequence.suspect:
            raise DFlashError("a step failed, and the log says why; try a smaller cell.")
    if waiting := len(engine.scheduler.waiting):
        tokens = engine.layout.num_tokens
        raise DFlashError(
            f"{waiting} of {len(sequences)} sequences found no pages in a cache of {tokens:,} tokens; lower "
            "--batch-size or --context, or raise --gpu-memory-utilization or --kv-cache-memory-bytes."
        )


def finish(engine: Engine, sequences: Seq[Sequence]) -> None:
    """End the sequences, and run until the engine is idle."""
    for sequence in sequences:
        engine.abort(sequence)
    while not engine.is_idle:
        engine.step()


def _progress(sequences: Seq[Sequence]) -> list[tuple[int, int]]:
    """Tokens and rounds of each sequence so far."""
    return [(len(s.output.token_ids), len(s.acceptance_lengths)) for s in sequences]
