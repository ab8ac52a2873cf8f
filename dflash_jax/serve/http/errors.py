"""Errors as answers, in the form of the API that the client speaks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import Scope

from dflash_jax.serve.http.streaming import json_response
from dflash_jax.serve.protocol import APIError, anthropic_error_body, error_body
from dflash_jax.serve.protocol.errors import shown


def error_response(scope: Scope, error: APIError, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that is refused or has failed; `scope` is the request's."""
    if "/v1/messages/" not in f"{scope['path']}/":  # a proxy may have left its own part of the path in place
        return json_response(error_body(error), error.status, headers)
    request_id = request_id_of(scope)
    answer_headers = {"request-id": request_id} | (headers or {})
    return json_response(anthropic_error_body(error, request_id), error.status, answer_headers)


def not_served(path: str, served: Iterable[str]) -> str:
    """The sentence about a path that is not served: most are base URLs with a part too many or too few.

    Args:
        path: of the request.
        served: paths that are.
    """
    for known in sorted(served, key=len, reverse=True):
        if known.startswith("/v1/") and path.endswith(known.removeprefix("/v1")):
            base = "http://HOST:PORT" if known.startswith("/v1/messages") else "http://HOST:PORT/v1"
            return f"{shown(path)} is not served: use {known}, so a client's base URL must be {base} and nothing more."
    if path.rstrip("/").endswith("/v1"):
        return f"{shown(path)} is a base URL and no endpoint: use a path below it, such as /v1/chat/completions."
    return f"{shown(path)} is not served: use /v1/chat/completions, or another path that the documentation lists."


def request_id_of(scope: Scope) -> str:
    """The X-Request-Id of a request, or a new id where it has none that a header of the answer may hold."""
    header = Headers(scope=scope).get("x-request-id", "")
    return header if header and header.isascii() and header.isprintable() else f"req_{uuid.uuid4().hex}"
