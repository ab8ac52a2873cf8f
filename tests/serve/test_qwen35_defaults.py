"""What generation_config.json of Qwen3.5 recommends reaches requests, which override it."""

import json

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.server_state import most_tokens, sampling_defaults
from dflash_jax.serve.protocol import sampling_params
from dflash_jax.text.renderer import Renderer
from tests.pairs import write_byte_tokenizer
from tests.serve.test_protocol import LIMITS, chat

GENERATION = {
    "bos_token_id": 248044,
    "do_sample": True,
    "eos_token_id": [248046, 248044],
    "pad_token_id": 248044,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


@pytest.mark.parametrize(
    ("flags", "body", "expected"),
    [
        ({}, {}, (0.6, 0.95, 20)),
        ({}, {"temperature": 0, "top_k": -1}, (0, 0.95, -1)),
        ({"override_generation_config": {"temperature": 1.0}}, {}, (1.0, 0.95, 20)),
        ({"generation_config": "vllm"}, {}, (1.0, 1.0, 0)),
    ],
)
def test_sampling_defaults(tmp_path, flags, body, expected):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    defaults = sampling_defaults(Renderer(tmp_path).generation_config, ServeArgs(model=str(tmp_path), **flags))
    params = sampling_params(chat(**body), defaults, LIMITS)
    assert (params.temperature, params.top_p, params.top_k) == expected


@pytest.mark.parametrize(
    ("flags", "default", "most"),
    [
        ({}, 9, None),
        ({"generation_config": "vllm"}, None, None),
        ({"override_generation_config": {"max_new_tokens": 7}}, 7, 7),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 7}}, 7, 7),
        ({"generation_config": "FOLDER"}, 9, 9),
    ],
)
def test_the_most_tokens_of_an_answer_are_an_operators(flags, default, most):
    """What an operator gives is a limit, as in vLLM; the model's own file has a default."""
    args = ServeArgs(**flags)
    defaults = sampling_defaults({"max_new_tokens": 9}, args)
    assert (defaults.get("max_new_tokens"), most_tokens(defaults, args)) == (default, most)


@pytest.mark.parametrize("value", [0, 2.5, True, "7"])
def test_a_limit_of_tokens_must_be_one(value):
    with pytest.raises(ConfigError, match=f"max_new_tokens={value!r} of the generation config must be a "):
        sampling_defaults({}, ServeArgs(override_generation_config={"max_new_tokens": value}))
