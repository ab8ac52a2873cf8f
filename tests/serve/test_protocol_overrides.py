"""What overrides fields of a body: a forced tool the text's format, and an operator's limit the tokens asked for."""

import pytest

from dflash_jax.serve.protocol import GenerateRequest, generate_sampling_params, parse, sampling_params
from tests.serve.test_protocol import CLOCK, LIMITS, NAMED, chat, completion, params


@pytest.mark.parametrize("choice", ["required", NAMED | {"function": {"name": "clock"}}])
def test_a_forced_tool_overrides_the_format_of_the_text(choice):
    tools = {"tools": [CLOCK], "tool_choice": choice}
    assert params(chat(**tools, response_format={"type": "json_object"})) == params(chat(**tools))


def test_an_operators_limit_of_tokens_holds_whatever_is_asked_for():
    for request in (chat(), chat(max_tokens=12), completion(max_tokens=12)):
        assert sampling_params(request, {}, LIMITS, 7).max_tokens == 7
    assert sampling_params(chat(max_tokens=5), {}, LIMITS, 7).max_tokens == 5
    bodies = ({"text": "a"}, {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3}})
    requests = [parse(GenerateRequest, body) for body in bodies]
    limited = [generate_sampling_params(request, {}, LIMITS, 7) for request in requests]
    assert [[p.max_tokens for p in of_prompts] for of_prompts in limited] == [[7], [3, 3]]


def test_a_default_of_tokens_is_for_chats_that_ask_for_none():
    assert params(chat(), max_new_tokens=7).max_tokens == 7
    assert params(chat(max_tokens=9), max_new_tokens=7).max_tokens == 9
    assert params(completion(), max_new_tokens=7).max_tokens == 16
