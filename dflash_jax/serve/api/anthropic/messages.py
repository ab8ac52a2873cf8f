"""`POST /v1/messages` and `/v1/messages/count_tokens`: chats in the form of Anthropic's API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash_jax.serve.answers.chunks import ChunkBuffer
from dflash_jax.serve.answers.events import ChatEvents
from dflash_jax.serve.answers.jobs import follow, without_keepalives
from dflash_jax.serve.answers.requests import response_headers
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.api.anthropic.events import PING, Event, MessageStream, failure, whole_message
from dflash_jax.serve.api.openai.chat import Chat, chat_text, new_chat
from dflash_jax.serve.engine_link.link_messages import RequestDelta
from dflash_jax.serve.http.documented import ANTHROPIC_ERROR, errors, streamed
from dflash_jax.serve.http.errors import request_id_of
from dflash_jax.serve.http.streaming import KEEP_ALIVE, Events, EventStream, json_response, named_event, unless_left
from dflash_jax.serve.protocol import CountTokensRequest, MessagesRequest

logger = logging.getLogger(__name__)


def messages_router(state: ServerState) -> APIRouter:
    """The endpoints of Anthropic's Messages API."""
    router = APIRouter(responses=errors(ANTHROPIC_ERROR))
    logged: set[str] = set()  # types of tools that the log has named; agents send theirs with every request

    def log_skipped(body: CountTokensRequest) -> None:
        skipped = set(body.skipped_tools) - logged
        if skipped and len(logged) < 100:
            logged.update(skipped)
            names = ", ".join(sorted(skipped))[:1000]
            logger.warning("The model will not see tools that only Anthropic has: %s.", names)

    @router.post(
        "/v1/messages", response_model=None, summary="Answer a chat, in Anthropic's form", responses=streamed()
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        log_skipped(body)
        chat = await new_chat(state, body.chat(), request, "msg_")
        request_id = request_id_of(request.scope)
        headers = {"request-id": request_id} | response_headers(state, chat.job)
        if body.stream:
            fails = partial(failure, request_id=request_id)
            return await EventStream.of(_stream(chat), headers, failure=fails)
        return await unless_left(request, _answer(chat, headers))

    @router.post("/v1/messages/count_tokens", response_model=None, summary="Count the tokens of a chat")
    async def count_tokens(body: CountTokensRequest) -> Response:
        state.check_model(body.model)
        log_skipped(body)
        return json_response({"input_tokens": await state.render(lambda: _count(state, body))})

    return router


def _count(state: ServerState, body: CountTokensRequest) -> int:
    tokenizer = state.renderer.need_tokenizer("a chat")
    return len(tokenizer.encode(chat_text(state, body.chat()), add_special_tokens=False))


def _head(chat: Chat) -> Event:
    return {"id": chat.job.id, "type": "message", "role": "assistant", "model": chat.state.model}


async def _answer(chat: Chat, headers: dict[str, str]) -> Response:
    events = chat.events(chat.state.renderer.need_tokenizer("a chat"))
    answer: dict[str, Any] = {}
    async with aclosing(follow(chat.state, chat.job)) as deltas:
        async for _, delta in without_keepalives(deltas):
            for completion in delta.completions:
                answer = whole_message(_head(chat), completion, events.read(completion), chat.job)
    return json_response(answer, headers=headers)


async def _stream(chat: Chat) -> Events:
    """The events of a message. Closing the generator aborts what runs; errors are those of `follow`."""
    state, has_begun = chat.state, False
    stream = MessageStream(_head(chat), chat.job)
    buffer = ChunkBuffer(state.args.stream_interval)
    events = chat.events(state.renderer.need_tokenizer("a chat"))
    async with aclosing(follow(state, chat.job, state.args.sse_keep_alive_interval or None)) as deltas:
        async for prompt_and_delta in deltas:
            if prompt_and_delta is None:
                yield named_event(PING) if has_begun else KEEP_ALIVE
                continue
            _, delta = prompt_and_delta
            if not has_begun:
                has_begun = True
                for event in stream.begin(delta.num_cached_tokens):
                    yield named_event(event)
            for event in _gained(delta, buffer, events, stream):
                yield named_event(event)


def _gained(delta: RequestDelta, buffer: ChunkBuffer, events: ChatEvents, stream: MessageStream) -> Iterator[Event]:
    """The events of a delta of the message's one completion."""
    for held in filter(None, map(buffer.push, delta.completions)):
        event = events.read(held)
        for piece in event.deltas:
            yield from stream.read(piece)
        if event.finish_reason is not None:
            yield from stream.end(held, event.finish_reason)
