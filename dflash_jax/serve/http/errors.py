"""Errors as answers, in the form of the API that the client speaks."""

from __future__ import annotations

import uuid

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import Scope

from dflash_jax.serve.http.streaming import json_response
from dflash_jax.serve.protocol import APIError, anthropic_error_body, error_body


def error_response(scope: Scope, error: APIError, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that is refused or has failed; `scope` is the request's."""
    if "/v1/messages/" not in f"{scope['path']}/":  # a proxy may have left its own part of the path in place
        return json_response(error_body(error), error.status, headers)
    request_id = request_id_of(scope)
    answer_headers = {"request-id": request_id} | (headers or {})
    return json_response(anthropic_error_body(error, request_id), error.status, answer_headers)


def request_id_of(scope: Scope) -> str:
    """The X-Request-Id of a request, or a new id where it has none that a header of the answer may hold."""
    header = Headers(scope=scope).get("x-request-id", "")
    return header if header and header.isascii() and header.isprintable() else f"req_{uuid.uuid4().hex}"
