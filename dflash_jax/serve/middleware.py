"""What stands before every route: keys, and bounds on bodies. Plain ASGI, which leaves streams alone."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.serve.args import Limits
from dflash_jax.serve.protocol import APIError, error_body
from dflash_jax.serve.streaming import json_response

# What needs no key: whether the server is well, and the page, which asks for one.
OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/health", "/ping", "/version", "/metrics", "/load"})
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets in who has a key. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode()).digest()
            known = [hmac.compare_digest(given, digest) for digest in self._digests]
            if scheme.lower() != "bearer" or not any(known):
                error = APIError("this server needs a key; send it as 'Authorization: Bearer KEY'.", 401)
                answer = json_response(error_body(error), 401, {"www-authenticate": "Bearer"})
                return await answer(scope, receive, send)
        await self._app(scope, receive, send)


class BoundedBody:
    """Lets no body be larger, or take longer, than it may, and takes JSON alone."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 413, 415 or (by the route that reads the body) 408."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if (error := self._refusal(headers)) is not None:
            answer = json_response(error_body(error), error.status, {"connection": "close"})
            return await answer(scope, receive, send)
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, headers: Headers) -> APIError | None:
        size, most = headers.get("content-length", "0"), self._limits.max_request_body_bytes
        if size.isdecimal() and int(size) > most:
            return APIError(f"the body has {size} bytes, and at most {most} are allowed; send less.", 413)
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json") and size != "0":
            return APIError(f"Unsupported Media Type: Only 'application/json' is allowed, not {kind[:100]!r}.", 415)
        return None

    def _bounded(self, receive: Receive) -> Receive:
        size, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._limits.request_body_timeout

        async def bounded() -> Message:
            nonlocal size, is_whole
            if is_whole:  # what comes now is the end of the connection, whenever that may be
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                seconds = self._limits.request_body_timeout
                raise HTTPException(408, f"the body has not come within {seconds:g} s; send it faster.") from None
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            most = self._limits.max_request_body_bytes
            if size > most:
                raise HTTPException(413, f"the body has more than the {most} bytes that are allowed; send less.")
            return message

        return bounded
