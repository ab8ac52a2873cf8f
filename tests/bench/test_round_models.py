"""Presets of `bench round`: as large as published, served by their files in configs/, with random weights."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.bench.round_models import PRESETS, configs_of, drafter_of, random_params
from dflash_jax.options import EngineConfig
from dflash_jax.options.serve_command import parse_args
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table
from tests.pairs import HYBRID

ROOT = Path(__file__).resolve().parents[2]


def num_parameters(config):
    return sum(math.prod(checkpoint_shape(axes, config)) for axes in checkpoint_table(config).values())


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, number):
    target, draft = configs_of(name, None)
    assert num_parameters(target) == number
    assert (draft.num_hidden_layers, draft.block_size, draft.mask_token_id) == (5, 16, 151_669)
    assert {layer.window for layer in draft.layers} == {None}


def test_the_drafter_of_qwen3_8b_is_the_published_one():
    draft = configs_of("qwen3-8b", None)[1]
    assert draft.target_layer_ids == (1, 9, 17, 25, 33)
    assert num_parameters(draft) == 1_048_626_432
    sliding = configs_of("qwen3-8b", None, sliding_window=2048)[1]
    assert [layer.window for layer in sliding.layers] == [2048] * 4 + [None]


@pytest.mark.parametrize(
    ("name", "target_size", "draft_size"),
    [  # of the language model; 8.95 billion and the drafters' 1.3 and 1.7 are what GGUF files of these models say
        ("qwen3.5-0.8b", 752_393_024, 137_379_328),
        ("qwen3.5-4b", 4_205_751_296, 634_425_856),
        ("qwen3.5-9b", 8_953_803_264, 1_291_904_512),
        ("qwen3.6-27b", 26_895_998_464, 1_730_213_120),
    ],
)
def test_hybrids(name, target_size, draft_size):
    target, draft = configs_of(name, None)
    assert (num_parameters(target), num_parameters(draft)) == (target_size, draft_size)
    assert [i + 1 for i in target.attention_layers] == list(range(4, target.num_hidden_layers + 1, 4))
    assert target.rope.rotary_dim(target.head_dim) == 64
    assert (draft.head_dim, draft.num_attention_heads, draft.rope.partial_rotary_factor) == (128, 32, 1.0)


def test_the_drafter_of_qwen3_6_27b_is_the_published_one():
    draft = configs_of("qwen3.6-27b", None)[1]
    assert (draft.target_layer_ids, draft.mask_token_id) == ((1, 16, 31, 46, 61), 248_070)
    assert [layer.window for layer in draft.layers] == [2048] * 4 + [None]
    retrained = configs_of("qwen3.5-9b", None)[1]
    assert (len(retrained.target_layer_ids), retrained.mask_token_id) == (8, 248_077)
    assert [layer.window for layer in retrained.layers] == [4096] * 5 + [None]
    assert configs_of("qwen3.5-9b", None, sliding_window=512)[1].layers[0].window == 512


def test_the_drafter_of_a_nested_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    target, draft = configs_of(str(tmp_path), None)
    assert (target.num_hidden_layers, draft.num_hidden_layers, draft.target_layer_ids) == (5, 2, (1, 2))
    assert (draft.rope.theta, draft.mask_token_id, draft.layers[0].window) == (1e4, 60, 2048)


def test_random_params_of_a_hybrid_behave(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    config = configs_of(str(tmp_path), None)[0]
    params = random_params(config, jnp.bfloat16, Mesh.of(1), seed=0)
    mixer = params["layers_0"]["linear_attn"]
    assert mixer["A_log"].dtype == mixer["dt_bias"].dtype == params["norm"].dtype == jnp.float32
    assert mixer["in_proj"].dtype == mixer["conv1d"].dtype == mixer["norm"].dtype == jnp.bfloat16
    decay = jnp.exp(-jnp.exp(mixer["A_log"]) * jax.nn.softplus(mixer["dt_bias"]))
    assert decay.min() > 0.19  # of a token whose gate is 0: exp(-16 * 0.1) at least
    assert decay.max() < 1


def test_folders(tmp_path):
    for name, raw in (("target", PRESETS["tiny"]), ("draft", drafter_of(PRESETS["tiny"]) | {"block_size": 8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    target, draft = configs_of(str(tmp_path / "target"), str(tmp_path / "draft"))
    assert (target, draft.block_size) == (configs_of("tiny", None)[0], 8)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_random_bits_are_numbers_of_the_usual_size(preset, quantization):
    config, mesh = configs_of(preset, None)[0], Mesh.of(2)
    params = random_params(config, jnp.bfloat16, mesh, seed=0, quantization=quantization)
    held, dense = (tree["layers_0"]["mlp"] for tree in (params, dense_params(config, params)))
    for name in ("gate_up_proj", "down_proj"):
        weight, wide = (mlp.get("experts", mlp)[name] for mlp in (held, dense))
        assert weight.shape == wide.shape
        assert weight.values.sharding.shard_shape(weight.values.shape) != weight.values.shape
        assert 0.015 < float(wide.std()) < 0.025
        assert float(jnp.abs(wide).max()) < 0.1
    assert params["lm_head"].dtype == jnp.bfloat16


def test_random_params_are_random_and_in_place():
    config = configs_of("tiny", None)[0]
    params = random_params(config, jnp.bfloat16, Mesh.of(1), seed=0)
    layers = [params[f"layers_{i}"]["mlp"]["down_proj"] for i in range(4)]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert len({float(layer.sum()) for layer in layers}) == 4
    assert all(0.018 < float(layer.std()) < 0.022 for layer in layers)
    assert float(jnp.abs(params["norm"] - 1).max()) == 0


PUBLISHED = {
    "qwen3-4b": "z-lab/Qwen3-4B-DFlash-b16",
    "qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16",
    "qwen3.5-4b": "z-lab/Qwen3.5-4B-DFlash",
    "qwen3.5-9b": "z-lab/Qwen3.5-9B-DFlash",
    "qwen3.6-27b": "z-lab/Qwen3.6-27B-DFlash",
    "qwen3.5-35b-a3b": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "qwen3.5-122b-a10b": "z-lab/Qwen3.5-122B-A10B-DFlash",
}
TO_TRY = {"tiny", "tiny-moe"}
WITHOUT_THINKING = ("qwen3-4b", "qwen3-8b")  # as their drafters were trained


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - TO_TRY))
def test_every_preset_can_be_served(name):
    served = parse_args(["--config", str(ROOT / "configs" / f"{name}.yaml")])
    published = re.sub(r"a(\d+)b|b", lambda match: match[0].upper(), name.replace("qwen", "Qwen"))
    assert served.model == "Qwen/" + published.replace("next", "Next") + ("-Instruct" if "next" in name else "")
    assert served.draft_model == PUBLISHED.get(name)
    assert served.engine.num_speculative_tokens is None  # the engine chooses
    assert served.default_chat_template_kwargs == ({"enable_thinking": False} if name in WITHOUT_THINKING else {})
    target, draft = configs_of(name, None)
    EngineConfig.of(served.engine, target, draft)


def test_no_preset_is_left_out():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == PRESETS.keys() - TO_TRY
