"""A chat's pieces as Anthropic's events and messages, and errors in its form, without a server."""

import asyncio
import json
from functools import partial

import msgspec
import pytest

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.events import ChatEvents
from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.api.anthropic.events import SIGNATURE, MessageStream, failure, whole_message
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.http.streaming import EventStream, named_event
from dflash_jax.serve.protocol import APIError, anthropic_error_body
from dflash_jax.text.parsing import OutputParser

HEAD = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}


def text(words):
    return {"type": "text", "text": words}


# ---- Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
     (415, "invalid_request_error"), (500, "api_error"), (503, "overloaded_error"), (504, "timeout_error")],
)  # fmt: skip
def test_types_of_errors(status, kind):
    body = anthropic_error_body(APIError("It is so.", status), "req_1")
    assert body == {"type": "error", "error": {"type": kind, "message": "It is so."}, "request_id": "req_1"}


# ---- Events


def completion_of(words, finish_reason=None, stop_reason=None):
    return CompletionDelta(0, words, [1] * len(words), None, [], finish_reason, stop_reason, None)


def events_of(text_, finish_reason="stop", stop_reason=None, size=3, **options):
    """The events of a completion that comes in pieces of so many characters, framing checked; and the whole message."""

    def reader():
        job = Job("msg_1", ["1"], [[1, 2, 3, 4]], [SamplingParams()], None, True)
        parser = OutputParser("qwen3", "hermes", **options)
        settings = {"parallel_tool_calls": True, "include_reasoning": True, "is_tool_forced": "tool_name" in options}
        return job, ChatEvents(parser, job, None, **settings)

    job, chat_events = reader()
    stream = MessageStream(HEAD, job)
    events = [*stream.begin(3)]
    for at in range(0, len(text_), size):
        is_last = at + size >= len(text_)
        delta = completion_of(text_[at : at + size], *((finish_reason, stop_reason) if is_last else ()))
        job.num_tokens += len(delta.token_ids)
        event = chat_events.read(delta)
        events += [event_ for piece in event.deltas for event_ in stream.read(piece)]
        if event.finish_reason is not None:
            job.cached = {"1": 3}
            events += stream.end(delta, event.finish_reason)
    for event in events:
        name, data = named_event(event).decode().removesuffix("\n\n").split("\n")
        assert (name, json.loads(data.removeprefix("data: "))) == (f"event: {event['type']}", event)
    whole_job, chat_events = reader()
    whole_job.num_tokens, whole_job.cached = len(text_), {"1": 3}
    completion = completion_of(text_, finish_reason, stop_reason)
    whole = msgspec.json.encode(whole_message(HEAD, completion, chat_events.read(completion), whole_job))
    return events, json.loads(whole)


def blocks_of(events):
    """The message that a client makes of the events, which must come in order."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    assert delta["type"] == "message_delta"
    blocks, is_open = [], False
    for event in middle:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append(dict(event["content_block"]) | {"json": ""})
            is_open = True
            continue
        assert (is_open, event["index"]) == (True, len(blocks) - 1)
        is_open = event["type"] == "content_block_delta"
        kind, block = event.get("delta", {}).get("type"), blocks[-1]
        if kind == "text_delta":
            block["text"] += event["delta"]["text"]
        elif kind == "thinking_delta":
            block["thinking"] += event["delta"]["thinking"]
        elif kind == "signature_delta":
            block["signature"] += event["delta"]["signature"]
        elif kind == "input_json_delta":
            block["json"] += event["delta"]["partial_json"]
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    assert not is_open
    for block in blocks:
        raw = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(raw)
    return start["message"] | {"content": blocks} | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message):
    return message | {"content": [{key: b[key] for key in b if key != "id"} for b in message["content"]]}


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a b", "n": [1, 2]}}\n</tool_call>'
CALLED = {"type": "tool_use", "name": "read", "input": {"path": "a b", "n": [1, 2]}}
THOUGHT = {"type": "thinking", "thinking": "Hm.\n", "signature": SIGNATURE}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("words", "finish", "content", "stop_reason"),
    [
        ("Yes.", "stop", [text("Yes.")], "end_turn"),
        ("\nYes.", "stop", [text("\nYes.")], "end_turn"),
        ("Yes", "length", [text("Yes")], "max_tokens"),
        ("<think>\nHm.\n</think>\n\nYes.", "stop", [THOUGHT, text("Yes.")], "end_turn"),
        ("<think>\n\n</think>\n\nYes.", "stop", [text("Yes.")], "end_turn"),
        ("<think>\nHm.\n", "length", [THOUGHT], "max_tokens"),
        (CALL, "stop", [CALLED], "tool_use"),
        (f"Let me.\n{CALL}", "stop", [text("Let me."), CALLED], "tool_use"),
        (f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}", "stop", [THOUGHT, CALLED, CALLED], "tool_use"),
        (f"{CALL}\n\nDone.", "length", [CALLED, text("Done.")], "max_tokens"),
    ],
)
def test_blocks_of_a_stream(words, finish, content, stop_reason, size):
    events, whole = events_of(words, finish, size=size)
    message = without_ids(blocks_of(events))
    assert message["content"] == content
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, None)
    cached = {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert message["usage"] == {"input_tokens": 1, "output_tokens": len(words)} | cached
    assert events[0]["message"]["usage"] == {"input_tokens": 1, "output_tokens": 0} | cached
    assert {key: message[key] for key in HEAD} == HEAD
    expected = [*content[1:], *content[:1]] if content[-1] == text("Done.") else content  # whole: calls come last
    assert without_ids(whole) == message | {"content": expected}
    ids = [b["id"] for b in whole["content"] if b["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert all(id_.startswith("toolu_") for id_ in ids)


def test_a_stop_sequence_is_told():
    events, whole = events_of("Yes", stop_reason="STOP")
    for message in (blocks_of(events), whole):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    assert events_of("Yes", stop_reason=7)[1]["stop_reason"] == "end_turn"  # a stop token


def test_a_named_tool_is_a_use_of_it():
    events, whole = events_of('{"path": "a"}', tool_name="read")
    for message in (blocks_of(events), whole):
        assert message["stop_reason"] == "tool_use"
        assert without_ids(message)["content"] == [{"type": "tool_use", "name": "read", "input": {"path": "a"}}]


@pytest.mark.parametrize("arguments", [r'{"path": "\ud83d"}', '{"n": 1e999}'])
def test_arguments_that_python_cannot_write_again(arguments):
    call = f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>'
    events, whole = events_of(call)
    for message in (blocks_of(events), whole):
        assert message["content"][0]["input"] == json.loads(arguments)


def test_a_named_tool_that_is_cut_stays_a_use_of_it():
    events, whole = events_of('{"path": "a', "length", tool_name="read")
    assert whole["stop_reason"] == "max_tokens"
    assert without_ids(whole)["content"] == [{"type": "tool_use", "name": "read", "input": {}}]
    fragments = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(fragments) == '{"path": "a'


def test_tools_that_are_required():
    events, whole = events_of('[{"name": "read", "parameters": {"path": "a"}}]', tool_choice="required")
    for message in (blocks_of(events), whole):
        assert message["stop_reason"] == "tool_use"
        assert without_ids(message)["content"] == [{"type": "tool_use", "name": "read", "input": {"path": "a"}}]


def test_a_stream_that_fails_ends_with_an_error():
    async def events():
        yield b"first"
        raise APIError("it took too long.", 504)

    async def body():
        stream = await EventStream.of(events(), failure=partial(failure, request_id="req_1"))
        return [chunk async for chunk in stream.body_iterator]

    first, last = asyncio.run(body())
    name, data = last.decode().removesuffix("\n\n").split("\n")
    error = {"type": "timeout_error", "message": "it took too long."}
    assert (first, name) == (b"first", "event: error")
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error, "request_id": "req_1"}


def test_a_call_that_is_cut_off_comes_back_as_text():
    cut = CALL[: CALL.index("b")]
    events, whole = events_of(cut, "length")
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert (starts, stops) == (["tool_use", "text"], [0, 1])
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert whole["content"] == [text(cut)]
    assert events_of(cut + "</tool_call>", "stop")[0][-2]["delta"]["stop_reason"] == "end_turn"
