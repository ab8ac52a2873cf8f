"""A small OpenAI-compatible server on a real socket with scripted answers."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

DONE = b"data: [DONE]\n\n"
BLOCK = {
    "num_spec_steps": 3,
    "num_draft_tokens": 45,
    "num_accepted_draft_tokens": 7,
    "acceptance_histogram": [1, 0, 1, 0, 0, 1],
}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def text(piece: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None, **fields}])


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


def usage(completion_tokens: int, prompt_tokens: int = 5, **fields: Any) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts | {"total_tokens": prompt_tokens + completion_tokens}, **fields)


@dataclass
class Reply:
    """Pieces of a body, written one by one; with `drops`, the connection breaks off after them."""

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    drops: bool = False
    pause: float = 0.0  # seconds before each piece


GOOD = Reply([text("Hel"), text("lo", finish_reason="length"), usage(4), DONE])


@dataclass
class Mock:
    """The answers to give, and the requests received."""

    reply: Callable[[dict[str, Any], int], Reply] = lambda body, number: GOOD
    metrics: Callable[[], str] = lambda: ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    url: str = ""

    async def complete(self, request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        reply = self.reply(body, len(self.bodies) - 1)
        if reply.status != 200:
            return JSONResponse({"error": {"message": "no", "code": reply.status}}, reply.status)
        return StreamingResponse(self._stream(reply), media_type="text/event-stream")

    async def _stream(self, reply: Reply):
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            for piece in reply.pieces:
                await asyncio.sleep(reply.pause)
                yield piece
            if reply.drops:
                raise ConnectionError("dropped on purpose")
        finally:
            self.active -= 1

    def app(self) -> Starlette:
        async def models(request):
            return JSONResponse({"object": "list", "data": [{"id": "mock"}, {"id": "other"}]})

        async def metrics(request):
            return PlainTextResponse(self.metrics())

        async def version(request):
            return JSONResponse({"version": "1.2.3"})

        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", models),
                Route("/metrics", metrics),
                Route("/version", version),
            ]
        )


@contextmanager
def serving(mock: Mock):
    """The mock on a socket, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    mock.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(mock.app(), log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield mock
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
