"""OpenAI's own client against `/v1/responses`: texts, streams, tools, formats, errors, and what Codex sends."""

import json

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.serve.live import NAME, Thing, says

LICENCE = "You may reproduce and distribute copies of the"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONED = "<think>Rome.</think>Go!"
TIME = {"type": "function", "name": "get_time", "parameters": None, "strict": False}
CODEX = {  # the keys and kinds of what Codex 0.169 sends
    "model": NAME,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Permissions."}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Environment."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LICENCE}]},
    ],
    "tools": [
        TIME | {"name": "exec_command", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [WEATHER, TIME]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-thread",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def respond(client, prompt=LICENCE, **options):
    return client.responses.create(model=NAME, input=prompt, **{"max_output_tokens": 200} | options)


def check_whole(response):
    """A response has all that OpenAI's types ask for."""
    Response.model_validate(response.model_dump(by_alias=True, warnings=False))


def named_events(live, body):
    """The events of a stream; each line and name must be as OpenAI sends them."""
    with httpx.stream("POST", f"{live.base}/v1/responses", json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = b"".join(answer.iter_raw()).split(b"\n\n")
    assert blocks.pop() == b""
    events = []
    for block in blocks:
        name, data = block.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response(client):
    response = respond(client, temperature=0, max_output_tokens=12, metadata={"a": "b"}, instructions=None)
    check_whole(response)
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", NAME, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.max_output_tokens, response.temperature) == ({"a": "b"}, 12, 0)
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": LICENCE}], temperature=0, max_tokens=12
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert response.usage.total_tokens == chat.usage.total_tokens
    as_items = [{"role": "user", "content": [{"type": "input_text", "text": LICENCE}]}]
    assert respond(client, as_items, temperature=0, max_output_tokens=12).output_text == response.output_text
    whole = respond(client, extra_body=says("Done."))
    check_whole(whole)
    assert (whole.status, whole.output_text, whole.incomplete_details) == ("completed", "Done.", None)


def test_cached_tokens_of_a_second_call(client):
    text = "A prompt of several pages. " * 30
    first, second = (respond(client, text, max_output_tokens=2).usage for _ in range(2))
    assert first.input_tokens_details.cached_tokens == 0
    assert second.input_tokens // 2 < second.input_tokens_details.cached_tokens < second.input_tokens


def test_a_stream_adds_up(client, live):
    options = {"temperature": 0, "max_output_tokens": 12}
    whole = respond(client, **options)
    events = list(respond(client, stream=True, **options))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12
    raw = named_events(live, {"input": LICENCE} | options)
    assert [event["type"] for event in raw] == [event.type for event in events]


def test_the_stream_helper(client):
    options = {"tools": [WEATHER, TIME], "extra_body": says(REASONED + CALL)}
    with client.responses.stream(model=NAME, input="Hi", max_output_tokens=200, **options) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    check_whole(response)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert kinds.count("response.output_item.done") == 3
    assert (response.output_text, response.output[0].content[0].text) == ("Go!", "Rome.")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    same = respond(client, "Hi", **options)
    assert [item.type for item in same.output] == [item.type for item in response.output]
    assert same.output_text == response.output_text


def test_parse_into_a_model(client, tight):
    extra = {"logit_bias": tight, "seed": 2}
    options = {"input": "Hi", "text_format": Thing, "max_output_tokens": 200, "extra_body": extra}
    thing = client.responses.parse(model=NAME, **options).output_parsed
    assert isinstance(thing, Thing)
    with client.responses.stream(model=NAME, **options) as stream:
        assert stream.get_final_response().output_parsed == thing


def test_a_tool_and_its_result(client):
    tools = [{"type": "namespace", "name": "sky", "description": "?", "tools": [WEATHER]}, {"type": "web_search"}]
    first = respond(client, "Hi", tools=tools, extra_body=says(CALL))
    check_whole(first)
    (call,) = first.output
    assert (call.type, call.name, call.namespace) == ("function_call", "get_weather", "sky")
    assert json.loads(call.arguments)["city"] == "Rome"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    assert respond(client, items, tools=tools, extra_body=says("Sun.")).output_text == "Sun."


def test_forced_tools(client, tight):
    options = {"tools": [TIME, WEATHER], "extra_body": {"logit_bias": tight, "seed": 1}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    for choice in ({"type": "function", "name": "get_weather"}, allowed):
        call = respond(client, "Hi", tool_choice=choice, parallel_tool_calls=False, **options).output[0]
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_what_codex_sends(live):
    events = named_events(live, CODEX | {"max_output_tokens": 200} | says(REASONED + CALL))
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert events[-1]["response"]["output"] == done
    assert events[-1]["response"]["usage"]["input_tokens"] > 0
    result = {"type": "function_call_output", "call_id": done[-1]["call_id"], "output": "sunny"}
    events = named_events(live, CODEX | says("Sun.") | {"input": [*CODEX["input"], *done, result]})
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Sun."
    assert live.log.read_text().count("tools of type 'web_search' are passed over") == 1


def test_errors_are_those_of_a_chat(client, live):
    with pytest.raises(openai.BadRequestError, match="stores no answers, send the items") as refused:
        respond(client, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="max_output_tokens=0"):
        respond(client, max_output_tokens=0)
    with pytest.raises(openai.BadRequestError, match="Invalid type: nothing"):
        respond(client, text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}})
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="Hi")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context length"):
            respond(client, LICENCE * 1000, stream=stream)
    assert live.post("/v1/responses", {"model": NAME})[1]["error"]["param"] == "input"


def test_the_clients_id_is_told(live):
    headers = {"x-request-id": "mine"}
    answer = httpx.post(f"{live.base}/v1/responses", json={"input": "Hi", "max_output_tokens": 1}, headers=headers)
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "resp_mine")
