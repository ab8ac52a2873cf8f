"""The tool calls of Qwen3-Coder and of Qwen3.5 and later: tags for the function and for each of its parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from dflash_jax.text.parsing.json_scanner import Malformed
from dflash_jax.text.parsing.readers import END_TOOL_CALL, TOOL_CALL, CallWriter, Reader, Reading, one_of, overlap
from dflash_jax.text.parsing.schema import STRING, ParameterTypes, typed_json

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_END_VALUE = "\n" + END_PARAMETER  # the newline before the tag is markup; others belong to the value


def qwen3_coder(types: Mapping[str, ParameterTypes], opened_by: str) -> Reader:
    """A reader of the text behind the opening tag.

    Models are known to leave out `<tool_call>`, so `<function=` opens a call too, and `</tool_call>` may be missing. A
    parameter that no schema describes is a string. Strings stream; other values leave when they are complete.

    Args:
        types: JSON types of the parameters of each tool, by the tool's name.
        opened_by: the opening tag.
    """

    def read(calls: CallWriter) -> Reading[None]:
        calls.begin()
        if opened_by == TOOL_CALL:
            yield from one_of(FUNCTION)
        name = yield from _attribute()
        schema = types.get(name, {})
        opening = "{"
        while (yield from one_of(PARAMETER, END_FUNCTION)) == PARAMETER:
            key = yield from _attribute()
            if opening == "{":  # not before: "<function=x>" alone may be prose
                calls.name(name)
            calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from _value(calls, schema.get(key, STRING))
        if opening == "{":
            calls.name(name)
        calls.arguments("{}" if opening == "{" else "}")
        calls.done()
        yield from one_of(END_TOOL_CALL)

    return read


def _attribute() -> Reading[str]:
    """Read a name and the `>` behind it."""
    text = ""
    while (char := (yield)) != ">":
        if char == "<" or not char.isprintable():
            raise Malformed
        text += char
    if not text:
        raise Malformed
    return text


def _value(calls: CallWriter, types: frozenset[str]) -> Reading[None]:
    """Read a value and its closing tag."""
    if types != STRING:
        parts: list[str] = []
        yield from _value_text(parts.append)
        calls.arguments(typed_json("".join(parts), types))
        return
    calls.arguments('"')
    yield from _value_text(lambda text: calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
    calls.arguments('"')


def _value_text(emit: Callable[[str], None]) -> Reading[None]:
    """Read a value's text and its closing tag; `emit` gets the text once it is certain, less a newline at each end."""
    held = yield
    if held == "\n":
        held = ""
    while not held.endswith(END_PARAMETER):
        undecided = max(overlap(held, _END_VALUE), overlap(held, END_PARAMETER))
        certain = len(held) - undecided
        if certain:
            emit(held[:certain])
            held = held[certain:]
        held += yield
