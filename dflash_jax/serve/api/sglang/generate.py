"""SGLang's native `POST /generate`, by which DFlash's own benchmark reads acceptance."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.base.values import Logprob
from dflash_jax.serve.answers.jobs import Job, follow, without_keepalives
from dflash_jax.serve.answers.logprobs import LEAST
from dflash_jax.serve.answers.requests import encode
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import speculation_of
from dflash_jax.serve.engine_link.link_messages import CompletionDelta, RequestDelta
from dflash_jax.serve.http.streaming import DONE, KEEP_ALIVE, Events, EventStream, event, json_response, unless_left
from dflash_jax.serve.protocol import GenerateRequest, completion_prompts, fit_prompt, generate_sampling_params


class Whole:
    """All that a completion has gained so far: SGLang's chunks repeat it."""

    def __init__(self, state: ServerState, job: Job, prompt: int, rid: str):
        self._state, self._job, self._prompt, self._rid = state, job, prompt, rid
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._rounds: list[tuple[int, int]] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def take(self, completion: CompletionDelta, delta: RequestDelta) -> dict[str, Any]:
        """The answer so far."""
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
            meta["output_token_logprobs"] = [_own(each) for each in self._logprobs]
            meta["output_top_logprobs"] = [_top(each) for each in self._logprobs]
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        if self._prompt_logprobs is not None:
            first, *scored = self._job.prompts[self._prompt][0], *self._prompt_logprobs[1:]
            meta["input_token_logprobs"] = [(None, first, None), *map(_own, filter(None, scored))]
        if self._state.ready.num_speculative_tokens:
            meta |= self._speculation()
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}

    def _speculation(self) -> dict[str, Any]:
        """SGLang's numbers. Clients divide the tokens by `spec_verify_ct`: rounds without drafts count as well."""
        spec = speculation_of(self._rounds, self._state.ready.num_speculative_tokens, with_steps=False)
        num_rounds = sum(emitted > 0 for _, emitted in self._rounds)
        accepted, (none, *some) = spec["num_accepted_draft_tokens"], spec["acceptance_histogram"]
        return {
            "spec_verify_ct": num_rounds,
            "spec_accept_length": 1 + accepted / num_rounds if num_rounds else None,
            "spec_accept_rate": spec["draft_acceptance_rate"],
            "spec_accepted_drafts": accepted,
            "spec_proposed_drafts": spec["num_draft_tokens"],
            "spec_accept_histogram": [none + num_rounds - spec["num_spec_steps"], *some],
        }

    def _finish_reason(self, completion: CompletionDelta) -> dict[str, Any] | None:
        if completion.finish_reason is None:
            return None
        if completion.finish_reason == "length":
            return {"type": "length", "length": len(self._token_ids)}
        matched = {} if completion.stop_reason is None else {"matched": completion.stop_reason}
        return {"type": completion.finish_reason, **matched}


def generate_router(state: ServerState) -> APIRouter:
    """The endpoint of SGLang's clients."""
    router = APIRouter()

    @router.post("/generate", response_model=None, summary="Complete prompts, as SGLang has it")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        state.check_model(body.model)
        job, rids = await _job(state, body)
        if body.stream:
            return await EventStream.of(_stream(state, body, job, rids))
        return await unless_left(request, _answer(state, body, job, rids))

    return router


async def _job(state: ServerState, body: GenerateRequest) -> tuple[Job, list[str]]:
    every_params = generate_sampling_params(body, state.defaults, state.args.limits)
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
        for ids, params in zip(token_ids, every_params, strict=True)
    ]
    rids = body.rid or [uuid.uuid4().hex for _ in fitted]
    return Job(rids[0], rids, fitted, every_params, cache_salt=None, streams=body.stream), rids


async def _answer(state: ServerState, body: GenerateRequest, job: Job, rids: list[str]) -> Response:
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    async with aclosing(follow(state, job)) as news:
        async for prompt, delta in without_keepalives(news):
            for completion in delta.completions:
                whole = Whole(state, job, prompt, rids[prompt])
                answers[prompt, completion.index] = whole.take(completion, delta)
    listed = [answers[key] for key in sorted(answers)]
    is_one = not body.is_batch and job.num_completions == 1
    return json_response(listed[0] if is_one else listed)


async def _stream(state: ServerState, body: GenerateRequest, job: Job, rids: list[str]) -> Events:
    wholes: dict[int, Whole] = {}
    is_one = not body.is_batch and job.num_completions == 1
    async with aclosing(follow(state, job, state.args.sse_keep_alive_interval or None)) as deltas:
        async for news in deltas:
            if news is None:
                yield KEEP_ALIVE
                continue
            prompt, delta = news
            before = sum(params.n for params in job.params[:prompt])
            for completion in delta.completions:
                index = before + completion.index
                whole = wholes.setdefault(index, Whole(state, job, prompt, rids[prompt]))
                yield event(whole.take(completion, delta) | ({} if is_one else {"index": index}))
    yield DONE


def _own(alternatives: dict[int, Logprob]) -> tuple[float, int, str | None]:
    token_id, logprob = next(iter(alternatives.items()))
    return max(logprob.logprob, LEAST), token_id, logprob.decoded_token


def _top(alternatives: dict[int, Logprob]) -> list[tuple[float, int, str | None]]:
    return [(max(each.logprob, LEAST), token_id, each.decoded_token) for token_id, each in alternatives.items()]
