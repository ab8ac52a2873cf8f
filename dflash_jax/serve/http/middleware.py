"""Middleware in front of every route: API keys, and bounds on bodies. Plain ASGI, which does not buffer streams."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.options.serve_args import Limits
from dflash_jax.serve.http.errors import error_response
from dflash_jax.serve.http.page import FILES as PAGE_FILES
from dflash_jax.serve.protocol import APIError

# Paths that need no key: the server's health, and the page, which asks its user for a key.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ping", "/version", "/metrics", "/load"})
LARGE = 1 << 20  # bytes of a body beyond which it is paced: a prompt of 200,000 tokens has as many
LARGE_RATE, LARGE_BURST = 8 << 20, 32 << 20  # bytes a second of all large bodies, and bytes that may come at once
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets in requests that have one of the keys; keys are compared in constant time.

    Args:
        app: what stands behind.
        keys: each lets a request in.
        root_path: what a proxy strips from the paths of URLs.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], root_path: str = ""):
        self._app, self._root_path = app, root_path
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 401."""
        # A proxy may have left its own part of the path in place.
        is_open = scope["type"] != "http" or scope["path"].removeprefix(self._root_path) in OPEN_PATHS
        if not is_open and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            bearer = token if scheme.lower() == "bearer" else ""
            matches = [self._is_key(key.strip()) for key in (bearer, headers.get("x-api-key", ""))]
            if not any(matches):
                error = APIError("this server needs a key; send it as 'Authorization: Bearer KEY' or x-api-key.", 401)
                answer = error_response(scope, error, {"www-authenticate": "Bearer"})
                return await answer(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_key(self, key: str) -> bool:
        key_digest = hashlib.sha256(key.encode()).digest()
        matches = [hmac.compare_digest(key_digest, digest) for digest in self._digests]
        return any(matches)


class HeadAsGet:
    """Answers HEAD, which monitors and balancers send, as GET would be answered, without the body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class WithoutSlash:
    """Serves a path with a slash at its end as the path without it: a redirect would lose TLS behind some proxies.

    Args:
        app: what stands behind.
        root_path: what a proxy strips from the paths of URLs; behind it "/" is a path of its own.
    """

    def __init__(self, app: ASGIApp, root_path: str = ""):
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path = scope["path"].rstrip("/")
            if path.removeprefix(self._root_path):
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class Pace:
    """Bounds how many bytes of large bodies are read a second, all together.

    A body of 16 MiB takes 0.16 s of a core, which the engine may want: a flood of them would cost streams a quarter of
    their speed on two cores. What waits here stays in the client's and the system's buffers.

    Args:
        rate: bytes a second, in the long run.
        burst: bytes that are read at once after a rest.
    """

    def __init__(self, rate: float, burst: float):
        self._rate, self._burst = rate, burst
        self._left, self._time = burst, time.monotonic()

    async def take(self, size: int) -> None:
        """Wait until this many more bytes may be read."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._time) * self._rate) - size
        self._time = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._rate)


class BoundedBody:
    """Refuses bodies that are too large or not JSON, and reads large ones no faster than `Pace` lets it.

    The HTTP protocol bounds the time that a body may take.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits, self._pace = app, limits, Pace(LARGE_RATE, LARGE_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 415 or 413; a body without a declared size gets its 413 while the route reads it."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if (error := self._refusal(headers)) is not None:
            return await error_response(scope, error)(scope, receive, send)
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, headers: Headers) -> APIError | None:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            return APIError(f"the body is compressed (content-encoding: {encoding[:100]}); send it as it is.", 415)
        size, limit = headers.get("content-length", "0"), self._limits.max_request_body_bytes
        if size.isdecimal() and int(size) > limit:
            return APIError(f"the body has {size} bytes, and at most {limit} are allowed; send less.", 413)
        has_body = size != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if has_body and kind != "application/json" and not kind.endswith("+json"):
            return APIError(
                f"Unsupported Media Type: Only 'application/json' is allowed, not {kind[:100]!r}; send the header "
                "'Content-Type: application/json'.",
                415,
            )
        return None

    def _bounded(self, receive: Receive) -> Receive:
        size, limit = 0, self._limits.max_request_body_bytes

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"the body has more than the {limit} bytes that are allowed; send less.")
            if size > LARGE:
                await self._pace.take(len(message.get("body", b"")))
            return message

        return bounded
