"""Server-sent events, JSON answers, and ending the work for clients that have left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_jax.serve.protocol import APIError, error_body, of_exception

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CLOSED_REQUEST = 499  # nginx's status for the log, when the client has left
Result = TypeVar("Result")
Events = AsyncGenerator[bytes, None]
logger = logging.getLogger(__name__)


def event(body: dict[str, Any]) -> bytes:
    """A JSON object as a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """A JSON object as a server-sent event that has the object's `type` as its name."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)


def error_events(error: APIError) -> list[bytes]:
    """The end of a stream that has failed, as OpenAI's older APIs send it."""
    return [event(error_body(error)), DONE]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class EventStream(StreamingResponse):
    """A response of server-sent events.

    However the response ends, even before it begins, the events' generator is closed, which aborts what runs. An
    exception becomes the last events, since the status has been sent already.

    Args:
        first: the first event; None if there are none.
        rest: further events.
        headers: of the response.
        failure: makes the last events of an error.
    """

    def __init__(
        self,
        first: asyncio.Future[bytes | None],
        rest: Events,
        headers: dict[str, str] | None = None,
        failure: Callable[[APIError], Iterable[bytes]] = error_events,
    ):
        self._first, self._rest, self._failure = first, rest, failure
        self._body = self._events()
        no_buffers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._body, headers=no_buffers | (headers or {}), media_type="text/event-stream")

    @classmethod
    async def of(
        cls,
        events: Events,
        headers: dict[str, str] | None = None,
        patience: float = 1.0,
        failure: Callable[[APIError], Iterable[bytes]] = error_events,
    ) -> EventStream:
        """A response that begins when the first event has come, or after `patience` seconds without one.

        So a request that is refused at once gets the status of its error.

        Raises:
            Exception: the generator raised it before the first event.
        """
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({first}, timeout=patience)
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            raise
        return cls(first, events, headers, failure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close their generator."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()
            self._first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._first
            await self._rest.aclose()

    async def _events(self) -> Events:
        try:
            if (first := await self._first) is not None:
                yield first
            async for further in self._rest:
                yield further
        except Exception as error:
            api_error = of_exception(error)
            if api_error.status == 500:
                logger.exception("a stream has failed")
            for last in self._failure(api_error):
                yield last


async def unless_left(request: Request, answer: Awaitable[Result]) -> Result | Response:
    """The answer; when its client leaves first, the answer is cancelled, and the response has status 499."""
    task = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLOSED_REQUEST)
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
