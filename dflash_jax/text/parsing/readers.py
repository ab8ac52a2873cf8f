"""Readers of tool calls: generators that are sent one character at a time.

A reader reports through a `CallWriter`, returns on the last character of its format, and raises `Malformed` on a
character that does not fit. It reports the name of a call only when the arguments have begun, since a piece that has
left cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from dflash_jax.text.parsing.json_scanner import SPACE, JsonScanner, Malformed

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")  # vLLM writes "parameters" where a grammar forces a call
# What each key of a call stands for, and the first character of its value.
_MEMBERS = {"name": ("name", '"'), **dict.fromkeys(_ARGUMENTS, ("arguments", "{"))}

T = TypeVar("T")
Reading = Generator[None, str, T]
Reader = Callable[["CallWriter"], Reading[None]]


class CallWriter(Protocol):
    """Receives what a reader reports."""

    def begin(self) -> None:
        """A call begins; until `done` it may prove malformed."""

    def name(self, name: str) -> None:
        """The name of the call's tool is known; from now on pieces of the call leave."""

    def arguments(self, fragment: str) -> None:
        """The next fragment of the call's arguments."""

    def may_end(self, rest: str | None) -> None:
        """Whether the call is complete, with `rest` as its last fragment, if the text ends here; None if it is not."""

    def done(self, unread: int = 0) -> None:
        """The call is complete and valid, whatever follows it; its last `unread` characters belong to what follows."""


def overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
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
    """Read `{"name": ..., "arguments": {...}}`, in any order of members, from its opening brace `char` on.

    Arguments stream once the name is known; a call without arguments gets `{}`. Other members are skipped.
    """
    calls.begin()
    if char != "{":
        raise Malformed
    scanner = JsonScanner()
    scanner.push(char)
    seen: set[str] = set()
    pending: list[str] = []  # fragments of arguments that have not left
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
    if not name or not name.isprintable():  # JSON cannot carry half a surrogate pair
        raise Malformed
    calls.name(name)
    return name


def hermes(calls: CallWriter) -> Reading[None]:
    """Read the text behind `<tool_call>` of Qwen3's dense and mixture-of-experts models."""
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
    """A reader for a `tool_choice` that names a tool: the text is the bare arguments."""

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
