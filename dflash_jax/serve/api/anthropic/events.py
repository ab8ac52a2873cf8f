"""What a completion is in Anthropic's Messages API: the blocks of a whole message, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from dflash_jax.serve.answers.events import ChatEvent
from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.http.streaming import named_event
from dflash_jax.serve.protocol import APIError, anthropic_error_body
from dflash_jax.text.parsing import Delta, ToolCallDelta, collect

# Reasoning is not signed here. Clients that send it back may drop blocks whose signature is empty.
SIGNATURE = "unsigned"
PING = {"type": "ping"}
Event = dict[str, Any]


def failure(error: APIError, request_id: str) -> list[bytes]:
    """The end of a stream that has failed."""
    return [named_event(anthropic_error_body(error, request_id))]


def usage_of(job: Job, num_cached_tokens: int) -> Event:
    """Anthropic's `usage`, whose input_tokens are those that the prefix cache did not have."""
    return {
        "input_tokens": job.num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": job.num_tokens,
        "output_tokens_details": {"thinking_tokens": job.num_reasoning_tokens},
    }


def stop_of(completion: CompletionDelta, finish_reason: str | None, *, has_calls: bool) -> dict[str, str | None]:
    """The fields `stop_reason` and `stop_sequence` of a completion that has ended.

    Args:
        completion: its last delta.
        finish_reason: OpenAI's.
        has_calls: whether it has called a tool; a tool that the request has named leaves "stop" as OpenAI's reason.
    """
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):  # a stop string; a stop token is a number
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def whole_message(head: Event, completion: CompletionDelta, event: ChatEvent, job: Job) -> Event:
    """The message of a completion that came in one delta; `head` has the fields that all messages begin with."""
    parsed = collect(event.deltas)
    content: list[Event] = []
    thinking, text = (parsed.reasoning or "").lstrip("\n"), parsed.content or ""
    if thinking:
        content.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if parsed.reasoning is not None:
        text = text.lstrip("\n")
    if text:
        content.append({"type": "text", "text": text})
    for call in parsed.tool_calls:
        content.append(
            {"type": "tool_use", "id": _tool_id(call.id), "name": call.name, "input": _input(call.arguments)}
        )
    stop = stop_of(completion, event.finish_reason, has_calls=bool(parsed.tool_calls))
    return head | {"content": content} | stop | {"usage": usage_of(job, job.num_cached_tokens)}


def _input(arguments: str) -> msgspec.Raw:
    """The arguments of a call as they are; none where `max_tokens` has cut them.

    Their values could not be written again if there is half a surrogate pair or a number too large among them.
    """
    try:
        json.loads(arguments)
    except ValueError:
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())


class MessageStream:
    """Makes the events of a message of a chat's pieces, while they come.

    Blocks follow one another: a piece of another kind, or of another call, ends one and begins the next. Newlines
    between reasoning, text and calls belong to none, as in Anthropic's own answers. Pieces of a call that proves
    malformed stay where they are, since an event cannot be taken back; the text that it was follows.
    """

    def __init__(self, head: Event, job: Job):
        self._head, self._job = head, job
        self._kind: str | None = None  # of the open block
        self._call: int | None = None  # of the open block, if it is a call
        self._index = -1
        self._num_calls = 0
        self._trims = False  # whether newlines before the next text separate it from something

    def begin(self, num_cached_tokens: int) -> Iterator[Event]:
        """The events before any content."""
        begun: Event = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = usage_of(self._job, num_cached_tokens)
        yield {"type": "message_start", "message": self._head | begun | {"usage": usage}}
        yield PING

    def read(self, delta: Delta) -> Iterator[Event]:
        """The events of a piece."""
        if delta.tool_call is not None:
            yield from self._read_call(delta.tool_call)
        elif delta.reasoning is not None:
            yield from self._read_text("thinking", delta.reasoning)
        else:
            yield from self._read_text("text", delta.content or "")

    def end(self, completion: CompletionDelta, finish_reason: str | None) -> Iterator[Event]:
        """The events behind all content; `completion` is the last delta."""
        yield from self._close()
        stop = stop_of(completion, finish_reason, has_calls=self._num_calls > 0)
        yield {"type": "message_delta", "delta": stop, "usage": usage_of(self._job, self._job.num_cached_tokens)}
        yield {"type": "message_stop"}

    def _read_text(self, kind: str, text: str) -> Iterator[Event]:
        self._trims = self._trims or kind == "thinking"
        if self._kind != kind:
            text = text.lstrip("\n") if self._trims else text
            if not text:
                return
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield from self._open(kind, empty)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _read_call(self, call: ToolCallDelta) -> Iterator[Event]:
        self._trims = True
        if call.retracted:
            self._num_calls -= 1
            yield from self._close()
            return
        if self._call != call.index:
            self._num_calls += 1
            block: Event = {"type": "tool_use", "id": _tool_id(call.id or ""), "name": call.name, "input": {}}
            yield from self._open("tool_use", block)
            self._call = call.index
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: str, block: Event) -> Iterator[Event]:
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = self._call = None

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _tool_id(call_id: str) -> str:
    """The id of a call in Anthropic's form."""
    return f"toolu_{call_id.rpartition('-')[2]}"
