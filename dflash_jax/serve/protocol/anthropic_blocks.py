"""Anthropic's messages, made of content blocks, in the form of OpenAI's, which chat templates read."""

from __future__ import annotations

from typing import Any

from dflash_jax.serve.protocol.errors import APIError, shown

# Claude Code's first system block; its content differs from turn to turn, and would change the prompt's beginning.
BILLING_HEADER = "x-anthropic-billing-header"
CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
        },
    ]
}
Block = dict[str, Any]


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages in OpenAI's form.

    Text blocks are joined: an assistant's as they are, others by newlines, since templates would write them one right
    behind the other. A tool_use becomes a tool call, a tool_result a message of role "tool" at its place, thinking the
    assistant's reasoning. What Anthropic has redacted cannot be read, and is left out.

    Raises:
        APIError: 400; there is no message, or one is malformed or has a block of a kind that is not supported.
    """
    if not isinstance(messages, list) or not messages:
        raise APIError(
            f"messages={shown(messages)} is not allowed: it must be a list of at least one message.", param="messages"
        )
    return [turn for i, message in enumerate(messages) for turn in _turns(message, f"messages.{i}")]


def system_text(system: Any, path: str = "system") -> str:
    """The text of a system prompt, without Claude Code's billing header.

    Raises:
        APIError: 400; it is neither a string nor a list of text blocks.
    """
    texts = []
    for block, place in _blocks(system, path):
        if block["type"] != "text":
            raise _unserved(block["type"], place, "text")
        text = _string(block, "text", place)
        texts.append(text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text)
    return "\n".join(filter(None, texts))


def _turns(message: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        raise APIError(f"{path}={shown(message)} is no message: give {{'role': ..., 'content': ...}}.", param=path)
    role, content, path_ = message.get("role"), message.get("content"), f"{path}.content"
    if role == "assistant":
        return [_assistant(content, path_)]
    if role == "user":
        return _user(content, path_)
    if role == "system":
        return [{"role": "system", "content": system_text(content, path_)}]
    raise APIError(
        f"{path}.role={shown(role)} is not allowed: it must be 'user', 'assistant' or 'system'.", param=f"{path}.role"
    )


def _assistant(content: Any, path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, place in _blocks(content, path):
        match block["type"]:
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, place))
            case kind:
                raise _unserved(kind, place, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(content: Any, path: str) -> list[dict[str, Any]]:
    """A message for each tool result, and one for the texts before, between and behind them."""
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    for block, place in _blocks(content, path):
        match block["type"]:
            case "text":
                texts.append(_string(block, "text", place))
            case "tool_result":
                if texts:
                    turns.append({"role": "user", "content": "\n".join(texts)})
                    texts = []
                turns.append(_tool_result(block, place))
            case kind:
                raise _unserved(kind, place, "text and tool_result")
    if texts or not turns:
        turns.append({"role": "user", "content": "\n".join(texts)})
    return turns


def _tool_result(block: Block, path: str) -> dict[str, Any]:
    texts = []
    for part, place in _blocks(block.get("content") or "", f"{path}.content"):
        match part["type"]:
            case "text":
                texts.append(_string(part, "text", place))
            case "tool_reference":  # Claude Code's search for tools has found one, which `tools` has from now on
                texts.append(f"The tool {_string(part, 'tool_name', place)} can be called now.")
            case kind:
                raise _unserved(kind, place, "text")
    text = "\n".join(texts)
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", path),
        "content": f"Error: {text}" if block.get("is_error") else text,  # no chat template knows is_error
    }


def _call(block: Block, path: str) -> dict[str, Any]:
    name, arguments = _string(block, "name", path), block.get("input") or {}
    if not name or not isinstance(arguments, dict):
        at = f"{path}.input" if name else f"{path}.name"
        wrong = shown(arguments if name else name)
        raise APIError(f"{at}={wrong} is not allowed: give a tool's name, and an object as its input.", param=at)
    return {
        "id": _string(block, "id", path),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _blocks(content: Any, path: str) -> list[tuple[Block, str]]:
    """The blocks of a content, each with its path; a string is one block of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    if not isinstance(content, list):
        raise APIError(f"{path}={shown(content)} is not allowed: it must be a text, or a list of blocks.", param=path)
    blocks = [(block, f"{path}.{i}") for i, block in enumerate(content)]
    for block, place in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise APIError(f"{place}={shown(block)} is no block: give {{'type': 'text', 'text': ...}}.", param=place)
    return blocks


def _string(block: Block, key: str, path: str) -> str:
    value = block.get(key)
    if isinstance(value, str):
        return value
    at = f"{path}.{key}"
    raise APIError(f"{at}={shown(value)} is not allowed: it must be a string.", param=at)


def _unserved(kind: str, path: str, served: str) -> APIError:
    return APIError(
        f"{path}.type={shown(kind)} is not supported: give blocks of type {served}, this server reads nothing else.",
        param=f"{path}.type",
    )
