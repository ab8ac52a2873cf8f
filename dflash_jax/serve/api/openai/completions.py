"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import TokenSources
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import TextOffsets, TokenTexts, completion_logprobs, prompt_logprobs
from dflash_jax.serve.answers.requests import encode, log_request, new_job, rendered_prompts, response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import costs
from dflash_jax.serve.api.streams import head_of, openai_stream
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.http.documented import errors, streamed
from dflash_jax.serve.http.streaming import Events, EventStream, json_response, unless_left
from dflash_jax.serve.protocol import CompletionRequest, completion_prompts, sampling_params


@dataclass(eq=False)
class Completions:
    """Prompts that are being completed; `texts` are those of the prompts if they are echoed, else empty."""

    state: ServerState
    body: CompletionRequest
    job: Job
    texts: list[str]


class Choice:
    """The choice, in OpenAI's format, of one completion of one prompt while it comes."""

    def __init__(self, completions: Completions, prompt: int, index: int):
        body = completions.body
        self._body = body
        self._index = prompt * body.n + index
        self._prompt, self._prompt_text = completions.job.prompts[prompt], completions.texts[prompt]
        self._has_begun = False
        self._job, self._number = completions.job, prompt
        tokenizer = completions.state.renderer.tokenizer
        self._texts = TokenTexts(tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._prompt_offsets = TextOffsets(tokenizer, text=self._prompt_text)
        self._offsets = TextOffsets(
            tokenizer,
            start=len(self._prompt_text),
            prompt=self._prompt,
            skip_special_tokens=body.skip_special_tokens,
        )
        self._sources = TokenSources(tokenizer, self._prompt) if body.return_token_sources and tokenizer else None

    def take(self, completion: CompletionDelta) -> dict[str, Any]:
        """The choice that holds a delta; the first holds the prompt too if that is echoed."""
        body = self._body
        text, token_ids, scores = completion.text, completion.token_ids, completion.logprobs
        if body.is_echo_only:
            text, token_ids, scores = "", [], None if scores is None else []
        echoed = self._prompt if body.echo and not self._has_begun else []
        if echoed:
            text = self._prompt_text + text
        choice: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
        if scores is not None:
            known = self._job.prompt_logprobs.get(self._number, [])[: len(echoed)]
            unknown = [None] * (len(echoed) - len(known))  # an aborted prompt may lack some
            offsets = self._prompt_offsets.of(echoed) + self._offsets.of(token_ids)
            choice["logprobs"] = completion_logprobs(
                [*known, *unknown, *scores], [*echoed, *token_ids], self._texts, offsets
            )
        if completion.finish_reason is not None:
            reason = "length" if body.is_echo_only else completion.finish_reason
            choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if not self._has_begun:
                choice["prompt_token_ids"] = self._prompt
        if self._sources is not None and not body.is_echo_only:
            choice["tokens"] = self._sources.of(completion)
        self._has_begun = True
        return choice


def completions_router(state: ServerState) -> APIRouter:
    """The endpoint of completions."""
    router = APIRouter(responses=errors())

    @router.post("/v1/completions", response_model=None, summary="Complete prompts", responses=streamed())
    async def complete(body: CompletionRequest, request: Request) -> Response:
        completions = await _completions(state, body, request)
        headers = response_headers(state, completions.job)
        if body.stream:
            return await EventStream.of(_stream(completions), headers)
        return await unless_left(request, _answer(completions, headers))

    @router.post("/v1/completions/render", response_model=None, summary="What prompts would ask of the engine")
    async def render(body: CompletionRequest, request: Request) -> Response:
        return json_response(rendered_prompts(state, (await _completions(state, body, request)).job))

    return router


async def _completions(state: ServerState, body: CompletionRequest, request: Request) -> Completions:
    state.check_model(body.model)
    params = sampling_params(body, state.defaults, state.args.limits, state.most_tokens)
    prompts = completion_prompts(body, state.args.limits)
    token_ids = await state.render(lambda: [_token_ids(state, body, prompt) for prompt in prompts])
    job = new_job(state, body, request, "cmpl-", token_ids, params)
    job.is_echo_only = body.is_echo_only
    log_request(state, job, prompts[0] if isinstance(prompts[0], str) else None)
    texts = [""] * len(prompts)
    if body.echo:
        texts = await state.render(
            lambda: [
                _text(state, prompt, kept, is_whole=len(kept) == len(encoded))
                for prompt, kept, encoded in zip(prompts, job.prompts, token_ids, strict=True)
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
    """The text of the tokens that were kept of a prompt; empty without a tokenizer."""
    if isinstance(prompt, str) and is_whole:
        return prompt
    tokenizer = state.renderer.tokenizer
    return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)


async def _answer(completions: Completions, headers: dict[str, str]) -> Response:
    state, body, job = completions.state, completions.body, completions.job
    choices: list[dict[str, Any]] = []
    async with aclosing(follow(state, job)) as deltas:
        async for prompt, delta in without_keepalives(deltas):
            scores = {}
            if body.prompt_logprobs is not None and prompt in job.prompt_logprobs:
                scores = {"prompt_logprobs": prompt_logprobs(job.prompt_logprobs[prompt])}
            for completion in delta.completions:
                choices.append(Choice(completions, prompt, completion.index).take(completion) | scores)
    answer = head_of(state, job, "text_completion") | {"choices": sorted(choices, key=lambda choice: choice["index"])}
    answer |= costs(state, job, with_meta_info=body.return_meta_info)
    return json_response(answer, headers=headers)


def _stream(completions: Completions) -> Events:
    state, body, job = completions.state, completions.body, completions.job
    choices = [[Choice(completions, prompt, i) for i in range(body.n)] for prompt in range(len(job.prompts))]

    def render(prompt: int, completion: CompletionDelta) -> Iterator[dict[str, Any]]:
        yield {"choices": [choices[prompt][completion.index].take(completion)]}

    return openai_stream(state, body, job, head_of(state, job, "text_completion"), render)
