"""Prompts, messages and the bodies of /generate, /tokenize and /detokenize."""

import pytest

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.protocol import (
    APIError,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    completion_prompts,
    fit_prompt,
    generate_sampling_params,
    parse,
)
from tests.serve.test_protocol import CLOCK, HI, LIMITS, chat, completion


def generate(sampling: object, **body) -> list[SamplingParams]:
    request = parse(GenerateRequest, {"text": "hi", "sampling_params": sampling, **body})
    return generate_sampling_params(request, {}, LIMITS)


def serve(body: dict) -> None:
    request = parse(GenerateRequest, body)
    completion_prompts(request, LIMITS)
    generate_sampling_params(request, {}, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 0], [[1, 0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt, prompts):
    assert completion_prompts(completion(prompt=prompt), LIMITS) == prompts


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", ""], [[1], []], [True], [-1], [1, "a"], ["a", 1], [[1], [1.0]], [[True]], [2**31], 5, {}]
    + [True, [None], [[["a"]]], [{}], [float("nan")]],
    ids=repr,
)
def test_prompts_that_are_none(prompt):
    with pytest.raises(APIError) as caught:
        completion(prompt=prompt)
    assert caught.value.param.split(".")[0] == "prompt"


def test_number_of_prompts():
    with pytest.raises(APIError, match="4 prompts, more than 3"):
        completion_prompts(completion(prompt=["a"] * 4), LIMITS)
    ids = [*range(100_000)]
    assert completion_prompts(completion(prompt=ids), LIMITS) == [ids]


def test_fit_prompt():
    def fit(length, keep=None, max_tokens=None):
        return fit_prompt(range(length), truncate_prompt_tokens=keep, max_tokens=max_tokens, max_model_len=10)

    assert fit(9) == [*range(9)]
    assert fit(9, max_tokens=10) == [*range(9)]  # the engine gives what is left
    assert fit(20, keep=3) == [17, 18, 19]
    assert fit(2, keep=3) == [0, 1]
    assert fit(20, keep=-1) == [*range(11, 20)]
    assert fit(20, keep=-1, max_tokens=4) == [*range(14, 20)]
    assert fit(20, keep=-1, max_tokens=10) == [19]
    assert fit(20, keep=-1, max_tokens=32_000) == [19]
    assert fit(9, max_tokens=32_000) == [*range(9)]
    for arguments in ((10,), (20, 10), (20, None, 1)):
        with pytest.raises(
            APIError, match=r"maximum context length is 10 tokens. However, the prompt has \d+"
        ) as caught:
            fit(*arguments)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_generate():
    sampling = {
        "max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.1, "frequency_penalty": 1, "presence_penalty": -1, "sampling_seed": 3, "stop": "a",
        "stop_token_ids": [1], "logit_bias": {"1": 1}, "ignore_eos": True, "skip_special_tokens": False,
        "no_stop_trim": True, "regex": "a", "n": 1,
    }  # fmt: skip
    [params] = generate(sampling, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
    assert params == SamplingParams(
        max_tokens=5, min_tokens=1, temperature=0.0, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1,
        frequency_penalty=1.0, presence_penalty=-1.0, seed=3, stop="a", stop_token_ids=[1], logit_bias={1: 1},
        ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, logprobs=2, prompt_logprobs=2,
        structured_outputs=params.structured_outputs,
    )  # fmt: skip
    assert params.structured_outputs.regex == "a"
    assert [p.prompt_logprobs for p in generate({}, return_logprob=True)] == [None]
    assert generate({})[0].max_tokens == 128
    assert generate(dict.fromkeys(["max_new_tokens", "stop", "n", "regex"])) == generate({}) == generate(None)
    assert generate({"json_schema": "{}"})[0].structured_outputs.kind == "json"
    batch = {"text": ["a", "b"]}
    assert [p.max_tokens for p in generate([{"max_new_tokens": 1}, {}], **batch)] == [1, 128]
    assert [p.max_tokens for p in generate({"max_new_tokens": 1}, **batch)] == [1, 1]


@pytest.mark.parametrize(
    ("body", "prompts", "is_batch"),
    [
        ({"text": "a"}, ["a"], False),
        ({"text": ["a"]}, ["a"], True),
        ({"input_ids": [1, 2]}, [[1, 2]], False),
        ({"input_ids": [[1], [2]]}, [[1], [2]], True),
        ({"input_ids": [1], "text": None, "rid": "x"}, [[1]], False),
    ],
)
def test_generate_prompts(body, prompts, is_batch):
    request = parse(GenerateRequest, body)
    assert completion_prompts(request, LIMITS) == prompts
    assert request.is_batch is is_batch
    assert len(generate_sampling_params(request, {}, LIMITS)) == len(prompts)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [1]}, "text"),
        ({"text": [[1]]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids.0"),
        ({"text": ["a"] * 4}, "text"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": "a", "rid": ["\ud800"]}, "rid.0"),
        ({"text": "a", "rid": ""}, "rid.0"),
        ({"text": ["a", "b"], "rid": "x"}, "rid"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "five"}}, "sampling_params.0.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"sampling_seed": -(2**63)}}, "sampling_seed"),
        ({"text": "a", "sampling_params": {"n": 9}}, "n"),
        ({"text": "a", "sampling_params": {"n": 2, "temperature": 0}}, "n"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"text": "a", "sampling_params": {"json_schema": 5}}, "json_schema"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "top_logprobs_num": 6, "return_logprob": True}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
    ids=str,
)
def test_generate_refusals(body, param):
    with pytest.raises(APIError) as caught:
        serve(body)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_tokenize():
    assert parse(TokenizeRequest, {"prompt": "a"}).add_special_tokens is None
    assert parse(TokenizeRequest, {"prompt": ""}).prompt == ""
    chat_ = parse(TokenizeRequest, {"messages": HI, "tools": [CLOCK], "continue_final_message": True})
    assert chat_.template_kwargs({}) == {"tools": [CLOCK], "continue_final_message": True}
    assert parse(DetokenizeRequest, {"tokens": [1, 2]}).tokens == [1, 2]
    for cls, body in (
        (TokenizeRequest, {}),
        (TokenizeRequest, {"prompt": "a", "messages": HI}),
        (TokenizeRequest, {"prompt": ["a"]}),
        (TokenizeRequest, {"messages": HI, "chat_template": "x"}),
        (DetokenizeRequest, {}),
        (DetokenizeRequest, {"tokens": [-1]}),
        (DetokenizeRequest, {"tokens": "1"}),
    ):
        with pytest.raises(APIError):
            parse(cls, body)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "x"}'}}


def called(arguments) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("message", "becomes"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "critic", "content": "", "name": "n"}, {"role": "critic", "content": "", "name": "n"}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"text": "c", "cache": 1}]},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "abc"]},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        (
            {
                "role": "assistant",
                "content": "a",
                "refusal": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
            },
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": None},
            {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"},
        ),
        ({"role": "tool", "content": "5", "tool_call_id": "c"}, {"role": "tool", "content": "5", "tool_call_id": "c"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"b": 1, "a": "x"}}}],
            },
        ),
        (called(""), called({})),
        (called(None), called({})),
        (called({"a": 1}), called({"a": 1})),
        ({"role": "user", "content": "a", "custom": {"x": 1}}, {"role": "user", "content": "a", "custom": {"x": 1}}),
    ],
    ids=str,
)
def test_messages(message, becomes):
    assert chat(messages=[message]).messages == [becomes]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("hi", "", "is no message"),
        ({"content": "a"}, ".role", "must be a string"),
        ({"role": 5}, ".role", "must be a string"),
        ({"role": ""}, ".role", "must be a string"),
        ({"role": "user", "content": 5}, ".content", "a text, or a list of parts"),
        ({"role": "user", "content": {"text": "a"}}, ".content", "a text, or a list of parts"),
        ({"role": "user", "content": [5]}, ".content.0", "is no part"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content.0.type", "'image_url' is not supported"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content.0.type", "'input_audio' is not supported"),
        ({"role": "user", "content": [{"type": ["text"]}]}, ".content.0.type", "not supported"),
        ({"role": "user", "content": ["a", {"type": "text"}]}, ".content.1.text", "must be a string"),
        ({"role": "assistant", "reasoning": 5}, ".reasoning", "must be a string"),
        ({"role": "assistant", "reasoning_content": []}, ".reasoning_content", "must be a string"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, ".tool_call_id", "must be a string"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call", "use tool_calls"),
        ({"role": "assistant", "audio": {"id": "x"}}, ".audio", "give text"),
        ({"role": "assistant", "tool_calls": {}}, ".tool_calls", "a list of calls"),
        ({"role": "assistant", "tool_calls": [{}]}, ".tool_calls.0", "is no tool call"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, ".tool_calls.0", "is no tool call"),
        (called("{"), ".tool_calls.0.function.arguments", "not valid JSON"),
        (called("[" * 100_000), ".tool_calls.0.function.arguments", "not valid JSON"),
        (called("5"), ".tool_calls.0.function.arguments", "JSON object"),
        (called(5), ".tool_calls.0.function.arguments", "JSON object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_messages_that_are_none(message, param, words):
    with pytest.raises(APIError, match=words) as caught:
        chat(messages=[*HI, message])
    assert caught.value.param == f"messages.1{param}"
    assert len(caught.value.message) < 500
