"""The `input` of `POST /v1/responses`, as messages of a chat: several items of an assistant become one turn."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.messages import message_content

INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
                    "role": {"enum": ["user", "system", "developer", "assistant"]},
                },
            },
        },
    ]
}
ROLES = ("user", "system", "developer", "assistant")
_SEALED = "dflash:"  # what our own `encrypted_content` begins with; that of other servers is passed over


def seal(text: str) -> str:
    """The `encrypted_content` of reasoning: its text in base64, which a server that stores nothing can read again.

    Some clients send back this field alone, not the text. Nothing in it is secret: they were shown the text.
    """
    return _SEALED + base64.b64encode(text.encode()).decode()


def unseal(content: Any) -> str:
    """The text of an `encrypted_content`; empty if it is not ours."""
    if not isinstance(content, str) or not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""


def check_input(value: Any) -> str | list[dict[str, Any]]:
    """OpenAI's `input`, unchanged: a text, or a list of items.

    Raises:
        APIError: 400; it is neither, or the list is empty.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        return value
    message = f"input={shown(value)} is not allowed: it must be a text, or a list of at least one item."
    raise APIError(message, param="input")


def chat_messages(
    value: str | list[dict[str, Any]], instructions: str | None, flat_name: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """The messages of a chat that `instructions` and `input` stand for.

    Args:
        value: `input`, checked.
        instructions: become a system message in front.
        flat_name: the name that a function has in the chat, from its namespace, which may be empty, and its name.

    Raises:
        APIError: 400; an item is malformed or of a type that is not supported.
    """
    conversation = _Conversation(flat_name)
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for i, item in enumerate(items):
        conversation.take(item, f"input.{i}")
    if not conversation.messages:
        raise APIError("input holds no message: give at least one, such as one of the user.", param="input")
    return conversation.messages


class _Conversation:
    """Reads items one after another.

    Attributes:
        messages: what the items so far make.
    """

    def __init__(self, flat_name: Callable[[str, str], str]):
        self.messages: list[dict[str, Any]] = []
        self._flat_name = flat_name
        self._turn: dict[str, Any] | None = None  # the assistant's last message, while further items may belong to it
        self._readers: Mapping[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def take(self, item: dict[str, Any], path: str) -> None:
        """Read the next item; `path` names it in errors."""
        kind = item.get("type") or ("message" if "role" in item else None)
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if kind == "item_reference":
            raise APIError(
                f"{path}.type='item_reference' is not supported: this server stores no items, send the item itself, "
                "as clients do when they set store=false.",
                param=f"{path}.type",
            )
        if reader is None:
            known = ", ".join(map(repr, self._readers))
            message = f"{path}.type={shown(kind)} is not supported: give items of type {known}."
            raise APIError(message, param=f"{path}.type")
        reader(item, path)

    def _message(self, item: dict[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            allowed = ", ".join(map(repr, ROLES))
            message = f"{path}.role={shown(role)} is not allowed: it must be one of {allowed}."
            raise APIError(message, param=f"{path}.role")
        content = message_content(item.get("content"), f"{path}.content")
        if role == "assistant":
            self._assistant("content")["content"] = content
        else:
            self._end_turn({"role": role, "content": content})

    def _reasoning(self, item: dict[str, Any], path: str) -> None:
        text = _texts(item.get("content"), f"{path}.content") or unseal(item.get("encrypted_content"))
        text = text or _texts(item.get("summary"), f"{path}.summary")
        if text:
            self._assistant("content", "reasoning", "tool_calls")["reasoning"] = text

    def _call(self, item: dict[str, Any], path: str) -> None:
        call_id, name, namespace = _string(item, "call_id", path), _string(item, "name", path), item.get("namespace")
        arguments = item.get("arguments") or "{}"
        try:
            decoded = json.loads(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{path}.arguments={shown(arguments)} is not valid JSON ({error}); correct it."
            raise APIError(message, param=f"{path}.arguments") from error
        if not isinstance(decoded, dict | list):
            message = f"{path}.arguments={shown(arguments)} is not allowed: it must be the text of a JSON object."
            raise APIError(message, param=f"{path}.arguments")
        flat_name = self._flat_name(namespace if isinstance(namespace, str) else "", name)
        call = {"id": call_id, "type": "function", "function": {"name": flat_name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], path: str) -> None:
        call_id, output = _string(item, "call_id", path), message_content(item.get("output"), f"{path}.output")
        self._end_turn({"role": "tool", "tool_call_id": call_id, "content": output})

    def _assistant(self, *before: str) -> dict[str, Any]:
        """The assistant's turn that goes on; a new one if the last has one of these keys already."""
        if self._turn is None or any(key in self._turn for key in before):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn

    def _end_turn(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)


def _string(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        message = f"{path}.{name}={shown(value)} is not allowed: it must be a non-empty string."
        raise APIError(message, param=f"{path}.{name}")
    return value


def _texts(parts: Any, path: str) -> str:
    """The joined texts of the parts of reasoning; empty without parts."""
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        message = f"{path}={shown(parts)} is not allowed: it must be a list of parts with a text."
        raise APIError(message, param=path)
    return "\n".join(part["text"] for part in parts)
