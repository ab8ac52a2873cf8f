"""A running request: its checked prompt and the sequences that complete it; and the checks of prompt and parameters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from dflash_jax.base.errors import RequestError
from dflash_jax.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dflash_jax.base.values import Prompt, SamplingParams, is_int
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Request:
    """One prompt and its n completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[Sequence]
    started: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(s.finished for s in self.sequences)

    @property
    def queue_time(self) -> float | None:
        """Seconds that it waited for the start of its prefill; None while it waits."""
        started = self.sequences[0].started
        return None if started is None else max(started - self.started, 0.0)

    def touch(self) -> None:
        """Note the time when its first token is seen."""
        if self.first_token_time is None and any(s.output.token_ids for s in self.sequences):
            self.first_token_time = time.perf_counter() - self.started

    def output(self) -> RequestOutput:
        """What has come so far; later steps leave it alone."""
        return self.snapshot().output()

    def snapshot(self) -> Snapshot:
        """How far it has come, for any thread to make an output of; call it where the engine runs."""
        self.touch()
        for sequence in self.sequences:
            sequence.publish_text()
        return Snapshot(
            request=self,
            completions=[s.output.first() for s in self.sequences],
            num_tokens=[len(s.output.token_ids) for s in self.sequences],
            num_rounds=[len(s.acceptance_lengths) for s in self.sequences],
            num_prompt_logprobs=len(self.sequences[0].prompt_logprobs),
            finished=self.finished,
            queue_time=self.queue_time,
            first_token_time=self.first_token_time,
            seconds=time.perf_counter() - self.started,
        )


@dataclass(slots=True)
class Snapshot:
    """How far a request had come: what an output is made of, by whoever reads it and when they do.

    Taking one costs the engine's thread nothing that grows with the output: it shares the lists of the sequences, which
    only ever grow, and notes how long they were.

    Attributes:
        request: the request.
        completions: of each sequence, with lists that may have grown since.
        num_tokens: tokens of each completion.
        num_rounds: rounds of each completion.
        num_prompt_logprobs: tokens of the prompt whose log-probabilities were known.
        finished: whether every completion had ended.
        queue_time: as of `RequestMetrics`.
        first_token_time: likewise.
        seconds: since the request was made.
    """

    request: Request
    completions: list[CompletionOutput]
    num_tokens: list[int]
    num_rounds: list[int]
    num_prompt_logprobs: int
    finished: bool
    queue_time: float | None
    first_token_time: float | None
    seconds: float

    def output(self) -> RequestOutput:
        """The output, with lists of its own."""
        request, sequences, first = self.request, self.request.sequences, self.request.sequences[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *first.prompt_logprobs[: self.num_prompt_logprobs]]
        rounds = self.num_rounds
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[c.first(number) for c, number in zip(self.completions, self.num_tokens, strict=True)],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            metrics=RequestMetrics(
                acceptance_lengths=_joined([s.acceptance_lengths for s in sequences], rounds),
                draft_lengths=_joined([s.draft_lengths for s in sequences], rounds),
                queue_time=self.queue_time,
                first_token_time=self.first_token_time,
                finished_time=self.seconds if self.finished else None,
                num_cached_tokens=first.num_cached_tokens,
            ),
        )


def _joined(lists: list[list[int]], lengths: list[int]) -> list[int]:
    """The first numbers of each list, one after the other."""
    joined = lists[0][: lengths[0]]
    for numbers, length in zip(lists[1:], lengths[1:], strict=True):
        joined += numbers[:length]
    return joined


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its token ids.

    Raises:
        RequestError: it is neither text nor token ids, it is empty, or an id is not in the vocabulary.
    """
    unchecked: Any = prompt  # a caller may pass anything, whatever the annotation says
    if isinstance(unchecked, Mapping) and "prompt_token_ids" in unchecked:
        listed = unchecked["prompt_token_ids"]
        if not isinstance(listed, Iterable) or isinstance(listed, str | bytes):
            raise RequestError(f"prompt_token_ids of type {type(listed).__name__} is not a list of token ids.")
        text, ids = None, list(listed)
    elif isinstance(unchecked, Mapping) and isinstance(unchecked.get("prompt"), str):
        return tokenize(unchecked["prompt"], tokenizer, vocab_size=vocab_size)
    elif isinstance(unchecked, str):
        if tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer and the model folder has none; give {'prompt_token_ids': [...]}."
            )
        text, ids = unchecked, tokenizer.encode(unchecked)
    else:
        raise RequestError(
            f"a prompt of type {type(prompt).__name__} is not a string nor {{'prompt_token_ids': [...]}}."
        )
    if not ids:
        raise RequestError("the prompt is empty; give at least one token.")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:  # the fast check, for long prompts
        return text, ids
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise RequestError(f"prompt token id {token!r} is not in the vocabulary: ids are 0 to {vocab_size - 1}.")
    return text, [int(token) for token in ids]


def cache_salt_of(prompt: Prompt) -> str | None:
    """The `cache_salt` of a prompt; None if it has none.

    Raises:
        RequestError: it is not a string, or it is empty.
    """
    salt = None if isinstance(prompt, str) else prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt={salt!r} is not a non-empty string; leave it out to share the prefix cache.")
    return salt


def check_params(
    params: SamplingParams,
    *,
    prompt_length: int,
    max_model_len: int,
    vocab_size: int,
    num_tokens: int,
    has_tokenizer: bool,
) -> int:
    """The most tokens the request may emit.

    Args:
        params: of the request.
        prompt_length: tokens of the prompt.
        max_model_len: most tokens of prompt and answer.
        vocab_size: V, rows of the vocabulary.
        num_tokens: the first rows of the vocabulary, which may be emitted.
        has_tokenizer: whether there is text at all.

    Raises:
        RequestError: the prompt leaves no room, or the parameters do not fit the model.
    """
    room = max_model_len - prompt_length
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_length} tokens and max_model_len={max_model_len} leaves no room for an answer; "
            "shorten the prompt or raise max_model_len."
        )
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", dict(params.logit_bias)),
    ):
        if beyond := [t for t in tokens if t >= vocab_size]:
            raise RequestError(f"{name} holds {beyond[0]}, not in the vocabulary: ids are 0 to {vocab_size - 1}.")
    if params.allowed_token_ids and min(params.allowed_token_ids) >= num_tokens:
        raise RequestError(
            f"allowed_token_ids holds padding of the vocabulary alone: tokens are 0 to {num_tokens - 1}; allow one."
        )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise RequestError(f"{name}={count} exceeds the vocabulary of {vocab_size}; lower it.")
    for name, needs_text, instead in (
        ("stop strings", params.stop, "use stop_token_ids"),
        ("bad_words", params.bad_words, "use logit_bias"),
        ("structured_outputs", params.structured_outputs, "leave them out"),
    ):
        if needs_text and not has_tokenizer:
            raise RequestError(f"{name} need a tokenizer and the model folder has none; {instead}.")
    if params.stop and not params.detokenize:
        raise RequestError("stop strings are looked for in text, and detokenize=False makes none; use stop_token_ids.")
    return room if params.max_tokens is None else min(params.max_tokens, room)


def one_each(params: SamplingParams | Seq[SamplingParams], number: int) -> list[SamplingParams]:
    """Sampling parameters for each of a number of prompts.

    Raises:
        RequestError: they are not SamplingParams, or not as many as prompts.
    """
    if isinstance(params, SamplingParams):
        return [params] * number
    listed: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    for item in listed:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params of type {type(item).__name__} are not SamplingParams.")
    if len(listed) != number:
        raise RequestError(f"{len(listed)} sampling_params for {number} prompts; give one, or one for each prompt.")
    return listed
