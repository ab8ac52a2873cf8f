"""Hands what steps emitted to sequences, and counts it. Pure host code."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from dflash_jax.base.outputs import EngineStats, Logprob
from dflash_jax.engine.device.slots import Emitted, Logprobs
from dflash_jax.engine.host.scheduler import Scheduler
from dflash_jax.engine.host.sequence import Sequence, TokenLogprobs
from dflash_jax.engine.host.snapshots import Snapshots


@dataclass
class EmissionCounts:
    """Counts of what steps have emitted since the engine's start.

    Attributes:
        num_tokens: emitted tokens.
        num_draft_tokens: drafts that rounds verified.
        rounds_by_accepted: rounds that verified drafts, by how many drafts became tokens.
    """

    num_tokens: int = 0
    num_draft_tokens: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)

    def observe(self, length: int, taken: list[int]) -> None:
        """Count the tokens that each sequence has taken, from a step whose `InFlight.length` is `length`."""
        self.num_tokens += sum(taken)
        if length > 1:
            self.rounds_by_accepted += [0] * (length - len(self.rounds_by_accepted))
            for number in filter(None, taken):
                self.num_draft_tokens += length - 1
                self.rounds_by_accepted[number - 1] += 1

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """Drafts that became tokens, by position in the block."""
        return tuple(accumulate(reversed(self.rounds_by_accepted[1:])))[::-1]


def stats_of(scheduler: Scheduler, snapshots: Snapshots, emissions: EmissionCounts, num_compiles: int) -> EngineStats:
    """The current load of an engine, and counts since its start."""
    accepted = emissions.num_accepted_tokens_per_pos
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_cache_usage=scheduler.usage,
        num_prefix_queries=scheduler.num_prefix_queries,
        num_prefix_hits=scheduler.num_prefix_hits,
        num_snapshots=snapshots.num_kept,
        num_snapshots_taken=snapshots.num_taken,
        num_snapshot_hits=snapshots.num_hits,
        num_snapshots_evicted=snapshots.num_evicted,
        num_preemptions=scheduler.num_preemptions,
        num_compiles=num_compiles,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_generation_tokens=emissions.num_tokens,
        num_drafts=sum(emissions.rounds_by_accepted),
        num_draft_tokens=emissions.num_draft_tokens,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=accepted,
    )


def tokens_of_rows(emitted: Emitted) -> list[list[int] | None]:
    """The tokens that each row of a step has emitted; None where its logits are NaN."""
    rows = zip(emitted.tokens.tolist(), emitted.count.tolist(), strict=True)  # at once: a slice a row takes 0.4 us
    return [None if count < 0 else tokens[:count] for tokens, count in rows]


def take_emitted(sequence: Sequence, tokens: list[int], emitted: Emitted, row: int, *, length: int) -> int:
    """Append the emitted tokens of one row to a sequence, with their log-probabilities if it wants them.

    Args:
        sequence: the sequence.
        tokens: that the row has emitted.
        emitted: results of the step.
        row: the sequence's row.
        length: `InFlight.length` of the step.

    Returns:
        How many tokens it has taken: it may end before the last.
    """
    logprobs = None
    wanted = sequence.params.logprobs
    if wanted is not None:
        assert emitted.logprobs is not None
        logprobs = alternatives(emitted.logprobs, row, slice(len(tokens)), tokens, wanted, sequence)
    taken = sequence.extend(tokens, logprobs)
    if length:
        sequence.acceptance_lengths.append(taken)
        sequence.draft_lengths.append(length - 1)
    return taken


def take_prompt_logprobs(sequence: Sequence, scored: Logprobs, start: int) -> None:
    """Append the log-probabilities of a prompt's tokens from `start` + 1 on that the sequence does not have yet."""
    wanted = sequence.params.prompt_logprobs
    assert wanted is not None
    first = start + 1  # the position of the first token that is scored
    known = len(sequence.prompt_logprobs) + 1
    end = min(first + scored.chosen.shape[1], len(sequence.prompt_token_ids))
    tokens = sequence.prompt_token_ids[known:end]
    sequence.prompt_logprobs += alternatives(scored, 0, slice(known - first, end - first), tokens, wanted, sequence)


def alternatives(
    logprobs: Logprobs, row: int, columns: slice, tokens: list[int], wanted: int, sequence: Sequence
) -> list[TokenLogprobs]:
    """Log-probabilities of each token in some columns of a row, and of the `wanted` most probable ones beside it."""
    chosen, ranks = logprobs.chosen[row, columns].tolist(), logprobs.rank[row, columns].tolist()
    top = logprobs.top[row, columns, :wanted].tolist()
    top_tokens = logprobs.top_tokens[row, columns, :wanted].tolist()
    decode, result = sequence.decode_one, []
    for token, logprob, rank, others, other_logprobs in zip(tokens, chosen, ranks, top_tokens, top, strict=True):
        entries = {token: Logprob(logprob, rank, decode(token))}
        for i, (other, other_logprob) in enumerate(zip(others, other_logprobs, strict=True)):
            if other not in entries:
                entries[other] = Logprob(other_logprob, i + 1, decode(other))
        result.append(entries)
    return result
