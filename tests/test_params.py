"""Parameters and prompts: what is taken, how it is kept, and what is refused by name, limit and remedy."""

import copy
import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import MOST_LOGPROBS, SamplingParams, StructuredOutputsParams
from dflash_jax.engine.host.request import cache_salt_of, check_params, tokenize

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
FULL = {
    "presence_penalty": 2,
    "frequency_penalty": -2,
    "repetition_penalty": 1e-3,
    "bad_words": ["foo", "bar"],
    "logit_bias": {"5": -100, 3: 100.0},
    "allowed_token_ids": [1, 2],
    "structured_outputs": StructuredOutputsParams(json=SCHEMA),
    "logprobs": MOST_LOGPROBS,
    "prompt_logprobs": 0,
}


def limits(**changes):
    sizes = {"prompt_length": 3, "max_model_len": 64, "vocab_size": 10, "num_tokens": 8}
    return sizes | {"has_tokenizer": True} | changes


def test_defaults_change_nothing():
    params = SamplingParams()
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0, 0, 1)
    assert params.prompt_logprobs is params.allowed_token_ids is params.structured_outputs is None
    assert params.logit_bias == params.bad_words == ()


def test_parameters_are_kept_frozen_hashable_and_rebuildable():
    params = SamplingParams(**FULL)
    assert params.logit_bias == ((3, 100.0), (5, -100))
    assert (params.bad_words, params.allowed_token_ids) == (("foo", "bar"), (1, 2))
    assert {params: 1}[SamplingParams(**copy.deepcopy(FULL))] == 1
    assert replace(params) == params
    assert replace(params, logit_bias=None) != params
    with pytest.raises(AttributeError):
        params.bad_words = ()


def test_what_was_given_may_change_afterwards():
    bias, ids = {1: 2.0}, [4]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=ids)
    bias[9], ids[0] = 3.0, 5
    assert (params.logit_bias, params.allowed_token_ids) == (((1, 2.0),), (4,))


def test_one_thing_without_a_list():
    assert SamplingParams(bad_words="foo", stop="x").bad_words == ("foo",)
    assert SamplingParams(allowed_token_ids=7).allowed_token_ids == (7,)
    assert SamplingParams(bad_words=None, stop=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"presence_penalty": 2.1}, r"presence_penalty=2\.1 .*\[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty=-2\.1 .*\[-2, 2\]"),
        ({"frequency_penalty": None}, "frequency_penalty=None"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 .*above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"repetition_penalty": True}, "repetition_penalty=True"),
        ({"logprobs": 21}, "logprobs=21 .*20"),
        ({"logprobs": -1}, "logprobs=-1 .*0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 .*20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"prompt_logprobs": 1.0}, r"prompt_logprobs=1\.0"),
        ({"logit_bias": {1: 101}}, r"logit_bias=\(\(1, 101\),\) .*\[-100, 100\]"),
        ({"logit_bias": {1: math.nan}}, "logit_bias="),
        ({"logit_bias": {1: "2"}}, "logit_bias="),
        ({"logit_bias": {-1: 2}}, "logit_bias="),
        ({"logit_bias": {"-1": 2}}, "logit_bias="),
        ({"logit_bias": {"x": 2}}, "logit_bias="),
        ({"logit_bias": {1.5: 2}}, "logit_bias="),
        ({"logit_bias": {True: 2}}, "logit_bias="),
        ({"logit_bias": {"x": 1, 2: 1}}, "logit_bias="),
        ({"logit_bias": [1, 2]}, r"logit_bias=\[1, 2\] .*mapping"),
        ({"logit_bias": 7}, "logit_bias=7 .*mapping"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\(\) .*at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids="),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids="),
        ({"bad_words": [""]}, "bad_words="),
        ({"bad_words": [7]}, "bad_words="),
        ({"bad_words": ["\ud800"]}, "bad_words="),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs=.*StructuredOutputsParams"),
    ],
)
def test_bad_parameters(changes, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**changes)


def test_every_parameter_is_checked():
    for name in (field.name for field in fields(SamplingParams)):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: object()})


def test_refusals_stay_one_short_sentence():
    with pytest.raises(RequestError) as error:
        SamplingParams(stop_token_ids=[*range(10**5), -1])
    assert len(str(error.value)) < 200


def test_structured_outputs_are_kept_as_text():
    """The order of a schema's keys is the order of the properties in the answer: it must survive."""
    params = StructuredOutputsParams(json=SCHEMA)
    assert json.loads(params.json) == SCHEMA
    assert params.json.index('"z"') < params.json.index('"a"')
    assert params == StructuredOutputsParams(json=json.dumps(SCHEMA, indent=2))
    assert hash(params) == hash(StructuredOutputsParams(json=SCHEMA))
    assert replace(params) == params
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert [StructuredOutputsParams(regex="a").kind, StructuredOutputsParams(json_object=True).kind] == [
        "regex",
        "json_object",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "holds nothing: .*exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice: .*exactly one"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[]"}, "json of type list"),
        ({"json": 7}, "json of type int"),
        ({"json": {"const": math.nan}}, "json is not JSON"),
        ({"json": {"const": object()}}, "json is not JSON"),
        ({"json": "[" * 10**5}, "json is not JSON"),
        ({"regex": ""}, "regex=''"),
        ({"regex": 5}, "regex=5"),
        ({"grammar": ["a"]}, "grammar="),
        ({"choice": []}, r"choice=\(\) .*at least one"),
        ({"choice": ["a", ""]}, "choice="),
        ({"choice": ["a", 3]}, "choice="),
        ({"json_object": False}, "json_object=False .*True"),
    ],
)
def test_bad_structured_outputs(given, words):
    with pytest.raises(RequestError, match=words):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("params", "changes", "words"),
    [
        ({"stop_token_ids": [10]}, {}, "stop_token_ids holds 10, .*0 to 9"),
        ({"allowed_token_ids": [9, 10]}, {}, "allowed_token_ids holds 10, .*0 to 9"),
        (
            {"allowed_token_ids": [8, 9]},
            {},
            "allowed_token_ids holds padding of the vocabulary alone: tokens are 0 to 7",
        ),
        ({"logit_bias": {"9": 1, "11": 1}}, {}, "logit_bias holds 11, .*0 to 9"),
        ({"logprobs": 11}, {}, "logprobs=11 .*10"),
        ({"prompt_logprobs": 11}, {}, "prompt_logprobs=11 .*10"),
        ({"stop": "x"}, {"has_tokenizer": False}, "stop strings need a tokenizer"),
        ({"bad_words": "x"}, {"has_tokenizer": False}, "bad_words need a tokenizer"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a")},
            {"has_tokenizer": False},
            "structured_outputs need a tokenizer",
        ),
        ({}, {"prompt_length": 64}, "no room"),
    ],
)
def test_parameters_that_do_not_fit_the_model(params, changes, words):
    with pytest.raises(RequestError, match=words):
        check_params(SamplingParams(**params), **limits(**changes))


def test_parameters_that_fit():
    params = SamplingParams(**FULL | {"logprobs": 10, "prompt_logprobs": 10, "max_tokens": None})
    assert check_params(params, **limits()) == 61
    assert check_params(SamplingParams(allowed_token_ids=[9, 7]), **limits()) == 16
    assert check_params(SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]), **limits(has_tokenizer=False)) == 16


def test_cache_salt():
    assert [cache_salt_of(p) for p in ("text", {"prompt": "text"}, {"prompt_token_ids": [1], "cache_salt": "t"})] == [
        None,
        None,
        "t",
    ]
    for bad in ("", 7, ["t"]):
        with pytest.raises(RequestError, match="cache_salt="):
            cache_salt_of({"prompt": "text", "cache_salt": bad})
    ids = {"prompt_token_ids": np.array([1, 2]), "cache_salt": "t"}
    assert tokenize(ids, None, vocab_size=10) == (None, [1, 2])
