"""SGLang's native `POST /generate`, from which DFlash's own benchmark reads acceptance."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.base.outputs import Logprob
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import LOWEST
from dflash_jax.serve.answers.requests import encode, session_of
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import sglang_speculation_of
from dflash_jax.serve.api.streams import stream
from dflash_jax.serve.engine_link.link_messages import CompletionDelta, RequestDelta
from dflash_jax.serve.http.documented import errors, streamed
from dflash_jax.serve.http.streaming import Events, EventStream, json_response, unless_left
from dflash_jax.serve.protocol import GenerateRequest, completion_prompts, fit_prompt, generate_sampling_params

TokenLogprob = tuple[float | None, int, str | None]  # log-probability, id and text of a token


class Answer:
    """The answer, in SGLang's format, to one completion while it comes; each chunk repeats all that came before."""

    def __init__(self, state: ServerState, body: GenerateRequest, job: Job, prompt: int, rid: str):
        self._state, self._job, self._prompt, self._rid = state, job, prompt, rid
        self._num_top, self._first_scored = body.top_logprobs_num, body.logprob_start_len
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._rounds: list[tuple[int, int]] = []

    def take(self, completion: CompletionDelta, delta: RequestDelta) -> dict[str, Any]:
        """The answer so far, after a delta of the completion and of its request."""
        self._text += completion.text
        self._token_ids += completion.token_ids
        self._rounds += completion.rounds
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": self._finish_reason(completion),
            "prompt_tokens": len(self._job.prompts[self._prompt]),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": delta.num_cached_tokens,
            "e2e_latency": time.perf_counter() - self._job.started,
        }
        if completion.logprobs is not None:
            self._logprobs += completion.logprobs
            meta["output_token_logprobs"] = [_chosen(alternatives) for alternatives in self._logprobs]
            if self._num_top:
                meta["output_top_logprobs"] = [self._top(alternatives) for alternatives in self._logprobs]
        if self._prompt in self._job.prompt_logprobs:
            meta |= self._input_logprobs()
        meta |= sglang_speculation_of(self._rounds, self._state.ready.num_speculative_tokens)
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}

    def _input_logprobs(self) -> dict[str, Any]:
        """Log-probabilities of the prompt's tokens from `logprob_start_len` on. As in SGLang, the first has none."""
        token_ids, scores = self._job.prompts[self._prompt], self._job.prompt_logprobs[self._prompt]
        start = self._first_scored
        scored = [alternatives for alternatives in scores[start + 1 :] if alternatives is not None]
        unscored = [(None, token_id, None) for token_id in token_ids[start : start + 1]]
        meta = {"input_token_logprobs": [*unscored, *map(_chosen, scored)]}
        if not self._num_top:
            return meta
        return meta | {"input_top_logprobs": [*(None for _ in unscored), *map(self._top, scored)]}

    def _top(self, alternatives: dict[int, Logprob]) -> list[TokenLogprob]:
        """The likeliest tokens, the best first; the token itself is among them only if it is one of them."""
        by_rank = sorted(alternatives.items(), key=lambda item: item[1].rank)
        return [_triple(*item) for item in by_rank[: self._num_top]]

    def _finish_reason(self, completion: CompletionDelta) -> dict[str, Any] | None:
        if completion.finish_reason is None:
            return None
        if completion.finish_reason == "length":
            return {"type": "length", "length": len(self._token_ids)}
        matched = {} if completion.stop_reason is None else {"matched": completion.stop_reason}
        return {"type": completion.finish_reason, **matched}


def generate_router(state: ServerState) -> APIRouter:
    """The endpoint of SGLang's clients."""
    router = APIRouter(responses=errors())

    @router.post("/generate", response_model=None, summary="Complete prompts, as SGLang has it", responses=streamed())
    async def generate(body: GenerateRequest, request: Request) -> Response:
        state.check_model(body.model)
        job, rids = await _job(state, body)
        job.session = session_of(request)
        if body.stream:
            return await EventStream.of(_stream(state, body, job, rids))
        return await unless_left(request, _answer(state, body, job, rids))

    return router


async def _job(state: ServerState, body: GenerateRequest) -> tuple[Job, list[str]]:
    params_of_prompts = generate_sampling_params(body, state.defaults, state.args.limits, state.most_tokens)
    prompts = completion_prompts(body, state.args.limits)
    token_ids = await state.render(
        lambda: [p if isinstance(p, list) else encode(state, p, "a text prompt") for p in prompts]
    )
    fitted = [
        fit_prompt(
            ids,
            truncate_prompt_tokens=None,
            max_tokens=params.max_tokens,
            max_model_len=state.ready.max_model_len,
        )
        for ids, params in zip(token_ids, params_of_prompts, strict=True)
    ]
    rids = body.rid or [uuid.uuid4().hex for _ in fitted]
    demands = [demand for sampling in body.sampling_params for demand in sampling.demands()]
    constraint = f"sampling_params.{demands[0].place}" if demands else None
    return Job(rids[0], rids, fitted, params_of_prompts, None, body.stream, constraint), rids


async def _answer(state: ServerState, body: GenerateRequest, job: Job, rids: list[str]) -> Response:
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    async with aclosing(follow(state, job)) as deltas:
        async for prompt, delta in without_keepalives(deltas):
            for completion in delta.completions:
                answer = Answer(state, body, job, prompt, rids[prompt])
                answers[prompt, completion.index] = answer.take(completion, delta)
    listed = [answers[key] for key in sorted(answers)]
    return json_response(listed[0] if _is_single(body, job) else listed)


def _stream(state: ServerState, body: GenerateRequest, job: Job, rids: list[str]) -> Events:
    answers: dict[int, Answer] = {}

    def render(prompt: int, delta: RequestDelta) -> Iterator[dict[str, Any]]:
        before = sum(params.n for params in job.params[:prompt])
        for completion in delta.completions:
            index = before + completion.index
            answer = answers.setdefault(index, Answer(state, body, job, prompt, rids[prompt]))
            yield answer.take(completion, delta) | ({} if _is_single(body, job) else {"index": index})

    return stream(state, job, render)


def _is_single(body: GenerateRequest, job: Job) -> bool:
    """Whether the answer is an object and not a list."""
    return not body.is_batch and job.num_completions == 1


def _chosen(alternatives: dict[int, Logprob]) -> TokenLogprob:
    """The token itself, which is the first of its alternatives."""
    return _triple(*next(iter(alternatives.items())))


def _triple(token_id: int, score: Logprob) -> TokenLogprob:
    return max(score.logprob, LOWEST), token_id, score.decoded_token
