"""Acceptance of a drafter, counted over the rounds of finished requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.base import acceptance as rounds
from dflash_jax.base.errors import DFlashError
from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.llm import LLM
from dflash_jax.text.repetition import repeated_ngrams


@dataclass(frozen=True)
class Acceptance:
    """Figures of finished requests. Lengths count the bonus token, as the paper does; figures without data are None.

    The first token of a completion comes from prefill and belongs to no round. A round that the end of its completion
    cuts short counts the tokens that were kept, so that lengths are slightly too small rather than too large.

    Attributes:
        num_requests: prompts.
        num_tokens: tokens of all completions.
        rounds: the engine's rounds, drafts and the histogram of accepted drafts, summed.
        mean_acceptance_length: tokens that rounds emitted / rounds.
        mean_acceptance_length_by_request: mean over requests of their own mean acceptance lengths.
        least_repetitive_acceptance_length: `mean_acceptance_length` of the half of the requests with the smallest
            `repetition`.
        acceptance_per_position: entry k: share of the rounds with drafts in which draft k + 1 was accepted, as vLLM
            counts.
        conditional_acceptance: entry k: the same share among rounds that had draft k + 1 and accepted every draft
            before it; None where there is no such round.
        finish_reasons: number of completions by reason.
        repeated_ngrams: mean over completions of `repeated_ngrams`, the share of 8-grams that occurred before.
    """

    num_requests: int
    num_tokens: int
    rounds: rounds.Acceptance
    mean_acceptance_length: float | None
    mean_acceptance_length_by_request: float | None
    least_repetitive_acceptance_length: float | None
    acceptance_per_position: list[float]
    conditional_acceptance: list[float | None]
    finish_reasons: dict[str, int]
    repeated_ngrams: float | None

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON; `rounds` as `bench` writes them."""
        return {**vars(self), "rounds": self.rounds.to_dict()}


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
) -> Acceptance:
    """Complete prompts and count accepted drafts.

    Args:
        llm: the engine.
        prompts: to complete.
        params: of all prompts or of each; None takes the model's defaults.
        use_tqdm: as in `LLM.generate`.

    Raises:
        RequestError: a prompt cannot be served.
        DFlashError: a completion failed.
    """
    return acceptance_of(llm.generate(prompts, params, use_tqdm=use_tqdm))


def acceptance_of(outputs: Sequence[RequestOutput]) -> Acceptance:
    """Figures of finished requests.

    Raises:
        DFlashError: a completion failed.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    for completion in completions:
        if completion.error is not None:
            raise DFlashError(f"a completion failed: {completion.error}")
    lengths = [length for output in outputs for length in output.metrics.acceptance_lengths]
    drafts = [length for output in outputs for length in output.metrics.draft_lengths]
    per_position, conditional = positions(lengths, drafts)
    return Acceptance(
        num_requests=len(outputs),
        num_tokens=sum(len(completion.token_ids) for completion in completions),
        rounds=rounds.of_engine(lengths, sum(drafts)),
        mean_acceptance_length=_mean(lengths),
        mean_acceptance_length_by_request=_mean([m for m in map(_mean_length, outputs) if m is not None]),
        least_repetitive_acceptance_length=_least_repetitive(outputs),
        acceptance_per_position=per_position,
        conditional_acceptance=conditional,
        finish_reasons=dict(Counter(str(completion.finish_reason) for completion in completions)),
        repeated_ngrams=_mean([repeated_ngrams(completion.token_ids) for completion in completions]),
    )


def positions(lengths: Sequence[int], drafts: Sequence[int]) -> tuple[list[float], list[float | None]]:
    """`acceptance_per_position` and `conditional_acceptance` of rounds.

    Args:
        lengths: tokens that each round emitted, 1 to its drafts + 1.
        drafts: drafts that each round verified; rounds without drafts are left out.
    """
    pairs = [(length - 1, draft) for length, draft in zip(lengths, drafts, strict=True) if draft]
    if not pairs:
        return [], []
    accepted, drafted = np.array(pairs).T[:, :, None]
    position = np.arange(drafted.max())
    taken = (position < accepted).sum(axis=0)
    reached = ((position <= accepted) & (position < drafted)).sum(axis=0)
    conditional = [t / r if r else None for t, r in zip(taken.tolist(), reached.tolist(), strict=True)]
    return (taken / len(pairs)).tolist(), conditional


def repetition(output: RequestOutput) -> float:
    """Share of the 8-grams of its completions that occurred before in the same completion, mean over completions."""
    return float(np.mean([repeated_ngrams(completion.token_ids) for completion in output.outputs]))


def _least_repetitive(outputs: Sequence[RequestOutput]) -> float | None:
    half = sorted(outputs, key=repetition)[: (len(outputs) + 1) // 2]
    return _mean([length for output in half for length in output.metrics.acceptance_lengths])


def _mean_length(output: RequestOutput) -> float | None:
    return _mean(output.metrics.acceptance_lengths)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
