"""The messages of a chat in the form that chat templates read, which is vLLM's, and the refusals of others."""

from __future__ import annotations

import json
from typing import Any

from dflash_jax.serve.protocol.errors import APIError, shown

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_UNSERVED = {  # keys of a message that are refused, and what to do instead
    "function_call": "use tool_calls, which has replaced it",
    "audio": "give text, this server reads nothing else",
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {"type": ["string", "array", "null"], "items": {"type": ["object", "string"]}},
            "name": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
        },
    },
}


def template_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages for the template, with every key that is not null.

    `content` becomes a string, empty if there is none; several parts become a list of `{"type": "text", "text": ...}`,
    which `ChatTemplate` joins where the template reads strings. The reasoning of an assistant is given under both
    `reasoning` and `reasoning_content`. The arguments of tool calls are decoded.

    Raises:
        APIError: 400; there is no message, or one is malformed or of a kind that is not supported.
    """
    if not isinstance(messages, list) or not messages:
        raise APIError(
            f"messages={shown(messages)} is not allowed: it must be a list of at least one message.", param="messages"
        )
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise APIError(f"{path}={shown(message)} is no message: give {{'role': ..., 'content': ...}}.", param=path)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        message_ = f"{path}.role={shown(role)} is not allowed: it must be a string such as 'user' or 'assistant'."
        raise APIError(message_, param=f"{path}.role")
    for key, advice in _UNSERVED.items():
        if message.get(key):
            raise APIError(f"{path}.{key} is not supported: {advice}.", param=f"{path}.{key}")
    kept = {key: value for key, value in message.items() if value is not None and key not in _UNSERVED}
    kept["content"] = message_content(message.get("content"), f"{path}.content")
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(kept.get(key, ""), str):
            message_ = f"{path}.{key}={shown(kept[key])} is not allowed: it must be a string."
            raise APIError(message_, param=f"{path}.{key}")
    reasoning = kept.get("reasoning") or kept.get("reasoning_content")
    if role == "assistant" and reasoning is not None:
        kept["reasoning"] = kept["reasoning_content"] = reasoning
    calls = kept.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        message_ = f"{path}.tool_calls={shown(calls)} is not allowed: it must be a list of calls."
        raise APIError(message_, param=f"{path}.tool_calls")
    if calls:
        kept["tool_calls"] = [_tool_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(calls)]
    return kept


def message_content(content: Any, path: str) -> str | list[dict[str, str]]:
    """The `content` of a message as `template_messages` gives it; `path` names it in errors.

    Raises:
        APIError: 400; it is neither a text nor a list of parts that are text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_part(part, f"{path}.{i}") for i, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
    raise APIError(f"{path}={shown(content)} is not allowed: it must be a text, or a list of parts.", param=path)


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise APIError(f"{path}={shown(part)} is no part: give {{'type': 'text', 'text': ...}}.", param=path)
    kind = part.get("type") or "text"
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise APIError(
            f"{path}.type={shown(kind)} is not supported: give parts of type 'text', this server reads nothing else.",
            param=f"{path}.type",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        name = f"{path}.{TEXT_PARTS[kind]}"
        raise APIError(f"{name}={shown(text)} is not allowed: it must be a string.", param=name)
    return text


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """A tool call with decoded arguments, as templates expect them; as in vLLM, a call without arguments gets `{}`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise APIError(
            f"{path}={shown(call)} is no tool call: "
            "give {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': '...'}}.",
            param=path,
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise APIError(
                f"{path}.function.arguments={shown(arguments)} is not valid JSON ({error}); correct it.",
                param=f"{path}.function.arguments",
            ) from error
    if not isinstance(arguments, dict | list):
        raise APIError(
            f"{path}.function.arguments={shown(arguments)} is not allowed: it must be the text of a JSON object.",
            param=f"{path}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}
