"""The tool calls of Qwen3-Coder and of Qwen3.5 and later: tags for the function and for each of its parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from dflash_jax.text.parsing.json_scanner import SPACE, Malformed
from dflash_jax.text.parsing.readers import END_TOOL_CALL, TOOL_CALL, CallWriter, Reader, Reading, one_of
from dflash_jax.text.parsing.schema import STRING, ParameterTypes, typed_json

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MAX_SPACE = 8  # characters of white space between two closing tags; more of it is text
# Closing tags that end a value without `</parameter>`, each with the tags that may follow; so does the end of the text.
_OUTER = {END_FUNCTION: (END_TOOL_CALL, TOOL_CALL), END_TOOL_CALL: (TOOL_CALL,)}


def qwen3_coder(types: Mapping[str, ParameterTypes], opened_by: str) -> Reader:
    """A reader of the text behind the opening tag.

    Models are known to leave out tags. `<function=` opens a call without `<tool_call>`. Behind a value, `</function>`
    and `</tool_call>` may be missing where another call or the end of the text follows. `</parameter>` may be missing
    before a line that opens another parameter of the tool, and before closing tags that end the call; elsewhere such
    tags belong to the value.

    A parameter that no schema describes is a string. Strings stream; other values leave when they are complete.

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
        missing = set(schema)  # parameters without a value so far
        tag = yield from one_of(PARAMETER, END_FUNCTION, *((END_TOOL_CALL,) if opened_by == TOOL_CALL else ()))
        opening = "{"
        while tag == PARAMETER:
            key = yield from _attribute()
            tag = yield from _parameter(calls, name, opening, key, schema, missing)
            opening = ", "
        if opening == "{":
            calls.name(name)
        calls.arguments("{}" if opening == "{" else "}")
        if tag in (TOOL_CALL, FUNCTION):
            calls.done(unread=len(tag))
            raise Malformed(unread=len(tag))  # the call is complete, and its last characters begin another
        calls.done()
        if tag == END_FUNCTION:
            yield from one_of(END_TOOL_CALL)

    return read


def _parameter(
    calls: CallWriter, name: str, opening: str, key: str, schema: ParameterTypes, missing: set[str]
) -> Reading[str]:
    """Read the value of the parameter `key` and what follows; returns the tag that does.

    Args:
        calls: gets the arguments.
        name: of the tool.
        opening: of the fragment of JSON; "{" for the first parameter.
        key: the parameter.
        schema: JSON types of the tool's parameters.
        missing: parameters without a value so far; `key` leaves it, and so do those whose closing tag was missing.
    """
    while True:
        if opening == "{":  # not before: "<function=x>" alone may be prose
            calls.name(name)
        missing.discard(key)
        calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        end = yield from _value(calls, schema.get(key, STRING), missing)
        if end.kind is not _Kind.PARAMETER:
            break
        opening, key = ", ", end.tag
    if end.kind is _Kind.CALL:
        return end.tag
    calls.may_end("}")
    tag = yield from one_of(PARAMETER, END_FUNCTION, END_TOOL_CALL, TOOL_CALL, FUNCTION)
    calls.may_end(None)
    return tag


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


class _Kind(Enum):
    """What text at some place of a value is."""

    TEXT = auto()  # a part of the value
    OPEN = auto()  # undecided
    LAST = auto()  # undecided, but the value and the call end here if the text does
    VALUE = auto()  # the value's closing tag
    PARAMETER = auto()  # the opening tag of the next parameter
    CALL = auto()  # tags that end the call


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a value.

    Attributes:
        kind: what it is.
        tag: for `CALL` the last tag, for `PARAMETER` the name of the next parameter.
    """

    kind: _Kind
    tag: str = ""


_TEXT, _OPEN, _LAST, _CLOSED = (_End(kind) for kind in (_Kind.TEXT, _Kind.OPEN, _Kind.LAST, _Kind.VALUE))


def _value(calls: CallWriter, types: frozenset[str], missing: Collection[str]) -> Reading[_End]:
    """Read a value and what ends it."""
    if types != STRING:
        parts: list[str] = []

        def closed() -> str:
            return typed_json("".join(parts), types)

        end = yield from _value_text(calls, parts.append, closed, missing)
        calls.arguments(closed())
        return end
    calls.arguments('"')
    end = yield from _value_text(
        calls, lambda text: calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1]), lambda: '"', missing
    )
    calls.arguments('"')
    return end


def _value_text(
    calls: CallWriter, emit: Callable[[str], None], closed: Callable[[], str], missing: Collection[str]
) -> Reading[_End]:
    """Read a value's text and what ends it.

    Args:
        calls: is told whether the call may end here.
        emit: gets the text once it is certain, less a newline at each end.
        closed: the JSON that completes the value, where the text ends.
        missing: parameters that may follow.
    """
    held = yield
    if held == "\n":
        held = yield
    is_first = True  # whether no text has left: the value then begins a line
    while True:
        at, end = 0, _TEXT
        while at < len(held):
            end = _end_at(held[at:], missing, begins_line=is_first and at == 0)
            if end is not _TEXT:
                break
            at += 1
        if at:
            emit(held[:at])
            held, is_first = held[at:], False
        calls.may_end(closed() + "}" if end is _LAST else None)
        if end not in (_TEXT, _OPEN, _LAST):
            return end
        held += yield


def _end_at(text: str, missing: Collection[str], *, begins_line: bool) -> _End:
    """What `text` is, which begins somewhere in a value and runs to the last character that has come."""
    if text[0] not in "\n<":
        return _TEXT
    tag = text.removeprefix("\n")
    if tag == END_PARAMETER:
        return _CLOSED
    if END_PARAMETER.startswith(tag):  # as every tag that ends a value begins, and as "\n" does
        return _OPEN
    if begins_line or tag != text:
        name = tag.removeprefix(PARAMETER)
        if name != tag and name.endswith(">") and name[:-1] in missing:
            return _End(_Kind.PARAMETER, name[:-1])
        if PARAMETER.startswith(tag) or (name != tag and any(key.startswith(name) for key in missing)):
            return _OPEN
    for closer, followers in _OUTER.items():
        if closer.startswith(tag) and closer != tag:
            return _OPEN
        if tag.startswith(closer):
            behind = tag[len(closer) :]
            rest = behind.lstrip(SPACE)
            if rest in followers:
                return _End(_Kind.CALL, rest)
            if len(behind) - len(rest) <= _MAX_SPACE and any(follower.startswith(rest) for follower in followers):
                return _LAST
    return _TEXT
