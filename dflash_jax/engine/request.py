"""A request while it runs: its prompt, checked, and the sequences that complete it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_jax.checkpoint.tokenizer import Tokenizer
from dflash_jax.core import Prompt, RequestMetrics, RequestOutput, SamplingParams, is_int
from dflash_jax.engine.sequence import Sequence
from dflash_jax.errors import RequestError


@dataclass(eq=False)
class Request:
    """One prompt and its n completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[Sequence]
    started: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None

    def output(self) -> RequestOutput:
        """What has come so far, as a snapshot that later steps leave alone."""
        elapsed = time.perf_counter() - self.started
        if self.first_token_time is None and any(s.output.token_ids for s in self.sequences):
            self.first_token_time = elapsed
        finished = all(s.finished for s in self.sequences)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                replace(
                    s.output,
                    token_ids=list(s.output.token_ids),
                    logprobs=None if s.output.logprobs is None else list(s.output.logprobs),
                )
                for s in self.sequences
            ],
            finished=finished,
            metrics=RequestMetrics(
                acceptance_lengths=[length for s in self.sequences for length in s.acceptance_lengths],
                first_token_time=self.first_token_time,
                finished_time=elapsed if finished else None,
            ),
        )


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its token ids.

    Raises:
        RequestError: it is neither text nor token ids, it is empty, or an id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer and the model folder has none; give {'prompt_token_ids': [...]}."
            )
        text, ids = prompt, tokenizer.encode(prompt)
    elif isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        given = prompt["prompt_token_ids"]
        if not isinstance(given, Iterable) or isinstance(given, str | bytes):
            raise RequestError(f"prompt_token_ids of type {type(given).__name__} is not a list of token ids.")
        text, ids = None, list(given)
    elif isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return tokenize(prompt["prompt"], tokenizer, vocab_size=vocab_size)
    else:
        raise RequestError(
            f"a prompt of type {type(prompt).__name__} is not a string nor {{'prompt_token_ids': [...]}}."
        )
    if not ids:
        raise RequestError("the prompt is empty; give at least one token.")
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise RequestError(f"prompt token id {token!r} is not in the vocabulary: ids are 0 to {vocab_size - 1}.")
    return text, [int(token) for token in ids]


def check_params(
    params: SamplingParams, *, prompt_length: int, max_model_len: int, vocab_size: int, has_tokenizer: bool
) -> int:
    """The most tokens the request may emit.

    Raises:
        RequestError: the prompt leaves no room, or the parameters do not fit the model.
    """
    room = max_model_len - prompt_length
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_length} tokens and max_model_len={max_model_len} leaves no room for an answer; "
            "shorten the prompt or raise max_model_len."
        )
    beyond = [t for t in params.stop_token_ids if t >= vocab_size]
    if beyond:
        raise RequestError(f"stop_token_ids holds {beyond[0]}, not in the vocabulary: ids are 0 to {vocab_size - 1}.")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestError(f"logprobs={params.logprobs} exceeds the vocabulary of {vocab_size}; lower it.")
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer and the model folder has none; use stop_token_ids.")
    return room if params.max_tokens is None else min(params.max_tokens, room)


def one_each(params: SamplingParams | Seq[SamplingParams], number: int) -> list[SamplingParams]:
    """Sampling parameters for each of a number of prompts.

    Raises:
        RequestError: they are something else, or more or fewer than prompts.
    """
    if isinstance(params, SamplingParams):
        return [params] * number
    listed: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    for each in listed:
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params of type {type(each).__name__} are not SamplingParams.")
    if len(listed) != number:
        raise RequestError(f"{len(listed)} sampling_params for {number} prompts; give one, or one for each prompt.")
    return listed
