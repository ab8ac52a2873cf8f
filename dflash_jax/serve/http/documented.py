"""What /openapi.json says of answers: the statuses and content types that routes have."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Responses = dict[int | str, dict[str, Any]]

_TEXT: dict[str, Any] = {"type": "string"}
OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}
_OF_BODIES = (400, 404, 413, 415, 503)  # besides those of every route: no key (401), and failures of the server


def errors(schema: dict[str, Any] = OPENAI_ERROR, statuses: tuple[int, ...] = _OF_BODIES) -> Responses:
    """The errors of a route; FastAPI would name 422, which this server never answers."""
    content = {"application/json": {"schema": schema}}
    named: Responses = {s: {"description": HTTPStatus(s).phrase, "content": content} for s in statuses}
    return named | {"default": {"description": "Another error", "content": content}}


def streamed() -> Responses:
    """The good answer of a route that answers with JSON, or with events where the body says `"stream": true`."""
    kinds = ("application/json", "text/event-stream")
    return {200: {"description": "The answer", "content": {kind: {} for kind in kinds}}}


def plain(description: str) -> Responses:
    """The good answer of a route that answers with text."""
    return {200: {"description": description, "content": {"text/plain": {"schema": _TEXT}}}}
