"""Samples become prompts, and prompts conversations: chat or raw, one turn or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.base.values import Prompt, RequestOutput, SamplingParams, TokensPrompt
from dflash_jax.eval.datasets import History, Sample
from dflash_jax.llm import LLM
from dflash_jax.text.renderer import Renderer

PROMPT_STYLES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Answer:
    """What a model said in one turn of a sample; the first turn is 0."""

    sample_id: str
    turn: int
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """Answers to all turns of some samples, turn after turn.

    Attributes:
        seconds: time that the engine took for them.
        num_compiles: programs that it had to compile meanwhile; where there are any, the time says little.
    """

    answers: list[Answer]
    seconds: float
    num_compiles: int

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of all answers."""
        return [answer.output for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.num_tokens / self.seconds


def joined(runs: Sequence[Run]) -> Run:
    """Runs after one another as one."""
    answers = [answer for run in runs for answer in run.answers]
    return Run(answers, sum(run.seconds for run in runs), sum(run.num_compiles for run in runs))


def is_instruct(renderer: Renderer) -> bool:
    """Whether the chat template marks who speaks: whether it renders more than what was said."""
    if renderer.tokenizer is None or not renderer.tokenizer.has_chat_template:
        return False
    said = "Hello"
    return renderer.chat_text([{"role": "user", "content": said}]).strip() != said


def opening(sample: Sample, style: str, *, instruct: bool) -> History:
    """How a sample begins: messages if it is a chat, text if it is to be continued.

    Args:
        sample: as its data set has it; messages and token ids stay what they are.
        style: "chat" asks every text, "raw" continues every text, "auto" asks what is a question to an instruct model.
        instruct: whether the model is one.
    """
    if not isinstance(sample.prompt, str):
        return sample.prompt
    if style == "chat" or (style == "auto" and instruct and sample.question is not None):
        return [{"role": "user", "content": sample.question or sample.prompt}]
    return sample.prompt


def continued(history: History, answer: str, follow_up: str) -> History:
    """A conversation with the model's answer and what the user says to it; without roles, parts of a text."""
    if isinstance(history, list):
        return [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    assert isinstance(history, str)  # token ids come from a JSONL file, which has no follow-ups
    return f"{history}{answer}\n\n{follow_up}"


def prompt_of(history: History, renderer: Renderer, salt: str) -> TokensPrompt:
    """The token ids of a conversation. Pages are shared only within `salt`: no run finds another's prompts cached."""
    ids: Sequence[int]
    if isinstance(history, str):
        ids = renderer.need_tokenizer("a text prompt").encode(history)
    elif isinstance(history, list):
        ids = renderer.chat_prompt(history)["prompt_token_ids"]
    else:
        ids = history
    return {"prompt_token_ids": ids, "cache_salt": salt}


def converse(
    llm: LLM,
    samples: Sequence[Sample],
    params: Sequence[SamplingParams],
    *,
    style: str,
    salt: str,
    use_tqdm: bool | Callable[..., Any] = False,
) -> Run:
    """Have every conversation: all first turns at once, then all second ones after the model's own answers.

    Args:
        llm: that answers.
        samples: how conversations begin.
        params: of each.
        style: of prompts, as in `opening`.
        salt: pages are shared only within it.
        use_tqdm: as in `LLM.generate`, which is called for every turn.

    Raises:
        RequestError: a prompt cannot be served.
    """
    instruct = is_instruct(llm.frontend)
    histories: dict[int, History] = {i: opening(sample, style, instruct=instruct) for i, sample in enumerate(samples)}
    answers: list[Answer] = []
    seconds, compiled, turn = 0.0, llm.engine.stats.num_compiles, 0
    while histories:
        prompts: list[Prompt] = [prompt_of(history, llm.frontend, salt) for history in histories.values()]
        started = time.perf_counter()
        outputs = llm.generate(prompts, [params[i] for i in histories], use_tqdm=use_tqdm)
        seconds += time.perf_counter() - started
        answers += [Answer(samples[i].id, turn, output) for i, output in zip(histories, outputs, strict=True)]
        histories = {
            i: continued(history, output.outputs[0].text, samples[i].follow_ups[turn])
            for (i, history), output in zip(histories.items(), outputs, strict=True)
            if turn < len(samples[i].follow_ups)
        }
        turn += 1
    return Run(answers, seconds, llm.engine.stats.num_compiles - compiled)
