"""The state machine that turns the text of a completion into typed deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, Literal

from dflash_jax.base.errors import ConfigError
from dflash_jax.text.parsing.deltas import Delta, ParsedOutput, ToolCallDelta, collect, merge
from dflash_jax.text.parsing.json_scanner import SPACE, Malformed
from dflash_jax.text.parsing.qwen3_coder import FUNCTION, qwen3_coder
from dflash_jax.text.parsing.readers import TOOL_CALL, Reader, Reading, hermes, named, overlap, required
from dflash_jax.text.parsing.schema import parameter_types

REASONING_PARSERS = ("qwen3",)
# qwen3_json and qwen3_xml are vLLM's other names of hermes and qwen3_coder.
TOOL_PARSERS = ("hermes", "qwen3_json", "qwen3_coder", "qwen3_xml")
THINK, END_THINK = "<think>", "</think>"
TURN = "<|im_start|>"  # of ChatML; the role, a newline and the text follow

ToolChoice = Literal["none", "auto", "required"]


def make_tool_call_id() -> str:
    """A new id of a tool call, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def prompt_reasoning(prompt: str) -> bool | None:
    """Whether the answer begins inside reasoning that the chat template has opened.

    The rendered prompt is asked, since templates differ in what they open and when. In ChatML only the begun turn of
    the assistant counts, and there only reasoning at its beginning: other tags are somebody's text. In other formats
    the prompt must end with the tag.

    False: the template has closed it (`enable_thinking=False`), so parse with `reasoning=None`. None: the prompt has no
    tag, and the model itself may write `<think>`.
    """
    _, has_turns, turn = prompt.rpartition(TURN)
    if not has_turns:
        end = prompt.rstrip()
        return True if end.endswith(THINK) else False if end.endswith(END_THINK) else None
    role, _, begun = turn.partition("\n")
    begun = begun.lstrip()
    if role != "assistant" or not begun.startswith(THINK):
        return None
    return END_THINK not in begun


class _Region(Enum):
    START = auto()  # `<think>` may come first
    REASONING = auto()
    CONTENT = auto()


class OutputParser:
    """Splits one completion into reasoning, content and tool calls.

    The deltas depend on the characters alone, not on the chunks in which they come. A tag, or text that may become
    one, is held back until it is decided.

    Reasoning is the text up to `</think>`, if the answer begins with `<think>` or with `starts_in_reasoning`; without
    `</think>` it is the whole answer. As in vLLM, newlines beside the tags are kept.

    Tool calls leave in pieces: id and name once the arguments have begun, then fragments of checked JSON. A call
    whose arguments are complete is valid, whatever follows it. A call that proves malformed or unfinished before that
    comes back as the text that it was; if pieces of it had left, they are `retracted`.

    A call inside the reasoning counts. It ends the reasoning, unless `</think>` follows: some models forget the tag,
    others think on. The text in between is held back until that is decided.

    Content beside tool calls is the text without them and without white space at its end; white space alone is not
    content. An answer without tool calls keeps every character.

    Args:
        reasoning: a name of `REASONING_PARSERS`, or None: nothing is reasoning.
        tools: a name of `TOOL_PARSERS`, or None: tags of calls are plain text.
        tool_schemas: the request's `tools`; their schemas give the values of `qwen3_coder` their types.
        starts_in_reasoning: whether the prompt ended inside `<think>`; see `prompt_reasoning`.
        tool_choice: as in the API. "required" reads vLLM's list of calls, whatever `tools` is.
        tool_name: the tool that the request forces; the text is then its arguments, whatever `tools` is.
        new_id: makes the ids of calls.

    Raises:
        ConfigError: `reasoning` or `tools` is not the name of a parser.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        tool_schemas: Iterable[Mapping[str, Any]] = (),
        *,
        starts_in_reasoning: bool = False,
        tool_choice: ToolChoice = "auto",
        tool_name: str | None = None,
        new_id: Callable[[], str] = make_tool_call_id,
    ) -> None:
        for name, parsers, what in ((reasoning, REASONING_PARSERS, "reasoning"), (tools, TOOL_PARSERS, "tool-call")):
            if name is not None and name not in parsers:
                raise ConfigError(f"{what} parser {name!r} is unknown; choose one of {', '.join(parsers)}")
        self._is_named = tool_name is not None
        self._forced = named(tool_name) if tool_name is not None else required if tool_choice == "required" else None
        self._readers: dict[str, Reader] = {}  # by opening tag
        if tools is not None and tool_choice == "auto" and tool_name is None:
            self._readers = _tool_readers(tools, tool_schemas)
        self._region = _Region.CONTENT if reasoning is None else _Region.START
        self._starts_in_reasoning = starts_in_reasoning
        self._calls = _Calls(self._emit, new_id)
        self._trims = bool(self._forced or self._readers)
        self._reading: Reading[None] | None = None
        self._buffer = ""  # text that was not looked at, or is undecided
        self._space = ""  # white space of the content that is held back, since a tool call may follow
        self._has_content = False
        self._undecided: list[str] = []  # text behind a call inside the reasoning: reasoning if `</think>` follows
        self._deltas: list[Delta] = []

    @property
    def has_tool_calls(self) -> bool:
        """Whether a tool call is complete, after which the model's end is `tool_calls`; one that was cut counts."""
        return self._calls.complete > 0

    def push(self, text: str) -> list[Delta]:
        """Take more text; returns the deltas that it decides."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take()

    def finish(self, *, is_whole: bool = True) -> list[Delta]:
        """End the text; returns the deltas that were held back.

        Args:
            is_whole: whether the model has ended the text. In one that was cut, as by `max_tokens`, a call without its
                closing tags may lack parameters, and comes back as text; that of a tool that the request has named
                is cut, as in vLLM.
        """
        if self._region is _Region.START:
            self._leave_start()
        if self._reading is not None:
            self._reading = None
            if is_whole:
                self._calls.end()
            text = self._calls.cut() if self._is_named and not is_whole else self._calls.give_back()
        else:
            text, self._buffer = self._buffer, ""
        self._returned(text)
        if self._region is _Region.REASONING:  # it ended with the first call, if there is one
            self._region = _Region.CONTENT
            self._text(self._take_undecided())
        if self._space and not self.has_tool_calls:
            self._emit(Delta(content=self._space))
        self._space = ""
        return self._take()

    def parse_all(self, text: str) -> ParsedOutput:
        """Parse a complete answer."""
        return collect([*self.push(text), *self.finish()])

    def _step(self) -> bool:
        """Handle a part of the buffer; returns False if more text is needed to decide."""
        if self._reading is not None:
            return self._read(self._reading)
        if self._region is _Region.START:
            return self._start()
        if self._region is _Region.CONTENT and self._forced is not None:
            return self._start_forced(self._forced)
        tags = [*self._readers, END_THINK] if self._region is _Region.REASONING else [*self._readers]
        at, tag = min(((at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0), default=(-1, ""))
        if not tag:
            at = len(self._buffer) - max((overlap(self._buffer, tag) for tag in tags), default=0)
        self._text(self._buffer[:at])
        self._buffer = self._buffer[at + len(tag) :]
        if tag == END_THINK:
            self._end_reasoning()
        elif tag:
            self._open(self._readers[tag], tag)
        return bool(tag)

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._region = _Region.REASONING
            self._buffer = text[len(THINK) :]
        elif THINK.startswith(text):
            return False
        else:
            self._leave_start()
        return True

    def _leave_start(self) -> None:
        self._region = _Region.REASONING if self._starts_in_reasoning else _Region.CONTENT

    def _start_forced(self, reader: Reader) -> bool:
        text = self._buffer.lstrip(SPACE)
        self._text(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        if text:
            self._forced = None  # text behind the call, or that does not fit its format, is content
            self._open(reader, "")
        return True

    def _open(self, reader: Reader, tag: str) -> None:
        self._calls.open(tag)
        self._reading = reader(self._calls)
        next(self._reading)

    def _read(self, reading: Reading[None]) -> bool:
        text, self._buffer = self._buffer, ""
        for at, char in enumerate(text, 1):
            self._calls.raw.append(char)
            try:
                reading.send(char)
            except StopIteration:
                self._reading = None
                self._buffer = text[at:]
                return True
            except Malformed as error:
                self._reading = None
                raw = self._calls.give_back(malformed=True)
                self._returned(raw[: len(raw) - error.unread])
                self._buffer = raw[len(raw) - error.unread :] + text[at:]
                return True
        return False

    def _returned(self, text: str) -> None:
        """Take the text of what was no call, which may have swallowed the end of the reasoning."""
        before, tag, after = text.partition(END_THINK) if self._region is _Region.REASONING else (text, "", "")
        self._text(before)
        if tag:
            self._end_reasoning()
            self._text(after)

    def _end_reasoning(self) -> None:
        self._emit(Delta(reasoning=self._take_undecided()))
        self._region = _Region.CONTENT

    def _text(self, text: str) -> None:
        if self._region is _Region.REASONING:
            if self._calls.complete:
                self._undecided.append(text)
            else:
                self._emit(Delta(reasoning=text))
        elif not self._trims:
            self._emit(Delta(content=text))
        else:
            text = self._space + text
            if self.has_tool_calls and not self._has_content:
                text = text.lstrip()
            shown = text.rstrip()
            self._space = text[len(shown) :]
            self._has_content = self._has_content or bool(shown)
            self._emit(Delta(content=shown))

    def _take_undecided(self) -> str:
        text = "".join(self._undecided)
        self._undecided.clear()
        return text

    def _emit(self, delta: Delta) -> None:
        if delta.reasoning or delta.content or delta.tool_call:
            self._deltas.append(delta)

    def _take(self) -> list[Delta]:
        self._calls.flush()
        deltas, self._deltas = merge(self._deltas), []
        return deltas


class _Calls:
    """The `CallWriter` of a parser: counts calls, and keeps the raw text of a call until it is complete.

    Attributes:
        complete: number of complete calls, and of one that was cut.
        raw: the characters since the opening tag, or since the last complete call.
    """

    def __init__(self, emit: Callable[[Delta], None], new_id: Callable[[], str]) -> None:
        self.complete = 0
        self.raw: list[str] = []
        self._index = -1
        self._fragments: list[str] = []  # of arguments, which leave together
        self._named = False  # whether pieces of the current call have left
        self._safe = False  # whether the call is complete and only its closing markup is missing
        self._rest: str | None = None  # what completes the call if the text ends here
        self._emit = emit
        self._new_id = new_id

    def open(self, tag: str) -> None:
        """A reader starts behind this opening tag."""
        self.raw = [tag]
        self._named = self._safe = False
        self._rest = None

    def give_back(self, malformed: bool = False) -> str:
        """The reader has stopped before the end of its format: the text to show in place of the call."""
        self.flush()
        if self._named:
            self._emit(Delta(tool_call=ToolCallDelta(self._index, retracted=True)))
        return "".join(self.raw) if malformed or not self._safe else ""

    def cut(self) -> str:
        """The text was cut within the call, which stays as it is: the text to show if there is no call yet."""
        if not self._named:
            return self.give_back()
        self.flush()
        self.complete += 1
        return ""

    def end(self) -> None:
        """The text has ended, as the model wanted: complete a call that only lacks closing tags."""
        if self._rest is not None:
            self.arguments(self._rest)
            self.done()

    def begin(self) -> None:
        self._safe = False

    def name(self, name: str) -> None:
        self._index += 1
        self._named = True
        self._emit(Delta(tool_call=ToolCallDelta(self._index, self._new_id(), name)))

    def arguments(self, fragment: str) -> None:
        self._fragments.append(fragment)

    def flush(self) -> None:
        """Emit the fragments of arguments as one delta."""
        if fragment := "".join(self._fragments):
            self._emit(Delta(tool_call=ToolCallDelta(self._index, arguments=fragment)))
        self._fragments.clear()

    def may_end(self, rest: str | None) -> None:
        self._rest = rest

    def done(self, unread: int = 0) -> None:
        self.flush()
        self.complete += 1
        self.raw = self.raw[len(self.raw) - unread :]
        self._named = False
        self._safe = True
        self._rest = None


def _tool_readers(tools: str, schemas: Iterable[Mapping[str, Any]]) -> dict[str, Reader]:
    """The readers of a tool parser, by the tags that open them."""
    if tools in ("hermes", "qwen3_json"):
        return {TOOL_CALL: hermes}
    types = parameter_types(schemas)
    return {tag: qwen3_coder(types, tag) for tag in (TOOL_CALL, FUNCTION)}
