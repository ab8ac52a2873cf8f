"""Complete many prompts at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.base.values import SamplingParams
from dflash_jax.engine.host.sequence import Sequence as Completing
from dflash_jax.llm import LLM

Advance = Callable[[int, int], None]  # takes completions that ended, and tokens emitted, since the last call
Part = tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]  # token ids of prompts, and sampling parameters of each


def complete(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], advance: Advance
) -> list[CompletionOutput]:
    """Complete each prompt; outputs are in the order of the prompts.

    Args:
        llm: the engine.
        prompts: token ids.
        params: one for each prompt.
        advance: called after each step.
    """
    (outputs,) = complete_parts(llm, [(prompts, params)], advance)
    return outputs


def complete_parts(llm: LLM, parts: Iterable[Part], advance: Advance) -> Iterator[list[CompletionOutput]]:
    """Complete the prompts of each part, part after part; a part starts when no earlier prompt waits for a slot.

    Starting it then keeps all slots busy to the end: some answers are far longer than others. Works like
    `LLM.generate`, without a snapshot of every output after every step.

    Args:
        llm: the engine.
        parts: prompts and their sampling parameters.
        advance: called after each step.

    Yields:
        Outputs of a part, in the order of its prompts.
    """
    engine, coming = llm.engine, iter(parts)
    begun: deque[list[Completing]] = deque()
    known = engine.stats.num_generation_tokens
    try:
        while True:
            while not engine.scheduler.waiting and (part := next(coming, None)) is not None:
                begun.append([_sequence(llm, prompt, params) for prompt, params in zip(*part, strict=True)])
                engine.add(begun[-1])
            while begun and all(sequence.finished for sequence in begun[0]):
                yield [sequence.output for sequence in begun.popleft()]
            if not begun:
                return
            changed = engine.step()
            emitted = engine.stats.num_generation_tokens
            advance(sum(sequence.finished for sequence in changed), emitted - known)
            known = emitted
    finally:  # the caller may stop iterating
        for sequence in (sequence for sequences in begun for sequence in sequences):
            engine.abort(sequence)
        if not (engine.is_idle or engine.scheduler.waiting or engine.scheduler.running):
            engine.step()  # reads the round that is in flight


def _sequence(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Completing:
    return llm.frontend.request({"prompt_token_ids": prompt}, params).sequences[0]
