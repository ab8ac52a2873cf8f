"""What coding agents meet on a server that was started with no flags but the model."""

import asyncio
import json
import logging

import httpx
import pytest

from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.app import create_app
from dflash_jax.serve.server import with_parsers
from dflash_jax.text.parsing import parsers_of, takes_tools
from tests.pairs import CHAT_TEMPLATE
from tests.serve.live import NAME

HERMES = (
    "{% if tools %}{{ tools }}{% endif %}<tool_call>\n{'name': ...}\n</tool_call>{% if enable_thinking %}{% endif %}"
)
CODER = "{% if tools %}{{ tools }}{% endif %}<tool_call>\n<function=NAME>\n</function>\n</tool_call><think>\n"


def test_parsers_by_the_template():
    assert parsers_of(HERMES) == ("qwen3", "hermes")
    assert parsers_of(CODER) == ("qwen3", "qwen3_coder")
    assert parsers_of(CHAT_TEMPLATE) == (None, "hermes")
    assert parsers_of(None) == (None, None)
    assert [takes_tools(template) for template in (HERMES, CODER, CHAT_TEMPLATE, None)] == [True, True, False, False]


def parsers(args):
    return args.reasoning_parser, args.tool_call_parser, args.enable_auto_tool_choice


def test_flags_come_before_the_template(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    assert parsers(with_parsers(ServeArgs(), CODER)) == ("qwen3", "qwen3_coder", True)
    assert parsers(with_parsers(ServeArgs(tool_call_parser="hermes"), CODER)) == ("qwen3", "hermes", True)
    off = ServeArgs(tool_call_parser="none", reasoning_parser="none")
    assert parsers(with_parsers(off, CODER)) == (None, None, False)
    assert "takes no tools" not in caplog.text
    assert parsers(with_parsers(ServeArgs(), CHAT_TEMPLATE)) == (None, "hermes", True)
    assert "none for reasoning, hermes for tool calls" in caplog.text
    assert caplog.text.count("takes no tools") == 1


class Down:
    """A client of an engine that is not there."""

    ready, cause = None, "the engine starts; ask again."


def ask(*requests):
    """Answers of a server without an engine."""
    app = create_app(ServerState(ServeArgs(served_model_name=("m",)), None, Down(), None, {}))

    async def answers():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(answers())


def test_a_refusal_leaves_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    messages = [{"role": "user", "content": "hi"}]
    missing, wrong, busy = ask(
        ("GET", "/v1/nothing", None),
        ("POST", "/v1/chat/completions", {"messages": messages, "top_p": 2}),
        ("POST", "/v1/chat/completions", {"messages": messages, "model": "other"}),
    )
    assert [answer.status_code for answer in (missing, wrong, busy)] == [404, 400, 404]
    lines = [record.getMessage() for record in caplog.records if record.name == "dflash_jax.serve.app"]
    assert lines[0].startswith("GET /v1/nothing: 404, '/v1/nothing' is not served")
    assert lines[1].startswith("POST /v1/chat/completions: 400, top_p=2.0 is not allowed")
    assert lines[2].startswith("POST /v1/chat/completions: 404, The model `other` does not exist")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_is_get_without_the_body(path):
    get, head = ask(("GET", path, None), ("HEAD", path, None))
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_who_finds_no_engine_may_ask_again():
    (answer,) = ask(("GET", "/health", None))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_answers_longer_than_the_model_take_what_is_left(client, live):
    """qwen-code and opencode ask for 32,000 tokens whatever the model."""
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=1_000_000, stop=["e"]
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_prompts_that_are_too_long_have_openais_code(live):
    body = {"prompt": [1] * 100_000, "max_tokens": 1}
    answer = httpx.post(f"{live.base}/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is" in error["message"]


UNSERVED = {"type": "object", "properties": {"a": {"type": "strin"}}}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": UNSERVED}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNSERVED}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
            "tools",
        ),
        ("/v1/completions", {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ("/v1/completions", {"regex": "a("}, "regex"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": UNSERVED}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": UNSERVED}}},
            "output_config.format.schema",
        ),
        ("/generate", {"sampling_params": {"json_schema": json.dumps(UNSERVED)}}, "sampling_params.json_schema"),
    ],
)
def test_a_refused_schema_is_named_as_the_client_named_it(live, path, fields, field):
    texts = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "hi"}, "/generate": {"text": "a"}}
    status, answer = live.post(path, texts.get(path, {"messages": MESSAGES, "max_tokens": 1}) | fields)
    assert status == 400
    assert answer["error"]["message"].startswith(f"{field} cannot be served (")
    assert answer["error"].get("param", field) == field
