"""Errors as clients read them: bounded, encodable, and the only thing that a bad body can raise."""

import math

import msgspec
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_jax.base.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from dflash_jax.serve.protocol import (
    APIError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    completion_prompts,
    error_body,
    generate_sampling_params,
    of_exception,
    parse,
    sampling_params,
    unknown_fields,
    validation_error,
)
from dflash_jax.serve.protocol.errors import shown
from tests.serve.test_protocol import HI, LIMITS

MODELS = [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, GenerateRequest]
MINIMAL = {
    ChatCompletionRequest: {"messages": HI, "tools": [{"function": {"name": "f"}}]},
    CompletionRequest: {"prompt": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    GenerateRequest: {"text": "a"},
}


def deep(levels: int = 100_000) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def serve(model, body) -> None:
    """Do all that happens to a body before the engine sees it."""
    request = parse(model, body)
    unknown_fields(request)
    if isinstance(request, GenerateRequest):
        generate_sampling_params(request, {}, LIMITS)
        completion_prompts(request, LIMITS)
    elif isinstance(request, ChatCompletionRequest | CompletionRequest):
        sampling_params(request, {"temperature": 0.6}, LIMITS)
        request.given_id, request.include_usage, request.continuous_usage_stats  # noqa: B018 -- they must not raise
    if isinstance(request, ChatCompletionRequest | TokenizeRequest):
        request.template_kwargs({})
    if isinstance(request, ChatCompletionRequest):
        request.parser_options()
    if isinstance(request, CompletionRequest):
        completion_prompts(request, LIMITS)


def refusal(model, body) -> APIError:
    with pytest.raises(APIError) as caught:
        serve(model, body)
    return caught.value


def test_body():
    error = APIError("no.", 404, param="model")
    assert error_body(error) == {"error": {"message": "no.", "type": "NotFoundError", "param": "model", "code": 404}}
    assert str(error) == "no."
    assert APIError("no.", 401).type == "UnauthorizedError"
    assert APIError("no.", 503).type == "ServiceUnavailableError"
    assert (APIError("no.", 422).type, APIError("no.", 507).type) == ("BadRequestError", "InternalServerError")
    assert APIError("no.", 400, type="UnprocessableEntityError").type == "UnprocessableEntityError"


def test_whatever_is_said_is_short_and_encodable():
    error = APIError("a\ud800" + "b" * 10**6, param="\udfff" + "c" * 10**6)
    assert len(msgspec.json.encode(error_body(error))) < 11_000
    assert error.message.startswith("a\\ud800b")
    assert error.param.startswith("\\udfffc")
    assert shown("a") == "'a'"
    assert len(shown([["x" * 300] * 9] * 9)) == 200


@pytest.mark.parametrize(
    ("error", "status", "kind", "words"),
    [
        (RequestError("n=0 is wrong."), 400, "BadRequestError", "n=0 is wrong."),
        (QueueFullError("full."), 503, "ServiceUnavailableError", "full."),
        (EngineDeadError("dead."), 503, "ServiceUnavailableError", "dead."),
        (APIError("x.", 404), 404, "NotFoundError", "x."),
        (ConfigError("secret"), 500, "InternalServerError", "log"),
        (KeyError("secret"), 500, "InternalServerError", "log"),
    ],
    ids=repr,
)
def test_of_exception(error, status, kind, words):
    api_error = of_exception(error)
    assert (api_error.status, api_error.type) == (status, kind)
    assert words in api_error.message
    assert "secret" not in api_error.message


def test_validation_of_pydantic_and_of_fastapi():
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"temperature": "hot", "n": True})
    api_error = of_exception(caught.value)
    assert api_error.status == 400
    assert api_error.param == "temperature"
    assert api_error.message == (
        "temperature='hot' is not allowed: input should be a valid number. "
        "n=True is not allowed: input should be a valid integer. prompt is missing; give it."
    )
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    fastapi = validation_error(RequestValidationError(errors).errors())
    assert (fastapi.message, fastapi.param) == (api_error.message, api_error.param)
    broken = {
        "type": "json_invalid",
        "loc": ("body", 5),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": "x"},
    }
    assert validation_error([broken]).message == "the body is not valid JSON (x); correct it."
    assert validation_error([broken]).param is None
    missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
    assert validation_error([missing]).message == "the body is missing; give it."


@pytest.mark.parametrize("body", [None, 5, "x", [], [{}]], ids=repr)
def test_bodies_that_are_no_object(body):
    for model in MODELS:
        error = refusal(model, body)
        assert error.message.endswith("is not allowed: it must be a JSON object.")
        assert error.param is None


NUMBERS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "min_tokens",
    "max_tokens",
    "top_logprobs",
    "priority",
]
NUMBERS += ["ignore_eos", "stream", "logprobs", "speculation"]


def test_many_errors_are_cut():
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": HI} | dict.fromkeys(NUMBERS, "\N{PILE OF POO}" * 10**6))
    api_error = of_exception(caught.value)
    assert api_error.message.endswith(" And 4 more errors.")
    assert api_error.message.count(" is not allowed: ") == 10
    assert len(msgspec.json.encode(error_body(api_error))) < 20_000


HUGE = {
    "messages": [
        "x" * 5_000_000,
        ["x" * 5_000_000],
        [{"role": "x" * 5_000_000, "content": 5}],
        [{"role": "user", "content": [5] * 2_000_000}],
        [{"role": "user", "content": {f"k{i}": "v" * 100 for i in range(40_000)}}],
        [{"role": "user", "content": deep()}],
    ],
    "temperature": ["x" * 5_000_000, ["x"] * 1_000_000, deep()],
    "stop": [[5] * 2_000_000, [["x" * 1000] * 5000], deep()],
    "stop_token_ids": [["x"] * 2_000_000, [-1] * 2_000_000],
    "logit_bias": [{f"{i}": "x" for i in range(400_000)}, {"9" * 5_000_000: 1}, {"x" * 5_000_000: "y" * 5_000_000}],
    "bad_words": [["x" * 1000] * 5000 + [""]],
    "response_format": [{"type": "x" * 5_000_000}],
    "structured_outputs": [
        {"x" * 5_000_000: 1},
        {"json": deep()},
        {"choice": [1] * 1_000_000},
        {"json": "[" * 1_000_000},
    ],
    "tools": [[5] * 2_000_000, [{"function": {"name": "x\n" * 2_000_000}}], deep()],
    "tool_choice": ["x" * 5_000_000, {"function": {"name": "x" * 5_000_000}}],
    "chat_template": ["x" * 5_000_000],
    "chat_template_kwargs": [deep(), ["x" * 5_000_000]],
    "request_id": ["x" * 5_000_000],
    "model": ["\ud800" * 1_000_000],
    "guided_json": [{"x": "y" * 5_000_000}],
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_bodies_make_small_errors(name):
    for value in HUGE[name]:
        body = {**MINIMAL[ChatCompletionRequest], name: value}
        error = refusal(ChatCompletionRequest, body)
        assert "more errors" not in error.message
        assert len(msgspec.json.encode(error_body(error))) < 2_000


@pytest.mark.parametrize(
    "prompt", [[5] * 10**6 + ["x"], ["x"] * 10**6 + [5], [[1]] * 10**6 + [["y"] * 9], deep()], ids=range(4)
)
def test_huge_prompts_make_small_errors(prompt):
    error = refusal(CompletionRequest, {"prompt": prompt})
    assert len(msgspec.json.encode(error_body(error))) < 2_000


SPECIAL = [
    math.nan, math.inf, -math.inf, 1e308, 2**63, -(2**63) - 1, 10**400, -0.0, True, False, "", "\ud800", "\x00",
    "abc", "\N{PILE OF POO}" * 300, [], {}, [[]], [None], {"": None}, {"\ud800": "\ud800"}, {"type": "function"},
    {"type": "json_schema", "json_schema": {"schema": {"a": 10**4000}}}, {"json": {"a": math.nan}}, {"regex": 10**4000},
    {"function": {"name": "f"}}, {"function": {"name": "\ud800"}}, {"type": "json_object"}, {"choice": ["\ud800"]},
    {"7": 10**4000}, {"9" * 5000: 1}, "required", "none", [{"role": "user"}], [{"role": "\ud800", "content": "\udfff"}],
]  # fmt: skip
# Of more digits than Python writes, so that even to say what is wrong needs care. (Hypothesis could not show them.)
LONG = 10**5000
UNPRINTABLE = [LONG, [LONG], {"7": LONG}, {"regex": LONG}, {"json": {"a": LONG}}, {"choice": [LONG]}]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None), max_size=8),
    st.sampled_from(SPECIAL),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.sampled_from(
        ["type", "function", "name", "json", "regex", "choice", "role", "content", "text", "tool_calls", "arguments"]
    ), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def only_api_errors(model, body) -> None:
    try:
        serve(model, body)
        return
    except APIError as caught:
        error = caught
    assert error.status == 400
    assert len(msgspec.json.encode(error_body(error))) < 20_000


@pytest.mark.parametrize("model", MODELS)
def test_special_values_everywhere(model):
    names = [*model.model_fields, *model.unsupported, "foo", "\ud800"]
    for name in names:
        for value in [*SPECIAL, *UNPRINTABLE, deep(10_000)]:
            only_api_errors(model, {**MINIMAL[model], name: value})


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_json_for_any_field(model, data):
    names = st.sampled_from([*model.model_fields, *model.unsupported]) | st.text(max_size=4)
    body = data.draw(st.dictionaries(names, VALUES, max_size=4))
    only_api_errors(model, data.draw(st.sampled_from([MINIMAL[model] | body, body])))
    only_api_errors(GenerateRequest, {"text": "a", "sampling_params": body})
