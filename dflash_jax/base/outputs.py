"""What the public API returns: outputs of requests, and the state of an engine. Imports nothing of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of a token under the target's unprocessed distribution, and its rank (1 = likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None while running
    stop_reason: int | str | None = None  # the stop token or string; None for an end-of-sequence token
    error: str | None = None  # the cause of finish_reason "error"

    def first(self, number: int | None = None) -> CompletionOutput:
        """A copy whose lists are of its own and hold the first `number` tokens; without a number it shares them.

        A server makes one for each request and round: `dataclasses.replace` takes four times as long.
        """
        token_ids, logprobs = self.token_ids, self.logprobs
        if number is not None:
            token_ids, logprobs = token_ids[:number], None if logprobs is None else logprobs[:number]
        return CompletionOutput(
            self.index,
            self.text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
        )


@dataclass(slots=True)
class RequestMetrics:
    """What a request cost.

    Attributes:
        acceptance_lengths: tokens emitted by each round, bonus included; completions one after another. The
            first token of a completion comes from prefill and belongs to no round.
        draft_lengths: drafts verified by each of these rounds; 0 where a round decoded without the drafter.
        queue_time: seconds from the call to the start of the prefill; None while it waits.
        first_token_time: seconds from the call to the first token of the request.
        finished_time: seconds from the call to its last token.
        num_cached_tokens: tokens of the prompt that came from the prefix cache.
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    queue_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass, NaN before the first round."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else math.nan


@dataclass(slots=True)
class RequestOutput:
    """The output of one prompt, so far or finished.

    `prompt_logprobs` has one entry for each token of the prompt, like `CompletionOutput.logprobs`; the first is None,
    since nothing comes before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine between two steps; numbers of events count from its start.

    Attributes:
        num_running: sequences that hold a slot.
        num_waiting: sequences that wait for a slot.
        kv_cache_usage: share of the KV cache's pages that sequences own, in [0, 1].
        num_prefix_queries: prompt tokens that were looked up in the prefix cache.
        num_prefix_hits: prompt tokens that the prefix cache had.
        num_snapshots: snapshots of recurrent states that prefix hits can restore now.
        num_snapshots_taken: snapshots that were taken.
        num_snapshot_hits: snapshots that were restored.
        num_snapshots_evicted: snapshots that made room for others.
        num_preemptions: times that a sequence gave its pages back and was computed again.
        num_compiles: programs compiled since the engine was ready.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_generation_tokens: emitted tokens.
        num_drafts: rounds that verified drafts, counted once for every sequence in them.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: drafts that became tokens.
        num_accepted_tokens_per_pos: drafts that became tokens, by position in the block.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_snapshots: int = 0
    num_snapshots_taken: int = 0
    num_snapshot_hits: int = 0
    num_snapshots_evicted: int = 0
    num_preemptions: int = 0
    num_compiles: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
