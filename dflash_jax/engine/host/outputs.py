"""From what a step emitted to the tokens and log-probabilities of sequences. Pure host code."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from dflash_jax.base.values import Logprob
from dflash_jax.engine.device.slots import Emitted, Logprobs
from dflash_jax.engine.host.sequence import Sequence, TokenLogprobs


@dataclass
class EmissionCounts:
    """What steps have emitted since the engine's start.

    Attributes:
        num_tokens: all of it.
        num_draft_tokens: drafts that rounds verified.
        rounds_by_accepted: rounds that verified drafts, by how many of these became tokens.
    """

    num_tokens: int = 0
    num_draft_tokens: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)

    def observe(self, length: int, taken: int) -> None:
        """Count what a step of that `length`, as of `InFlight`, emitted for one sequence."""
        self.num_tokens += taken
        if length > 1 and taken:
            self.num_draft_tokens += length - 1
            self.rounds_by_accepted += [0] * (length - len(self.rounds_by_accepted))
            self.rounds_by_accepted[taken - 1] += 1

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """Drafts that became tokens, by their position in the block."""
        return tuple(accumulate(reversed(self.rounds_by_accepted[1:])))[::-1]


def take_emitted(sequence: Sequence, emitted: Emitted, row: int, count: int, *, length: int) -> int:
    """Hand a running sequence the first `count` tokens of a row of a step of that `length`, as of `InFlight`.

    Returns:
        How many it has taken.
    """
    tokens = emitted.tokens[row, :count].tolist()
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


def take_prompt_logprobs(sequence: Sequence, found: Logprobs, start: int) -> None:
    """Hand a sequence the log-probabilities of its prompt's tokens from `start` + 1 on, those it has not had yet."""
    wanted = sequence.params.prompt_logprobs
    assert wanted is not None
    first = start + 1  # the position of the first token that is scored
    known = len(sequence.prompt_logprobs) + 1
    end = min(first + found.chosen.shape[1], len(sequence.prompt_token_ids))
    tokens = sequence.prompt_token_ids[known:end]
    sequence.prompt_logprobs += alternatives(found, 0, slice(known - first, end - first), tokens, wanted, sequence)


def alternatives(
    found: Logprobs, row: int, columns: slice, tokens: list[int], wanted: int, sequence: Sequence
) -> list[TokenLogprobs]:
    """For each of the tokens in some columns of a row: itself, and the likeliest alternatives."""
    chosen, rank = found.chosen[row, columns].tolist(), found.rank[row, columns].tolist()
    top, top_tokens = found.top[row, columns, :wanted].tolist(), found.top_tokens[row, columns, :wanted].tolist()
    decode, listed = sequence.decode_one, []
    for token, own, own_rank, others, theirs in zip(tokens, chosen, rank, top_tokens, top, strict=True):
        entries = {token: Logprob(own, own_rank, decode(token))}
        for i, (other, logprob) in enumerate(zip(others, theirs, strict=True)):
            if other not in entries:
                entries[other] = Logprob(logprob, i + 1, decode(other))
        listed.append(entries)
    return listed
