"""The nouns everybody shares: what is asked for and what comes back. Imports nothing of ours but the errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TypedDict, TypeGuard

from dflash_jax.errors import RequestError

MOST_COMPLETIONS = 16_384  # of one prompt: vLLM's limit
SEED_LIMIT = 2**64  # seeds are the two 32-bit words of a threefry key


class TokensPrompt(TypedDict):
    """A prompt that is already tokenised."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn the target's logits into tokens. Names and defaults are vLLM's.

    Attributes:
        n: completions per prompt; completion i of a seeded request uses seed + i.
        temperature: 0 is greedy.
        top_p: keep the likeliest tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the likeliest, in [0, 1].
        seed: with it, the same request gives the same tokens, with or without a drafter.
        stop: strings that end the text; the text is cut before them.
        stop_token_ids: tokens that end the output; they stay in `token_ids`.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        max_tokens: most tokens to emit; None means up to `max_model_len`.
        min_tokens: tokens to emit before an end-of-sequence or stop token may be chosen.
        logprobs: log-probabilities of each emitted token and of this many likeliest alternatives.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value is outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", _as_tuple(self.stop))
        set_field(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        checks: list[tuple[str, object, bool, str]] = [
            (
                "n",
                self.n,
                is_int(self.n) and 1 <= self.n <= MOST_COMPLETIONS,
                f"an integer from 1 to {MOST_COMPLETIONS}",
            ),
            (
                "temperature",
                self.temperature,
                _is_real(self.temperature) and self.temperature >= 0,
                "a finite number of at least 0",
            ),
            ("top_p", self.top_p, _is_real(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k, is_int(self.top_k) and self.top_k >= -1, "an integer of at least -1 (0 and -1: all)"),
            ("min_p", self.min_p, _is_real(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_tokens", self.max_tokens, _optional_at_least(self.max_tokens, 1), "None or an integer of at least 1"),
            (
                "min_tokens",
                self.min_tokens,
                is_int(self.min_tokens) and self.min_tokens >= 0,
                "an integer of at least 0",
            ),
            ("logprobs", self.logprobs, _optional_at_least(self.logprobs, 0), "None or an integer of at least 0"),
            (
                "seed",
                self.seed,
                self.seed is None or (is_int(self.seed) and abs(self.seed) < SEED_LIMIT // 2),
                "None or an integer of 64 bits",
            ),
            (
                "stop",
                self.stop,
                all(isinstance(s, str) and s for s in self.stop),
                "non-empty strings",
            ),
            (
                "stop_token_ids",
                self.stop_token_ids,
                all(is_int(t) and t >= 0 for t in self.stop_token_ids),
                "token ids of at least 0",
            ),
        ]
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            checks.append((name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False"))
        for name, value, ok, allowed in checks:
            if not ok:
                raise RequestError(f"{name}={value!r} is not allowed: it must be {allowed}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: lower the one or raise the other."
            )


@dataclass(frozen=True, slots=True)
class Logprob:
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
    finish_reason: str | None = None  # "stop" | "length"; None while running
    stop_reason: int | str | None = None  # the stop token or string; None for an end-of-sequence token


@dataclass(slots=True)
class RequestMetrics:
    """What a request cost.

    Attributes:
        acceptance_lengths: tokens emitted by each round, bonus included; completions one after another. The
            first token of a completion comes from prefill and belongs to no round.
        first_token_time: seconds from the call to the first token of the request.
        finished_time: seconds from the call to its last token.
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass, NaN before the first round."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else math.nan


@dataclass(slots=True)
class RequestOutput:
    """Everything that came of one prompt, so far or finally."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer (numpy's included) and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_tuple(value: object) -> tuple:
    """What was listed, or the one thing that was given without a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _optional_at_least(value: int | None, least: int) -> bool:
    return value is None or (is_int(value) and value >= least)
