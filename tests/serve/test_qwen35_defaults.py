"""What generation_config.json of Qwen3.5 recommends reaches requests, which override it."""

import json

import pytest

from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.server_state import sampling_defaults
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
