"""Bodies of requests: what is accepted, what is refused, and what becomes of it."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.protocol import (
    APIError,
    ChatCompletionRequest,
    CompletionRequest,
    parse,
    sampling_params,
    unknown_fields,
)
from dflash_jax.serve.protocol.sampling import SamplingBody
from dflash_jax.text.parsing import OutputParser

LIMITS = SimpleNamespace(max_n=4, max_stop_strings=2, max_prompts=3, max_logprobs=5)
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat(**body) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"messages": HI, **body})


def completion(**body) -> CompletionRequest:
    return parse(CompletionRequest, {"prompt": "hi", **body})


def params(request, **defaults) -> SamplingParams:
    return sampling_params(request, defaults, LIMITS)


SHARED = {  # a value of a field of chats and completions, and what it becomes in SamplingParams
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "frequency_penalty": (-1, {"frequency_penalty": -1.0}),
    "presence_penalty": (2.0, {"presence_penalty": 2.0}),
    "n": (3, {"n": 3}),
    "seed": (-(2**63) + 1, {"seed": -(2**63) + 1}),
    "stop": (["a", "b"], {"stop": ("a", "b")}),
    "stop_token_ids": ([1, 2], {"stop_token_ids": (1, 2)}),
    "bad_words": (["x"], {"bad_words": ("x",)}),
    "logit_bias": ({"7": -100, "3": 1.5}, {"logit_bias": ((3, 1.5), (7, -100))}),
    "allowed_token_ids": ([4], {"allowed_token_ids": (4,)}),
    "min_tokens": (2, {"min_tokens": 2}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "no_stop_trim": (True, {"include_stop_str_in_output": True}),
    "prompt_logprobs": (2, {"prompt_logprobs": 2}),
    "speculation": (False, {"speculation": False}),
    "max_tokens": (9, {"max_tokens": 9}),
    "response_format": ({"type": "json_object"}, {"json_object": True}),
    "structured_outputs": ({"regex": "a+", "json": None, "json_object": False}, {"regex": "a+"}),
    "regex": ("a+", {"regex": "a+"}),
    "ebnf": ('root ::= "a"', {"grammar": 'root ::= "a"'}),
    "grammar": ('root ::= "a"', {"grammar": 'root ::= "a"'}),
    "json_schema": ({"type": "object"}, {"json": '{"type": "object"}'}),
    "repeat_penalty": (1.5, {"repetition_penalty": 1.5}),
    "return_meta_info": (True, {}),
    # these are for others than SamplingParams
    "model": ("m", {}),
    "best_of": (1, {}),
    "stream": (True, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {}),
    "truncate_prompt_tokens": (-1, {}),
    "cache_salt": ("s", {}),
    "priority": (0, {}),
    "request_id": ("r", {}),
    "rid": ("r", {}),
    "user": ("me", {}),
    "metadata": ({"a": "b"}, {}),
}
BODIES = {"chat": chat, "completion": completion}


@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("name", SHARED)
def test_shared_fields(make, name):
    value, becomes = SHARED[name]
    if becomes.keys() & {"json_object", "regex", "grammar", "json"}:
        structured = params(make(**{name: value})).structured_outputs
        assert {kind: getattr(structured, kind) for kind in becomes} == becomes
        return
    plain, changed = params(make()), params(make(**{name: value}))
    names = [name for name in SamplingParams.__dataclass_fields__ if getattr(changed, name) != getattr(plain, name)]
    assert {name: getattr(changed, name) for name in names} == becomes


def test_every_shared_field_has_a_case():
    assert SamplingBody.model_fields.keys() - SHARED.keys() == {"stream_options", "return_token_sources"}


WRONG = {
    "temperature": ["0.5.", "1e3", "nan", True, [], -1, float("nan"), float("inf"), 10**400],
    "top_p": ["x", 0, 1.1, False],
    "top_k": [1.5, "5.0", True, -2, 2**70],
    "min_p": [-0.1, 2, "-0.1"],
    "repetition_penalty": [0, "0", "one"],
    "repeat_penalty": [0, "one", True],
    "frequency_penalty": [2.1, "2.1", True],
    "presence_penalty": [-2.1, {}],
    "n": [0, -1, True, 1.5, "5", 5],
    "best_of": [2, "2"],
    "seed": [2**63, 1.5, "1.0", "9" * 19, True],
    "stop": [[""], 5, [5], ["a", "b", "c"], {}],
    "stop_token_ids": [5, [-1], [True], ["5"], [2**40]],
    "bad_words": [[""], [5]],
    "logit_bias": [[], {"5": "x"}, {"5": 101}, {"5": float("nan")}, {"x": 1}, {"5": True}, {"-1": 0.0}],
    "allowed_token_ids": [[], [-1], "5"],
    "min_tokens": [-1, "-1", 10**6],
    "max_tokens": [0, -1, "0", True, 1.5],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["yes"],
    "no_stop_trim": [1],
    "prompt_logprobs": [-1, 6, True, "6"],
    "response_format": ["text", {}, {"type": "xml"}, {"type": "json_schema", "json_schema": {}}, {"type": []}],
    "structured_outputs": [
        {}, {"json": {}, "regex": "a"}, {"structural_tag": "x"}, {"whitespace_pattern": " "}, {"choice": "abc"},
        {"choice": []}, {"choice": [1]}, {"json": "{"}, {"json": 5}, {"regex": ""}, {"regex": 5}, [], "json",
    ],
    "regex": ["", 5],
    "ebnf": ["", []],
    "grammar": [5, []],
    "json_schema": [5, ["a"], "{"],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, {}, 5],  # without stream
    "return_token_ids": [1],
    "return_token_sources": [True, "x"],  # without stream
    "speculation": ["no", 0],
    "truncate_prompt_tokens": [0, -2, "0"],
    "cache_salt": ["", 5, "\ud800"],
    "priority": [1, -1, "1"],
    "request_id": ["", 5, "x" * 257],
    "rid": [["a"], ""],
    "model": [5, "\ud800"],
    "use_beam_search": [True],
    "guided_json": [{"type": "object"}],
    "guided_regex": ["a"],
    "guided_choice": [["a"]],
    "guided_grammar": ["a"],
    "logits_processors": [["x"]],
    "thinking_token_budget": [5],
    "lora_path": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_400s_that_name_the_field(make, name):
    further = {"min_tokens": {"max_tokens": 5}}.get(name, {})
    for value in WRONG[name]:
        with pytest.raises(APIError) as caught:
            params(make(**{name: value}, **further))
        error = caught.value
        assert (error.status, error.type) == (400, "BadRequestError"), value
        assert (error.param or "").split(".")[0] == name, (value, error)
        assert error.message.startswith(name), error
        assert len(error.message) < 400


@pytest.mark.parametrize(
    ("make", "body", "param", "words"),
    [
        # ecosystem.md 1.3
        (chat, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (chat, {"stream": False, "return_token_sources": True}, "return_token_sources", "stream=true"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        (chat, {"logprobs": True, "top_logprobs": 6}, "top_logprobs", "limit of 5"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        (chat, {"logprobs": 1}, "logprobs", "boolean"),
        (chat, {"logprobs": "yes"}, "logprobs", "boolean"),
        (completion, {"logprobs": "five"}, "logprobs", "integer"),
        (completion, {"logprobs": True}, "logprobs", "integer"),
        (completion, {"logprobs": 6}, "logprobs", "limit of 5"),
        (chat, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=false"),
        (chat, {"n": 0}, "n", "at least|from 1"),
        (chat, {"n": 5}, "n", "limit of 4"),
        (chat, {"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling"),
        (chat, {"stop": ["a", "b", "c"]}, "stop", "3 strings exceeds this server's limit of 2"),
        (chat, {"tools": []}, "tools", "at least one tool"),
        (chat, {"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (chat, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (chat, {"tool_choice": NAMED}, "tool_choice", "needs tools"),
        (chat, {"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice.function.name", "'weather', which is not in"),
        (chat, {"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "'none', 'auto', 'required'"),
        (chat, {"tools": [CLOCK], "tool_choice": {"type": "custom", "function": {"name": "a"}}}, "tool_choice", "none"),
        (chat, {"tools": [{"type": "custom", "custom": {}}]}, "tools.0", "not supported"),
        (chat, {"tools": [{"function": {"name": ""}}]}, "tools.0.function.name", "non-empty"),
        (chat, {"tools": [{"function": {"name": "a", "parameters": 5}}]}, "tools.0.function.parameters", "object"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "has no schema"),
        (chat, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        # one demand at a time
        (chat, {"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf"),
        (chat, {"regex": "a", "response_format": {"type": "json_object"}}, "regex", "give one of them"),
        (chat, {"regex": "a", "tools": [CLOCK], "tool_choice": "required"}, "tool_choice", "give one of them"),
        (completion, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        # not served
        (chat, {"best_of": 2}, "best_of", "exceeds n=1"),
        (chat, {"modalities": ["text", "audio"]}, "modalities", "text"),
        (chat, {"audio": {"voice": "x"}}, "audio", "text"),
        (chat, {"functions": [{"name": "f"}]}, "functions", "use tools"),
        (chat, {"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        (chat, {"guided_json": {"type": "object"}}, "guided_json", "structured_outputs={'json'"),
        (chat, {"chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
        (chat, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "leave it out"),
        (chat, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "leave it out"),
        (chat, {"reasoning_effort": "extreme"}, "reasoning_effort", "'none'"),
        (chat, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (chat, {"messages": []}, "messages", "at least one"),
        (chat, {"messages": None}, "messages", "missing"),
        (completion, {"suffix": "x"}, "suffix", "leave it out"),
        (completion, {"prompt": None}, "prompt", "missing"),
        (completion, {"max_tokens": 0}, "max_tokens", "echo=true"),
    ],
)
def test_refusals(make, body, param, words):
    with pytest.raises(APIError, match=words) as caught:
        params(make(**body))
    assert caught.value.status == 400
    assert caught.value.param == param


def test_null_is_the_default():
    """Clients send null for whatever they leave open."""
    for make in (chat, completion):
        cls = type(make())
        nulls = dict.fromkeys([*cls.model_fields.keys() - {"messages", "prompt"}, *cls.unsupported, "user", "foo"])
        assert make(**nulls) == make()
        assert not make(**nulls).model_extra
        properties = cls.model_json_schema()["properties"]
        assert all({"type": "null"} in properties[name]["anyOf"] for name in nulls if name in properties)
    assert chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}).include_usage


def test_unknown_fields_are_kept():
    request = chat(foo={"a": 1}, user="me", store=True, use_beam_search=False, guided_json={})
    assert request.model_extra["foo"] == {"a": 1}
    assert unknown_fields(request) == ["foo"]


def test_neutral_values_ask_for_nothing():
    chat(modalities=["text"], function_call="none", use_beam_search=False, echo=False, functions=[], best_of=1)
    completion(suffix="", logits_processors=[], lora_path="")


def test_precedence():
    assert params(chat()).temperature == 1.0
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": None, "bos_token_id": 5}
    sampling = params(chat(top_k=0), **defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.95, 0, 1.0)
    assert params(chat(temperature=None), temperature=0.6).temperature == 0.6
    with pytest.raises(APIError, match="greedy"):
        params(chat(n=2), temperature=0)


def test_lengths_and_logprobs():
    assert params(chat()).max_tokens is None
    assert params(completion()).max_tokens == 16
    assert params(chat(max_tokens=5, max_completion_tokens=6)).max_tokens == 6
    assert params(chat(max_tokens=5)).max_tokens == 5
    assert params(chat()).logprobs is None
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert params(completion(logprobs=0)).logprobs == 0
    echo = completion(echo=True, logprobs=1, max_tokens=0)
    sampling = params(echo)
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 1, 1)
    assert echo.is_echo_only
    assert not completion(echo=True).is_echo_only
    assert params(completion(echo=True, logprobs=1, prompt_logprobs=3)).prompt_logprobs == 3
    assert params(completion(echo=True)).prompt_logprobs is None


def test_structured_outputs():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert json.loads(params(chat(response_format=schema)).structured_outputs.json) == SCHEMA
    assert params(chat(response_format={"type": "text"})).structured_outputs is None
    assert params(chat(response_format={"type": "text"}, regex="a")).structured_outputs.regex == "a"
    sampling = params(completion(structured_outputs={"choice": ["a", "b"], "disable_fallback": True}))
    assert sampling.structured_outputs.choice == ("a", "b")


def test_tool_choice():
    assert chat().parser_options() == {"tool_schemas": (), "tool_choice": "none", "tool_name": None}
    auto = chat(tools=[WEATHER])
    assert auto.parser_options() == {"tool_schemas": [WEATHER], "tool_choice": "auto", "tool_name": None}
    assert params(auto).structured_outputs is None
    named = chat(tools=[CLOCK, WEATHER], tool_choice=NAMED)
    assert named.parser_options()["tool_name"] == "weather"
    assert json.loads(params(named).structured_outputs.json) == SCHEMA
    assert list(json.loads(params(named).structured_outputs.json)["properties"]) == ["b", "a"]
    clock = params(chat(tools=[CLOCK], tool_choice={"function": {"name": "clock"}}))
    assert json.loads(clock.structured_outputs.json) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_required_is_what_the_parser_reads():
    request = chat(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(params(request).structured_outputs.json)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    weather, clock = schema["items"]["anyOf"]
    assert list(weather["properties"]) == weather["required"] == ["name", "parameters"]
    assert weather["properties"]["name"] == {"const": "weather"}
    assert weather["properties"]["parameters"] == SCHEMA
    assert clock["properties"]["name"] == {"const": "clock"}
    text = json.dumps([{"name": "weather", "parameters": {"b": 1}}])
    parsed = OutputParser(None, "hermes", **request.parser_options()).parse_all(text)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("weather", {"b": 1})]
    assert "maxItems" not in params(chat(tools=[CLOCK], tool_choice="required")).structured_outputs.json


def test_definitions_of_tools_move_to_the_root():
    def tool(name, definition):
        parameters = {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": definition}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("a", {"type": "string"}), tool("b", {"type": "string"})]
    schema = json.loads(params(chat(tools=tools, tool_choice="required")).structured_outputs.json)
    assert schema["$defs"] == {"P": {"type": "string"}}
    parameters = schema["items"]["anyOf"][1]["properties"]["parameters"]
    assert parameters == {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    tools[1] = tool("b", {"type": "integer"})
    with pytest.raises(APIError, match="define 'P' in \\$defs in two ways") as caught:
        params(chat(tools=tools, tool_choice="required"))
    assert caught.value.param == "tools"
    assert "$defs" in tools[0]["function"]["parameters"], "the request's own tools are left alone"


def test_template_kwargs():
    assert chat().template_kwargs({}) == {}
    request = chat(tools=[CLOCK], documents=[{"text": "t"}], reasoning_effort="none", chat_template_kwargs={"a": 1})
    kwargs = {"a": 1, "reasoning_effort": "none", "enable_thinking": False}
    fields = {"tools": [CLOCK], "documents": [{"text": "t"}]}
    assert request.template_kwargs({"enable_thinking": True, "b": 2}) == kwargs | fields | {"b": 2}
    explicit = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert explicit.template_kwargs({})["enable_thinking"] is True
    assert chat(reasoning_effort="high").template_kwargs({}) == {"reasoning_effort": "high"}
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_kwargs({"enable_thinking": True}) == {
        "enable_thinking": False
    }


def test_continuing_a_message_adds_no_generation_prompt():
    assert chat().add_generation_prompt
    request = chat(continue_final_message=True)
    assert not request.add_generation_prompt
    assert request.template_kwargs({}) == {"continue_final_message": True}
    assert not chat(continue_final_message=True, add_generation_prompt=False).add_generation_prompt


def test_ids_and_stream_options():
    assert (chat().given_id, chat(rid="a").given_id, chat(rid="a", request_id="b").given_id) == (None, "a", "b")
    usage = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert usage.include_usage
    assert usage.continuous_usage_stats
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage_stats
    assert chat(stream=True, return_token_sources=True).return_token_sources


def test_json_as_servers_decode_it():
    body = msgspec.json.encode({"messages": HI, "temperature": 1, "logit_bias": {"5": 1}, "max_tokens": 4})
    assert params(parse(ChatCompletionRequest, msgspec.json.decode(body))).max_tokens == 4
    assert ChatCompletionRequest.model_validate_json(body).temperature == 1.0
