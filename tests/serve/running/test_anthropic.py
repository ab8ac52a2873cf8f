"""Anthropic's own client against the server: messages, streams, tools, thinking, counts and errors."""

import json

import anthropic
import httpx
import pytest

from tests.serve.live import NAME
from tests.serve.running.test_openai import CALL, LICENCE, REASONED, says

HI = [{"role": "user", "content": "Hi"}]
COLD = {"temperature": -1.0}  # which the client itself has no argument for
WEATHER = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


@pytest.fixture(scope="module")
def claude(live):
    """Anthropic's client of the server."""
    with anthropic.Anthropic(base_url=live.base, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client, messages=HI, **options):
    return client.messages.create(model=NAME, messages=messages, **{"max_tokens": 200} | options)


def streamed(client, messages=HI, **options):
    """The message that the client's helper makes of a stream, and the types of the events."""
    with client.messages.stream(model=NAME, messages=messages, **{"max_tokens": 200} | options) as stream:
        raw = [event.type for event in stream]
        return stream.get_final_message(), raw


def test_a_message_is_the_chat_that_it_asks_for(claude, client):
    options = {"system": LICENCE, "extra_body": {"temperature": 0}}
    answer = ask(claude, max_tokens=12, **options)
    (block,) = answer.content
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", NAME, "max_tokens")
    assert answer.id.startswith("msg_")
    assert answer._request_id
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "system", "content": LICENCE}, *HI], temperature=0, max_tokens=12
    )
    assert block.text == chat.choices[0].message.content
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (12, 0)
    message, events = streamed(claude, max_tokens=12, **options)
    assert (message.content[0].text, message.stop_reason) == (block.text, "max_tokens")
    assert message.usage.output_tokens == 12
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert events.count("text") > 1  # it comes in pieces


def test_tools_there_and_back(claude):
    for create in (ask, lambda *args, **options: streamed(*args, **options)[0]):
        first = create(claude, tools=[WEATHER], extra_body=says(f"Let me see.\n{CALL}"))
        words, call = first.content
        assert (words.text, first.stop_reason) == ("Let me see.", "tool_use")
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome", "days": 2})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
        turns = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert create(claude, turns, tools=[WEATHER], extra_body=says("Sun.")).content[0].text == "Sun."


def test_thinking_out_and_back_in(claude):
    options = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": says(REASONED)}
    answers = [ask(claude, **options), streamed(claude, **options)[0]]
    for answer in answers:
        thinking, words = answer.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Rome it is.\n")
        assert thinking.signature
        assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
        assert (words.text, answer.stop_reason) == ("Go to Rome.", "end_turn")
    turns = [*HI, {"role": "assistant", "content": answers[1].content}, {"role": "user", "content": "Why?"}]
    assert ask(claude, turns, **options | {"extra_body": says("So.")}).content[0].text == "So."


def test_a_stop_sequence(claude):
    options = {"stop_sequences": ["never", "STOP"], "extra_body": says("ab STO ab STOP cd")}
    for answer in (ask(claude, **options), streamed(claude, **options)[0]):
        assert answer.content[0].text == "ab STO ab "
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")


def test_tokens_are_counted_as_they_are_used_and_shared_whatever_the_billing_header(claude):
    licence = " ".join([LICENCE] * 40)
    for turn in ("first", "second"):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn}"}
        system = [billing, {"type": "text", "text": licence, "cache_control": {"type": "ephemeral"}}]
        usage = ask(claude, system=system, max_tokens=1).usage
        counted = claude.messages.count_tokens(model=NAME, messages=HI, system=system).input_tokens
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens > usage.input_tokens
    with claude.messages.stream(model=NAME, messages=HI, system=system, max_tokens=1) as stream:
        started = next(iter(stream)).message.usage
    assert (started.input_tokens, started.cache_read_input_tokens) == (
        usage.input_tokens,
        usage.cache_read_input_tokens,
    )


def test_what_claude_code_sends(live):
    """The shape of a recorded request: Anthropic's own tools, betas, and more tokens than the model has."""
    tool = {"name": "Bash", "description": "Runs.", "input_schema": {"$schema": "x", "type": "object"}}
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": NAME,
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.331; cc_entrypoint=cli; cch=0;"},
            {"type": "text", "text": "You are a coding agent.", **ephemeral},
            {"type": "text", "text": "Answer briefly.", **ephemeral},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "system", "content": "Now is 2026."},
            {"role": "user", "content": [{"type": "text", "text": "Hi", **ephemeral}]},
        ],
        "tools": [tool, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"},
    } | says("Hello.")
    headers = {"x-api-key": "x", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    for _ in range(2):
        answer = httpx.post(f"{live.base}/v1/messages?beta=true", json=body, headers=headers, timeout=120)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        deltas = set(names[3:-3])
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert deltas == {"content_block_delta"}
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert live.log.read_text().count("tools that only Anthropic has: web_search_20250305") == 1


def test_errors_have_anthropics_form(claude, live):
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude", messages=HI, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(claude, extra_body=COLD)
    error = bad.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith("temperature=-1")
    assert error["request_id"] == bad.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences=99 strings exceeds"):
        ask(claude, stop_sequences=["a"] * 99)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*4096"):
        ask(claude, system="word " * 9000)
    for path, body, status in (
        ("/v1/messages", b"{", 400),
        ("/v1/messages", json.dumps({"messages": HI}).encode(), 400),
        ("/v1/messages/batches", b"{}", 404),
    ):
        code, answer = live.ask("POST", path, body)
        assert (code, json.loads(answer)["type"]) == (status, "error")
    assert live.ask("GET", "/v1/messages", None)[0] == 405
    assert live.post("/v1/nothing", {})[1]["error"]["code"] == 404  # other paths keep OpenAI's form
    header = {"x-request-id": "mine"}
    with pytest.raises(anthropic.BadRequestError) as named:
        ask(claude, extra_body=COLD, extra_headers=header)
    assert named.value.body["request_id"] == "mine"
    answer = ask(claude, max_tokens=1, extra_headers=header)
    assert (answer.id, answer._request_id) == ("msg_mine", "mine")
