"""Sampling parameters on their way to the engine process."""

from dataclasses import asdict, fields

import msgspec
import pytest

from dflash_jax.base import values
from dflash_jax.base.values import SamplingParams, StructuredOutputsParams
from dflash_jax.serve.engine_link.link_messages import Add, CheckedParams, ToEngine

STRUCTURES = [
    {"json": {"type": "object", "properties": {"b": {}, "a": {}}}}, {"regex": "a+"}, {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'}, {"json_object": True},
]  # fmt: skip
FULL = SamplingParams(
    n=3, presence_penalty=1, frequency_penalty=-1.5, repetition_penalty=1.5, temperature=0.5, top_p=0.5, top_k=7,
    min_p=0.1, seed=2**62, stop=["a", "b"], stop_token_ids=[1, 2], bad_words="bad", logit_bias={"7": 1, 3: -2.5},
    allowed_token_ids=[3, 7], structured_outputs=StructuredOutputsParams(regex="a+"), reasoning_token_ids=[None, 5],
    include_stop_str_in_output=True, ignore_eos=True, max_tokens=None, min_tokens=2, logprobs=3, prompt_logprobs=0,
    skip_special_tokens=False, detokenize=False, speculation=False,
)  # fmt: skip


def arrived(params: SamplingParams) -> SamplingParams:
    message = Add("a", [1], CheckedParams.of(params), None, True)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine).params


@pytest.mark.parametrize("params", [SamplingParams(), FULL], ids=["default", "full"])
def test_sampling_parameters_arrive_as_they_left(params):
    assert isinstance(arrived(params), SamplingParams)
    assert asdict(arrived(params)) == asdict(params)
    if params is FULL:
        assert not [f.name for f in fields(params) if getattr(params, f.name) == f.default], "fields left out above"


@pytest.mark.parametrize("arguments", STRUCTURES, ids=lambda arguments: next(iter(arguments)))
def test_structures_arrive_as_they_left_and_can_be_keys_of_the_cache(arguments):
    structure = StructuredOutputsParams(**arguments)
    params = arrived(SamplingParams(structured_outputs=structure))
    assert asdict(params.structured_outputs) == asdict(structure)
    assert params.structured_outputs.kind == structure.kind
    assert hash(params.structured_outputs) == hash(arrived(params).structured_outputs)


def test_parameters_are_checked_once(monkeypatch):
    """The server checks them, in the words of the request, and the engine process does not check them again."""
    checked = []
    monkeypatch.setattr(values, "_check", lambda params, allowed: checked.append(type(params)))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert checked == [StructuredOutputsParams, SamplingParams]
    arrived(params)
    assert len(checked) == 2
