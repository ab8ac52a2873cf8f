"""The events of a response's stream, and the items that they add up to, from the events of its chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from dflash_jax.serve.answers.events import ChatEvent
from dflash_jax.serve.protocol import APIError
from dflash_jax.serve.protocol.response_items import seal
from dflash_jax.text.parsing import Delta, ToolCallDelta

Event = dict[str, Any]
# The status of a response by the finish reason of its chat.
STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}


class _Item(Protocol):
    """An item of the output while it comes."""

    def snapshot(self, status: str) -> dict[str, Any]:
        """The item as far as it has come."""

    def open(self) -> list[Event]:
        """The events behind `response.output_item.added`."""

    def push(self, text: str) -> Event:
        """The event of a further piece."""

    def close(self) -> list[Event]:
        """The events before `response.output_item.done`."""


class _Text:
    """An item that has one part, a text; `is_sealed` gives clients the text in the form that they send back, too.

    Args:
        kind: of the item; one of `_TEXTS`.
        is_sealed: whether the item holds `encrypted_content`.
    """

    def __init__(self, kind: str, *, is_sealed: bool = False):
        id_prefix, self._event, self._head, self._part_type, self._rest = _TEXTS[kind]
        self._id = f"{id_prefix}_{uuid.uuid4().hex}"
        self._place = {"item_id": self._id, "content_index": 0}
        self._text = ""
        self._parts: list[dict[str, Any]] = []
        self._is_sealed = is_sealed

    def snapshot(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, **self._head, "status": status, "content": self._parts}
        return item | ({"encrypted_content": seal(self._text)} if self._is_sealed else {})

    def open(self) -> list[Event]:
        self._parts = [self._part()]
        return [{"type": "response.content_part.added", **self._place, "part": self._part()}]

    def push(self, text: str) -> Event:
        self._text += text
        return self._about_text("delta", delta=text)

    def close(self) -> list[Event]:
        self._parts = [self._part()]
        part = {"type": "response.content_part.done", **self._place, "part": self._part()}
        return [self._about_text("done", text=self._text), part]

    def _part(self) -> dict[str, Any]:
        return {"type": self._part_type, "text": self._text, **self._rest}

    def _about_text(self, what: str, **text: str) -> Event:
        logprobs = {name: value for name, value in self._rest.items() if name == "logprobs"}
        return {"type": f"{self._event}.{what}", **self._place, **text, **logprobs}


# Of an item of text: what its id begins with, the event of its text, its fields, and the type and fields of its part.
_TEXTS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "message": (
        "msg",
        "response.output_text",
        {"type": "message", "role": "assistant"},
        "output_text",
        {"annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs", "response.reasoning_text", {"type": "reasoning", "summary": []}, "reasoning_text", {}),
}


class _Call:
    """A call of a function, under the namespace and the name that it has for the client."""

    def __init__(self, call: ToolCallDelta, origins: Mapping[str, tuple[str, str]]):
        self.index = call.index
        namespace, name = origins.get(call.name or "", ("", call.name or ""))
        self._id = f"fc_{uuid.uuid4().hex}"
        self._arguments = ""
        self._about = {"call_id": call.id or self._id, "name": name} | ({"namespace": namespace} if namespace else {})

    def snapshot(self, status: str) -> dict[str, Any]:
        about = {"id": self._id, "type": "function_call", "status": status, **self._about}
        return about | {"arguments": self._arguments}

    def open(self) -> list[Event]:
        return []

    def push(self, text: str) -> Event:
        self._arguments += text
        return {"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": text}

    def close(self) -> list[Event]:
        about = {"item_id": self._id, "name": self._about["name"], "arguments": self._arguments}
        return [{"type": "response.function_call_arguments.done", **about}]


class ResponseEvents:
    """Makes the events of one response.

    A call that proves malformed after it has begun is never done, and is no part of the output: clients run the calls
    that are done. Its text follows as a message.

    Args:
        response: the answer without `status`, `output` and `usage`.
        origins: the namespace and the name that a function has for the client, by its name in the chat.
        is_sealed: whether reasoning is also given in the form that clients send back.
    """

    def __init__(self, response: dict[str, Any], origins: Mapping[str, tuple[str, str]], *, is_sealed: bool):
        self._response, self._origins, self._is_sealed = response, origins, is_sealed
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []
        self._num_items = 0
        self._item: _Item | None = None  # the one that comes; its kind and its call, if it is one
        self._kind: object = None

    def begin(self) -> Iterator[Event]:
        """The first events, once; later calls give none."""
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                yield self._numbered({"type": kind, "response": self._snapshot("in_progress")})

    def read(self, chat_event: ChatEvent) -> Iterator[Event]:
        """The events of the chat's next event; its end is told by `end`."""
        for delta in chat_event.deltas:
            yield from self._delta(delta)

    def end(self, finish_reason: str, further: dict[str, Any]) -> Iterator[Event]:
        """The last events; the last holds the whole response.

        Args:
            finish_reason: of the chat.
            further: fields of the response that are known at its end.
        """
        status = STATUS.get(finish_reason, "incomplete")
        if self._num_items == 0 and status == "completed":
            yield from self._open(_Text("message"), "content")
        yield from self._close("completed" if status == "completed" else "incomplete")
        details = {"reason": "max_output_tokens"} if finish_reason == "length" else None
        response = self._snapshot(status) | {"incomplete_details": details} | further
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._numbered({"type": kind, "response": response})

    def fail(self, error: APIError) -> Iterator[Event]:
        """The last events of a response that has failed."""
        yield from self.begin()
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        about = {"code": code, "message": error.message}
        yield self._numbered({"type": "error", **about, "param": error.param})
        response = self._snapshot("failed") | {"error": about}
        yield self._numbered({"type": "response.failed", "response": response})

    def _delta(self, delta: Delta) -> Iterator[Event]:
        call = delta.tool_call
        if call is not None and call.retracted:
            self._item = self._kind = None
            return
        kind: object = call.index if call is not None else "content" if delta.reasoning is None else "reasoning"
        if self._item is None or kind != self._kind:
            yield from self._close("completed")
            yield from self._open(self._new_item(delta), kind)
        text = call.arguments if call is not None else delta.reasoning or delta.content
        if text and self._item is not None:
            yield self._placed(self._item.push(text))

    def _new_item(self, delta: Delta) -> _Item:
        if delta.tool_call is not None:
            return _Call(delta.tool_call, self._origins)
        return _Text("message") if delta.reasoning is None else _Text("reasoning", is_sealed=self._is_sealed)

    def _open(self, item: _Item, kind: object) -> Iterator[Event]:
        self._item, self._kind = item, kind
        self._num_items += 1
        yield self._placed({"type": "response.output_item.added", "item": item.snapshot("in_progress")})
        for event in item.open():
            yield self._placed(event)

    def _close(self, status: str) -> Iterator[Event]:
        """The end of the item that comes, if there is one."""
        if self._item is None:
            return
        for event in self._item.close():
            yield self._placed(event)
        self._output.append(self._item.snapshot(status))
        yield self._placed({"type": "response.output_item.done", "item": self._output[-1]})
        self._item = self._kind = None

    def _snapshot(self, status: str) -> dict[str, Any]:
        return self._response | {"status": status, "output": [*self._output]}

    def _placed(self, event: Event) -> Event:
        return self._numbered(event | {"output_index": self._num_items - 1})

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return event | {"sequence_number": self._number - 1}
