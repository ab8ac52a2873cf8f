"""Tools reach the template in one order of keys, so that a client's hash map does not cost the prefix cache."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.serve.protocol import APIError, ChatCompletionRequest, parse
from dflash_jax.serve.protocol.tools import check_tools

EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Replace text in a file",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Of the file"},
                "edits": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
                        "required": ["old", "new"],
                    },
                },
                "mode": {
                    "anyOf": [{"type": "string", "enum": ["z", "a"]}, {"type": "null"}],
                    "default": {"b": 1, "a": 2},
                },
                "all": {"type": "boolean"},
            },
            "required": ["path", "edits"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def shuffled(value, rng):
    """Equal JSON with the keys of all objects but data in another order."""
    if isinstance(value, list):
        return [shuffled(part, rng) for part in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    rng.shuffle(keys)
    return {key: value[key] if key == "default" else shuffled(value[key], rng) for key in keys}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_keys_does_not_reach_the_prompt(seed):
    ordered = str(check_tools([EDIT]))
    again = check_tools([shuffled(EDIT, random.Random(seed))])
    assert str(again) == ordered
    assert again == [EDIT]  # nothing is lost or added


def test_the_order_is_that_of_training_and_of_required():
    (tool,) = check_tools([shuffled(EDIT, random.Random(1))])
    function = tool["function"]
    assert list(tool) == ["type", "function"]
    assert list(function) == ["name", "description", "parameters"]
    schema = function["parameters"]
    assert list(schema) == ["type", "properties", "required", "$schema", "additionalProperties"]
    assert list(schema["properties"]) == ["path", "edits", "all", "mode"]
    assert list(schema["properties"]["edits"]["items"]["properties"]) == ["old", "new"]
    assert schema["properties"]["mode"]["anyOf"][0] == {"type": "string", "enum": ["z", "a"]}


@pytest.mark.parametrize("parameters", [{"properties": 5, "required": {"a": 1}}, {"required": [{}]}, {"anyOf": "x"}])
def test_schemas_that_are_none_stay_as_they_are(parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert check_tools(tools) == tools


def test_a_schema_without_end_is_refused():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"items": deep}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": deep}}]}
    with pytest.raises(APIError, match="nests too deep"):
        parse(ChatCompletionRequest, body)
