"""From samples to prompts and conversations: chat or raw text, one turn or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.base.outputs import RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams, TokensPrompt
from dflash_jax.eval.datasets import History, Sample
from dflash_jax.llm import LLM
from dflash_jax.text.renderer import Renderer

PROMPT_STYLES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Answer:
    """The output of one turn of a sample; the first turn is 0."""

    sample_id: str
    turn: int
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """Answers to all turns of some samples, turn after turn.

    Attributes:
        answers: in the order of turns, and of samples in each turn.
        seconds: time that the engine took.
        num_compiles: programs compiled during that time; if there are any, the time is not meaningful.
    """

    answers: list[Answer]
    seconds: float
    num_compiles: int

    @property
    def outputs(self) -> list[RequestOutput]:
        """Outputs of all answers."""
        return [answer.output for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens / time, prefill included."""
        return self.num_tokens / self.seconds


def joined(runs: Sequence[Run]) -> Run:
    """Join runs that followed one another."""
    answers = [answer for run in runs for answer in run.answers]
    return Run(answers, sum(run.seconds for run in runs), sum(run.num_compiles for run in runs))


def is_instruct(renderer: Renderer) -> bool:
    """Whether the chat template marks roles: whether it renders anything beside the content."""
    if renderer.tokenizer is None or not renderer.tokenizer.has_chat_template:
        return False
    content = "Hello"
    return renderer.chat_text([{"role": "user", "content": content}]).strip() != content


def opening(sample: Sample, style: str, *, instruct: bool) -> History:
    """How the conversation of a sample begins: messages for a chat, text to be continued.

    Args:
        sample: of a data set; messages and token ids stay as they are.
        style: "chat" sends every text as a user's message, "raw" continues every text, "auto" sends questions as
            messages to an instruct model.
        instruct: whether the model is one.
    """
    if not isinstance(sample.prompt, str):
        return sample.prompt
    if style == "chat" or (style == "auto" and instruct and sample.question is not None):
        return [{"role": "user", "content": sample.question or sample.prompt}]
    return sample.prompt


def continued(history: History, answer: str, follow_up: str) -> History:
    """A conversation with the model's answer and the user's next message; without roles, the texts are concatenated."""
    if isinstance(history, list):
        return [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    assert isinstance(history, str)  # token ids come from a JSONL file, which has no follow-ups
    return f"{history}{answer}\n\n{follow_up}"


def prompt_of(history: History, renderer: Renderer, salt: str) -> TokensPrompt:
    """Tokenise a conversation.

    Args:
        history: the conversation so far.
        renderer: of the model.
        salt: pages are shared only within it, so that no run finds prompts of another in the prefix cache.
    """
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
    """Have all conversations: all first turns side by side, then all second turns after the model's own answers.

    Args:
        llm: the engine.
        samples: how conversations begin.
        params: sampling parameters of each.
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
