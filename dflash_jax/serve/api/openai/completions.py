"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import ChunkBuffer, TokenSources
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import (
    Alternatives,
    TextOffsets,
    TokenTexts,
    completion_logprobs,
    prompt_logprobs,
)
from dflash_jax.serve.answers.requests import encode, log_request, new_job, response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import costs, usage_of
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.http.streaming import DONE, KEEP_ALIVE, Events, EventStream, event, json_response, unless_left
from dflash_jax.serve.protocol import CompletionRequest, completion_prompts, sampling_params


@dataclass(eq=False)
class Completions:
    """Prompts on their way to their completions; `texts` are the prompts' where they are echoed, else empty."""

    state: ServerState
    body: CompletionRequest
    job: Job
    texts: list[str]

    def choice(self, prompt: int, index: int) -> Choice:
        """A choice that nothing has come of yet."""
        return Choice(self, prompt, index)

    def head(self) -> dict[str, Any]:
        """What an answer and every chunk begin with."""
        job = self.job
        return {"id": job.id, "object": "text_completion", "created": job.created, "model": self.state.model}


class Choice:
    """One completion of one prompt, as it comes."""

    def __init__(self, whole: Completions, prompt: int, index: int):
        body = whole.body
        self._body = body
        self._index = prompt * body.n + index
        self._prompt, self._echoed = whole.job.prompts[prompt], whole.texts[prompt]
        self._is_begun = False
        self.buffer = ChunkBuffer(whole.state.args.stream_interval)
        tokenizer = whole.state.renderer.tokenizer
        self._texts = TokenTexts(tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._prompt_offsets = TextOffsets(tokenizer, text=self._echoed)
        self._offsets = TextOffsets(
            tokenizer,
            start=len(self._echoed),
            prompt=self._prompt,
            skip_special_tokens=body.skip_special_tokens,
        )
        self._sources = TokenSources(tokenizer, self._prompt) if body.return_token_sources and tokenizer else None

    def take(self, completion: CompletionDelta, of_prompt: Sequence[Alternatives | None] | None) -> dict[str, Any]:
        """What the completion has gained, as a choice; the first has the prompt with it if that is echoed."""
        body = self._body
        text, token_ids, found = completion.text, completion.token_ids, completion.logprobs
        if body.is_echo_only:
            text, token_ids, found = "", [], None if found is None else []
        before = self._prompt if body.echo and not self._is_begun else []
        if before:
            text = self._echoed + text
        choice: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
        if found is not None:
            known = (of_prompt or ())[: len(before)]
            unknown = [None] * (len(before) - len(known))  # an aborted prompt may not have all
            offsets = self._prompt_offsets.of(before) + self._offsets.of(token_ids)
            choice["logprobs"] = completion_logprobs(
                [*known, *unknown, *found], [*before, *token_ids], self._texts, offsets
            )
        if completion.finish_reason is not None:
            reason = "length" if body.is_echo_only else completion.finish_reason
            choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if not self._is_begun:
                choice["prompt_token_ids"] = self._prompt
        if self._sources is not None and not body.is_echo_only:
            choice["tokens"] = self._sources.of(completion)
        self._is_begun = True
        return choice


def completions_router(state: ServerState) -> APIRouter:
    """The endpoint of completions."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, summary="Complete prompts")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        whole = await _completions(state, body, request)
        headers = response_headers(state, whole.job)
        if body.stream:
            return await EventStream.of(_stream(whole), headers)
        return await unless_left(request, _answer(whole, headers))

    return router


async def _completions(state: ServerState, body: CompletionRequest, request: Request) -> Completions:
    state.check_model(body.model)
    params = sampling_params(body, state.defaults, state.args.limits)
    prompts = completion_prompts(body, state.args.limits)
    token_ids = await state.render(lambda: [_token_ids(state, body, prompt) for prompt in prompts])
    job = new_job(state, body, request, "cmpl", token_ids, params)
    log_request(state, job, prompts[0] if isinstance(prompts[0], str) else None)
    texts = [""] * len(prompts)
    if body.echo:
        texts = await state.render(
            lambda: [
                _text(state, prompt, kept, is_whole=len(kept) == len(whole))
                for prompt, kept, whole in zip(prompts, job.prompts, token_ids, strict=True)
            ]
        )
    return Completions(state, body, job, texts)


def _token_ids(state: ServerState, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    is_truncated = body.truncate_prompt_tokens is not None
    add_special = body.add_special_tokens
    return encode(state, prompt, "a text prompt", add_special_tokens=add_special, is_truncated=is_truncated)


def _text(state: ServerState, prompt: str | list[int], token_ids: list[int], *, is_whole: bool) -> str:
    """The text of a prompt as far as its tokens were kept."""
    if isinstance(prompt, str) and is_whole:
        return prompt
    tokenizer = state.renderer.tokenizer
    return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)


async def _answer(whole: Completions, headers: dict[str, str]) -> Response:
    choices: list[dict[str, Any]] = []
    async with aclosing(follow(whole.state, whole.job)) as news:
        async for prompt, delta in without_keepalives(news):
            of_prompt = prompt_logprobs(delta.prompt_logprobs) if whole.body.prompt_logprobs is not None else None
            for completion in delta.completions:
                choice = whole.choice(prompt, completion.index).take(completion, delta.prompt_logprobs)
                choices.append(choice if of_prompt is None else choice | {"prompt_logprobs": of_prompt})
    answer = whole.head() | {"choices": sorted(choices, key=lambda choice: choice["index"])}
    return json_response(answer | costs(whole.state, whole.job), headers=headers)


async def _stream(whole: Completions) -> Events:
    state, body, job = whole.state, whole.body, whole.job
    head = whole.head()
    choices = [[whole.choice(prompt, i) for i in range(body.n)] for prompt in range(len(job.prompts))]
    of_prompts: dict[int, Sequence[Alternatives | None]] = {}
    async with aclosing(follow(state, job, state.args.sse_keep_alive_interval or None)) as deltas:
        async for news in deltas:
            if news is None:
                yield KEEP_ALIVE
                continue
            prompt, delta = news
            if delta.prompt_logprobs is not None:
                of_prompts[prompt] = delta.prompt_logprobs
            for completion in delta.completions:
                choice = choices[prompt][completion.index]
                if (held := choice.buffer.push(completion)) is not None:
                    chunk = head | {"choices": [choice.take(held, of_prompts.get(prompt))]}
                    if body.continuous_usage_stats:
                        chunk["usage"] = usage_of(job, with_cached=False)
                    yield event(chunk)
    if body.include_usage or state.args.enable_force_include_usage:
        yield event(head | {"choices": []} | costs(state, job))
    yield DONE
