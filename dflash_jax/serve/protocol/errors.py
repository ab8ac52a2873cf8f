"""Errors of the API: an HTTP status, and a body for the client, which stays short however long the request was."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dflash_jax.base.errors import DFlashError, EngineDeadError, QueueFullError, RequestError

MOST_ERRORS = 10  # errors that are reported of one body
LONGEST_ECHO = 200  # characters of a value that is shown
LONGEST_PARAM = 100  # characters of a field's path, which may hold keys that the client chose
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
    """An error that the client gets as its answer.

    Attributes:
        message: one sentence, of text that UTF-8 can write.
        status: the HTTP status.
        type: the name of the error, as in vLLM; by default that of the status.
        param: the dotted path of the field that it is about; None if it is about none.
        code: OpenAI's name of the error, where it has one that clients look for; by default the status, as in vLLM.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ):
        self.message = cut(_encodable(message), MOST_ERRORS * LONGEST_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.code = status if code is None else code
        self.type = type or _TYPES.get(status) or _TYPES[400 if status < 500 else 500]
        self.param = None if param is None else cut(_encodable(param), LONGEST_PARAM)


def error_body(error: APIError) -> dict[str, Any]:
    """The JSON body of an error in the form of OpenAI and vLLM."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def of_exception(error: BaseException) -> APIError:
    """The error that a client gets for an exception; a failure of the server shows no detail."""
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
    """The errors of pydantic's `ValidationError.errors()`, or FastAPI's, in sentences; `param` is that of the first."""
    sentences = [cut(_sentence(error), LONGEST_MESSAGE) for error in errors[:MOST_ERRORS]]
    if len(errors) > MOST_ERRORS:
        sentences.append(f"And {len(errors) - MOST_ERRORS} more errors.")
    return APIError(" ".join(sentences), param=(_path(errors[0]) or None) if errors else None)


def shown(value: object) -> str:
    """A value in Python's notation, cut to `LONGEST_ECHO` characters."""
    try:
        return cut(_REPR.repr(value), LONGEST_ECHO)
    except ValueError:  # an integer of more digits than Python converts to text
        return f"<{type(value).__name__}>"


def cut(text: str, length: int) -> str:
    """A text cut to `length` characters, the last three of which are then dots."""
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
    """The dotted path of an error's field, without the "body" that FastAPI begins it with."""
    if error["type"] == "json_invalid":  # its location is an offset in the text
        return ""
    parts = [str(part) for part in error["loc"]]
    return cut(_encodable(".".join(parts[1:] if parts[:1] == ["body"] else parts)), LONGEST_PARAM)


def _encodable(text: str) -> str:
    """A text whose halves of surrogate pairs are escaped, since UTF-8 cannot write them."""
    return text.encode("utf-8", "backslashreplace").decode()
