"""What a drafter gains, in tokens: counted over the rounds of finished requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.base.errors import DFlashError
from dflash_jax.base.values import Prompt, RequestOutput, SamplingParams
from dflash_jax.bench import acceptance as rounds
from dflash_jax.llm import LLM
from dflash_jax.text.repetition import repeated_ngrams


@dataclass(frozen=True)
class Acceptance:
    """Figures of some requests. Lengths count the bonus token, as the paper does; what nothing was seen of is None.

    The first token of a completion comes from prefill and is of no round. A round that the end of its completion cuts
    short counts what is left of it, so that lengths are a little too small rather than too large.

    Attributes:
        num_requests: prompts.
        num_tokens: tokens of all completions.
        rounds: the engine's rounds, drafts and the histogram of accepted drafts, summed.
        mean_acceptance_length: tokens that rounds emitted / rounds.
        mean_acceptance_length_by_request: the mean over requests of the same ratio of each.
        least_repetitive_acceptance_length: `mean_acceptance_length` of the half of the requests that repeat least.
        acceptance_per_position: entry k: in which share of the rounds that verified drafts draft k + 1 became a token,
            as vLLM counts.
        conditional_acceptance: entry k: the same share of those rounds that took every draft before it and had it.
        finish_reasons: how many completions ended for each.
        repeated_ngrams: mean over completions of `repeated_ngrams`, the share of 8-grams that came before.
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
        """As JSON can have it; `rounds` as `bench` writes them."""
        return {**vars(self), "rounds": self.rounds.to_dict()}


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
) -> Acceptance:
    """Complete prompts and count what the drafter gained; `use_tqdm` is that of `LLM.generate`.

    Raises:
        RequestError: a prompt cannot be served.
        DFlashError: a completion failed.
    """
    return acceptance_of(llm.generate(prompts, params, use_tqdm=use_tqdm))


def acceptance_of(outputs: Sequence[RequestOutput]) -> Acceptance:
    """The figures of finished requests.

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
        drafts: drafts that it verified; rounds without any tell nothing.
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
    """Share of 8-grams of its completions that came before in the same one."""
    return float(np.mean([repeated_ngrams(completion.token_ids) for completion in output.outputs]))


def _least_repetitive(outputs: Sequence[RequestOutput]) -> float | None:
    half = sorted(outputs, key=repetition)[: (len(outputs) + 1) // 2]
    return _mean([length for output in half for length in output.metrics.acceptance_lengths])


def _mean_length(output: RequestOutput) -> float | None:
    return _mean(output.metrics.acceptance_lengths)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
