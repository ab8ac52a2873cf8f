"""What stands before every route: keys, and bounds on bodies. Plain ASGI, which leaves streams alone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.options.serve_args import Limits
from dflash_jax.serve.http.page import FILES as PAGE_FILES
from dflash_jax.serve.http.streaming import json_response
from dflash_jax.serve.protocol import APIError, error_body

# What needs no key: whether the server is well, and the page, which asks for one.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ping", "/version", "/metrics", "/load"})
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets in who has a key. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], root_path: str = ""):
        self._app, self._root_path = app, root_path
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 401."""
        # A proxy may have left its own part of the path in place.
        is_open = scope["type"] != "http" or scope["path"].removeprefix(self._root_path) in OPEN_PATHS
        if not is_open and scope["method"] != "OPTIONS":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode()).digest()
            known = [hmac.compare_digest(given, digest) for digest in self._digests]
            if scheme.lower() != "bearer" or not any(known):
                error = APIError("this server needs a key; send it as 'Authorization: Bearer KEY'.", 401)
                answer = json_response(error_body(error), 401, {"www-authenticate": "Bearer"})
                return await answer(scope, receive, send)
        await self._app(scope, receive, send)


class BoundedBody:
    """Lets no body be larger than it may, and takes JSON alone. How long a body takes, the protocol bounds."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or answer 415 or (here, or by the route that reads the body) 413."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if (error := self._refusal(headers)) is not None:
            return await json_response(error_body(error), error.status)(scope, receive, send)
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
        size, most = 0, self._limits.max_request_body_bytes

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, f"the body has more than the {most} bytes that are allowed; send less.")
            return message

        return bounded
