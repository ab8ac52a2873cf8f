"""Many completions at once."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.core import CompletionOutput, SamplingParams
from dflash_jax.llm import LLM
from dflash_jax.train.data.progress import Advance


def complete(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], advance: Advance
) -> list[CompletionOutput]:
    """One completion for each prompt, in order; all wait in the engine's queue, so that every slot is always taken.

    As `LLM.generate`, without a snapshot of every output after every step.
    """
    sequences = [
        llm.frontend.request({"prompt_token_ids": prompt}, each).sequences[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    known = llm.engine.stats.num_generation_tokens
    for changed in llm.engine.run(sequences):
        emitted = llm.engine.stats.num_generation_tokens
        advance(sum(sequence.finished for sequence in changed), emitted - known)
        known = emitted
    return [sequence.output for sequence in sequences]
