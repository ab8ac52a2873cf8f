"""Readers of tool calls: generators that are sent one character at a time.

A reader reports through a `CallWriter`, returns on the last character of its format and raises `Malformed` on a
character that does not fit. It tells a call's name as late as a stream allows, when the arguments have begun: what has
left cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from dflash_jax.text.parsing.json_scanner import SPACE, JsonScanner, Malformed

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")  # the second is vLLM's word where a grammar forces a call
_MEMBERS = {"name": ("name", '"'), **dict.fromkeys(_ARGUMENTS, ("arguments", "{"))}  # what each is, how it begins

T = TypeVar("T")
Reading = Generator[None, str, T]
Reader = Callable[["CallWriter"], Reading[None]]


class CallWriter(Protocol):
    """Where a reader reports what it read."""

    def begin(self) -> None:
        """A call starts; until `done` it may prove malformed."""

    def name(self, name: str) -> None:
        """Its tool is known: from here on its pieces leave."""

    def arguments(self, fragment: str) -> None:
        """More of its arguments."""

    def done(self) -> None:
        """It is whole and valid: whatever follows cannot harm it."""


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag` without being all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def nonspace() -> Reading[str]:
    """Skip white space; returns the first other character."""
    while (char := (yield)) in SPACE:
        pass
    return char


def one_of(*tags: str) -> Reading[str]:
    """Skip white space and read one of the tags."""
    text = yield from nonspace()
    while text not in tags:
        if not any(tag.startswith(text) for tag in tags):
            raise Malformed(unread=len(text))
        text += yield
    return text


def json_call(calls: CallWriter, char: str) -> Reading[None]:
    """Read `{"name": ..., "arguments": {...}}` in any order of members, from its brace `char` on.

    Arguments stream as they come once the name is known. Other members are skipped; without arguments they are `{}`.
    """
    calls.begin()
    if char != "{":
        raise Malformed
    scanner = JsonScanner()
    scanner.push(char)
    seen: set[str] = set()
    pending: list[str] = []  # arguments that have not left
    name = None
    while not scanner.done:
        char = yield
        key, depth = scanner.key, scanner.depth
        if key in _MEMBERS and depth == 1 and scanner.expects_value and char not in SPACE:
            member, first = _MEMBERS[key]
            if char != first or member in seen:
                raise Malformed
            seen.add(member)
        text = scanner.push(char)
        if key in _ARGUMENTS and max(depth, scanner.depth) > 1:
            pending.append(text)
        if pending and "name" in scanner.strings:
            if name is None:
                name = _announce(calls, scanner)
            calls.arguments("".join(pending))
            pending.clear()
    if name is None:
        _announce(calls, scanner)
        calls.arguments("{}")
    calls.done()


def _announce(calls: CallWriter, scanner: JsonScanner) -> str:
    name = scanner.strings.get("name")
    if not name or not name.isprintable():  # half a surrogate pair could not even be sent
        raise Malformed
    calls.name(name)
    return name


def hermes(calls: CallWriter) -> Reading[None]:
    """Read what follows `<tool_call>` in Qwen3's dense and mixture models."""
    yield from json_call(calls, (yield from nonspace()))
    yield from one_of(END_TOOL_CALL)


def required(calls: CallWriter) -> Reading[None]:
    """Read the list of calls of `tool_choice="required"`."""
    yield from one_of("[")
    while True:
        yield from json_call(calls, (yield from nonspace()))
        if (yield from one_of(",", "]")) == "]":
            return


def named(name: str) -> Reader:
    """A reader of the bare arguments of a `tool_choice` that names its tool."""

    def read(calls: CallWriter) -> Reading[None]:
        calls.begin()
        char = yield from nonspace()
        if char != "{":
            raise Malformed
        calls.name(name)
        scanner = JsonScanner()
        calls.arguments(scanner.push(char))
        while not scanner.done:
            calls.arguments(scanner.push((yield)))
        calls.done()

    return read
