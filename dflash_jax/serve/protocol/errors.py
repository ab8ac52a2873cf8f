"""Errors as the API has them: an HTTP status, and the body that clients read. Whatever comes in, it is short."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dflash_jax.base.errors import DFlashError, EngineDeadError, QueueFullError, RequestError

MOST_ERRORS = 10  # told of one body
LONGEST_ECHO = 200  # characters of a value that is shown
LONGEST_PARAM = 100  # characters of a field's path; it may hold the client's own keys
LONGEST_MESSAGE = 1000  # characters about one error

_TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_REPR = reprlib.Repr()
_REPR.maxstring = LONGEST_ECHO
_REPR.maxlevel = 3


class APIError(DFlashError):
    """What the client is answered.

    Attributes:
        message: one sentence, of text that UTF-8 can write.
        status: of HTTP.
        type: vLLM's name for it; by default that of the status.
        param: the field it is about, dotted.
    """

    def __init__(self, message: str, status: int = 400, *, type: str | None = None, param: str | None = None):
        self.message = cut(_encodable(message), MOST_ERRORS * LONGEST_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.type = type or _TYPES.get(status) or _TYPES[400 if status < 500 else 500]
        self.param = None if param is None else cut(_encodable(param), LONGEST_PARAM)


def error_body(error: APIError) -> dict[str, Any]:
    """The JSON of an error, as OpenAI and vLLM have it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.status}}


def of_exception(error: BaseException) -> APIError:
    """What a client is told of an exception; nothing of those that are not its own doing."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error.errors(include_url=False, include_context=False))
    if isinstance(error, RequestError):
        return APIError(cut(str(error), LONGEST_MESSAGE))
    if isinstance(error, QueueFullError | EngineDeadError):
        return APIError(cut(str(error), LONGEST_MESSAGE), 503)
    return APIError("the server has failed to serve this request; its log says why.", 500)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """What pydantic found (`ValidationError.errors()`, or FastAPI's), in sentences; `param` is the first's."""
    sentences = [cut(_sentence(error), LONGEST_MESSAGE) for error in errors[:MOST_ERRORS]]
    if len(errors) > MOST_ERRORS:
        sentences.append(f"And {len(errors) - MOST_ERRORS} more errors.")
    return APIError(" ".join(sentences), param=(_path(errors[0]) or None) if errors else None)


def shown(value: object) -> str:
    """A value as Python writes it, in at most `LONGEST_ECHO` characters."""
    try:
        return cut(_REPR.repr(value), LONGEST_ECHO)
    except ValueError:  # an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


def cut(text: str, length: int) -> str:
    """A text of at most this many characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def _sentence(error: Mapping[str, Any]) -> str:
    path, kind, reason = _path(error), error["type"], error["msg"]
    if kind == "missing":
        return f"{path or 'the body'} is missing; give it."
    if kind == "json_invalid":
        return f"the body is not valid JSON ({error.get('ctx', {}).get('error', reason)}); correct it."
    if kind.startswith("model_") and not path:
        return f"the body of type {type(error.get('input')).__name__} is not allowed: it must be a JSON object."
    return f"{path or 'the body'}={shown(error.get('input'))} is not allowed: {reason[:1].lower()}{reason[1:]}."


def _path(error: Mapping[str, Any]) -> str:
    """Where an error is, dotted; FastAPI begins it with "body"."""
    if error["type"] == "json_invalid":  # an offset
        return ""
    parts = [str(part) for part in error["loc"]]
    return cut(_encodable(".".join(parts[1:] if parts[:1] == ["body"] else parts)), LONGEST_PARAM)


def _encodable(text: str) -> str:
    """A text with halves of surrogate pairs spelt out: no JSON could carry them."""
    return text.encode("utf-8", "backslashreplace").decode()
