"""`POST /v1/responses`: OpenAI's newer API, served as a chat. Nothing is stored."""

from __future__ import annotations

import collections
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import ChunkBuffer
from dflash_jax.serve.answers.jobs import follow, without_keepalives
from dflash_jax.serve.answers.requests import response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import metrics_of, usage_of
from dflash_jax.serve.api.openai.chat import Chat, new_chat
from dflash_jax.serve.api.openai.responses_events import ResponseEvents
from dflash_jax.serve.http.documented import errors, streamed
from dflash_jax.serve.http.streaming import KEEP_ALIVE, Events, EventStream, json_response, named_event, unless_left
from dflash_jax.serve.protocol import ResponsesRequest
from dflash_jax.serve.protocol.response_tools import Toolbox
from dflash_jax.serve.protocol.responses import SEALED_REASONING

MOST_NAMED = 20  # types of tools that the log names, as clients choose them
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Answer:
    """A response that is being made: its chat, and what the chat's events become."""

    chat: Chat
    events: ResponseEvents


def responses_router(state: ServerState) -> APIRouter:
    """The endpoint of responses."""
    router = APIRouter(responses=errors())
    skipped: set[str] = set()  # types of tools that the log has named

    @router.post(
        "/v1/responses",
        response_model=None,
        summary="Answer a conversation, as OpenAI's Responses API",
        responses=streamed(),
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        toolbox = Toolbox.of(body.tools)
        for kind in sorted(toolbox.skipped - skipped)[: MOST_NAMED - len(skipped)]:
            skipped.add(kind)
            logger.warning("tools of type %.100r are passed over: only functions are served", kind)
        answer = await _answer(state, body, toolbox, request)
        headers = response_headers(state, answer.chat.job)
        if body.stream:
            return await EventStream.of(
                _stream(answer), headers, failure=lambda error: map(named_event, answer.events.fail(error))
            )
        return await unless_left(request, _whole(answer, headers))

    return router


async def _answer(state: ServerState, body: ResponsesRequest, toolbox: Toolbox, request: Request) -> Answer:
    chat = await new_chat(state, body.chat(toolbox), request, "resp_")
    params = chat.job.params[0]
    response = body.echo() | {
        "id": chat.job.id,
        "object": "response",
        "created_at": chat.job.created,
        "completed_at": None,
        "model": state.model,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "error": None,
        "incomplete_details": None,
        "usage": None,
    }
    return Answer(chat, ResponseEvents(response, toolbox.origins, is_sealed=SEALED_REASONING in body.include))


async def _whole(answer: Answer, headers: dict[str, str]) -> Response:
    chat = answer.chat
    reader = chat.events(chat.state.renderer.need_tokenizer("a response"))
    finish_reason = ""
    async with aclosing(follow(chat.state, chat.job)) as deltas:
        async for _, delta in without_keepalives(deltas):
            for completion in delta.completions:
                chat_event = reader.read(completion)
                finish_reason = chat_event.finish_reason or finish_reason
                collections.deque(answer.events.read(chat_event), maxlen=0)  # the response alone is wanted
    *_, last = answer.events.end(finish_reason, _at_the_end(chat))
    return json_response(last["response"], headers=headers)


async def _stream(answer: Answer) -> Events:
    """The events of a response; none before the engine has taken it, so that a refusal has the status of its error."""
    chat, events = answer.chat, answer.events
    reader = chat.events(chat.state.renderer.need_tokenizer("a response"))
    buffer = ChunkBuffer(chat.state.args.stream_interval)
    finish_reason = ""
    async with aclosing(follow(chat.state, chat.job, chat.state.args.sse_keep_alive_interval or None)) as deltas:
        async for prompt_and_delta in deltas:
            for event in events.begin():
                yield named_event(event)
            if prompt_and_delta is None:
                yield KEEP_ALIVE
                continue
            for completion in prompt_and_delta[1].completions:
                if (held := buffer.push(completion)) is not None:
                    chat_event = reader.read(held)
                    finish_reason = chat_event.finish_reason or finish_reason
                    for event in events.read(chat_event):
                        yield named_event(event)
    for event in events.end(finish_reason, _at_the_end(chat)):
        yield named_event(event)


def _at_the_end(chat: Chat) -> dict[str, Any]:
    """The fields of a response that are known at its end."""
    job, state = chat.job, chat.state
    usage = usage_of(job, with_cached=True, with_reasoning=True)
    metrics = metrics_of(job, state.args.per_request_spec_decode_metrics, state.ready.num_speculative_tokens)
    return {
        "completed_at": int(time.time()),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        },
    } | ({} if metrics is None else {"metrics": metrics})
