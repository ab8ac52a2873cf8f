"""The pieces that a parser hands out, and the complete answer that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: which call of this completion, from 0.
        id: of the call; only the first piece has it.
        name: of the tool; only the first piece has it.
        arguments: a fragment; the fragments of a call, joined, are one JSON object.
        retracted: the call proved malformed after pieces of it had left. Its arguments stay unfinished, its raw text
            follows as content, and it does not count as a call.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    retracted: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: exactly one of the three fields is set."""

    reasoning: str | None = None
    content: str | None = None
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A complete answer; `reasoning` and `content` are None if the answer has none."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbouring deltas of the same kind, and of the same tool call."""
    return [_joined(list(group)) for _, group in groupby(deltas, key=_kind)]


def collect(deltas: Iterable[Delta]) -> ParsedOutput:
    """Join the deltas of a complete answer, without its retracted calls."""
    deltas = list(deltas)
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        if delta.tool_call is not None:
            calls.setdefault(delta.tool_call.index, []).append(delta.tool_call)
    return ParsedOutput(
        reasoning="".join(delta.reasoning or "" for delta in deltas) or None,
        content="".join(delta.content or "" for delta in deltas) or None,
        tool_calls=[
            ToolCall(pieces[0].id or "", pieces[0].name or "", "".join(piece.arguments for piece in pieces))
            for pieces in calls.values()
            if not pieces[-1].retracted
        ],
    )


def _kind(delta: Delta) -> object:
    if delta.tool_call is not None:
        return delta.tool_call.index, delta.tool_call.retracted
    return "content" if delta.reasoning is None else "reasoning"


def _joined(deltas: list[Delta]) -> Delta:
    first = deltas[0]
    if len(deltas) == 1:
        return first
    if first.tool_call is not None:
        call = first.tool_call
        arguments = "".join(delta.tool_call.arguments for delta in deltas if delta.tool_call is not None)
        return Delta(tool_call=ToolCallDelta(call.index, call.id, call.name, arguments))
    if first.reasoning is not None:
        return Delta(reasoning="".join(delta.reasoning or "" for delta in deltas))
    return Delta(content="".join(delta.content or "" for delta in deltas))
