"""Reading config.json of hybrids: Gated DeltaNet beside gated attention, nested or flat."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax import frontend
from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.models.rope import inverse_frequencies, rope_tables
from dflash_jax.spec import (
    FullAttention,
    GatedDelta,
    LayerSpec,
    RopeConfig,
    check_draft_fits,
    draft_config,
    read_json,
    target_config,
)
from dflash_jax.spec.hybrid import text_raw_config
from dflash_jax.weights.drafter import read_draft_config
from tests.pairs import GOLDEN, HYBRID, TARGET

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ROPE = HYBRID["text_config"]["rope_parameters"]


def hybrid(**changes) -> dict:
    """The nested file with other text fields; None leaves a field out."""
    text = HYBRID["text_config"] | changes
    return HYBRID | {"text_config": {name: value for name, value in text.items() if value is not None}}


def kinds(raw) -> list[str]:
    return [LINEAR if isinstance(layer.mixer, GatedDelta) else FULL for layer in target_config(raw).layers]


def test_layers_of_a_hybrid():
    config = target_config(HYBRID)
    recurrent = GatedDelta(key_heads=2, value_heads=6, key_dim=8, value_dim=4, conv_width=4, activation="silu")
    attention = LayerSpec(FullAttention(causal=True, gated=True))
    assert config.layers == (LayerSpec(recurrent),) * 3 + (attention, LayerSpec(recurrent))
    assert (config.attention_layers, config.recurrent_layers) == ((3,), (0, 1, 2, 4))
    assert config.gated_delta == recurrent
    assert (recurrent.values_per_key, recurrent.channels_per_key) == (3, 2 * 8 + 3 * 4)
    assert config.has_gated_attention
    assert config.zero_centered_norms
    assert config.qk_norm
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (1,)
    assert hash(config) == hash(target_config(HYBRID))
    assert (attention.window, attention.mask.mask) == (None, "causal")
    with pytest.raises(TypeError, match="has no mask"):
        LayerSpec(recurrent).window  # noqa: B018
    qwen3 = target_config(TARGET)
    assert (qwen3.attention_layers, qwen3.recurrent_layers, qwen3.gated_delta) == ((0, 1, 2, 3, 4), (), None)
    assert not qwen3.has_gated_attention
    assert not qwen3.zero_centered_norms


def test_nested_and_flat_are_the_same():
    flat = text_raw_config(HYBRID)
    assert flat["architectures"] == ["Qwen3_5ForCausalLM"]
    assert "text_config" not in flat
    assert "vision_config" not in flat
    assert target_config(flat | {"architectures": HYBRID["architectures"]}) == target_config(HYBRID)
    assert text_raw_config(flat) == flat


def test_interval_of_attention_layers():
    assert kinds(hybrid(layer_types=None)) == [LINEAR, LINEAR, LINEAR, FULL, LINEAR]
    assert kinds(hybrid(layer_types=None, full_attention_interval=2)) == [LINEAR, FULL, LINEAR, FULL, LINEAR]
    assert kinds(hybrid(layer_types=[FULL, LINEAR, FULL, FULL, LINEAR])) == [FULL, LINEAR, FULL, FULL, LINEAR]
    assert target_config(hybrid(layer_types=[FULL] * 5)).gated_delta is None


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, True, True), (True, None, True), (True, False, True), (False, True, False), (None, None, False)],
)
def test_embeddings_are_tied_at_either_level(outer, inner, tied):
    raw = hybrid(tie_word_embeddings=inner) | {"tie_word_embeddings": outer}
    assert target_config(raw).tie_word_embeddings is tied


def test_what_stands_beside_the_text():
    blocks = {"quantization_config": {"weight_block_size": [128, 128]}}
    assert target_config(HYBRID | blocks).weight_block_size == (128, 128)
    assert target_config(hybrid(**blocks)).weight_block_size == (128, 128)
    assert target_config(hybrid(dtype=None) | {"torch_dtype": "float32"}).dtype == "float32"
    assert target_config(hybrid(eos_token_id=None) | {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert target_config(hybrid(eos_token_id=5) | {"eos_token_id": [3, 4]}).eos_token_ids == (5,)


@pytest.mark.parametrize(("name", "activation"), [("swish", "silu"), ("silu", "silu"), ("sigmoid", "sigmoid")])
def test_gates(name, activation):
    assert target_config(hybrid(output_gate_type=name)).gated_delta.activation == activation


def test_defaults_are_those_of_the_class():
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "conv_width")
    fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    config = target_config(hybrid(head_dim=None, **{f"linear_{name}": None for name in fields}))
    assert config.head_dim == 256
    assert [getattr(config.gated_delta, name) for name in names] == [16, 32, 128, 128, 4]


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.5}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e4}}, 0.25),
        ({"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 1.0}, 1.0),
    ],
)
def test_partial_rotary_factor_in_either_place(changes, factor):
    rope = target_config(hybrid(**changes)).rope
    assert rope == RopeConfig(theta=1e4, partial_rotary_factor=factor)


def test_yarn_to_a_million():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    raw = hybrid(rope_parameters=ROPE | yarn, max_position_embeddings=262144, head_dim=256)
    config = target_config(raw)
    assert config.max_position_embeddings == 1_048_576
    assert target_config(hybrid(max_position_embeddings=262144)).max_position_embeddings == 262_144
    longer = target_config(hybrid(rope_parameters=ROPE | yarn, max_position_embeddings=2_000_000))
    assert longer.max_position_embeddings == 2_000_000
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    assert inverse.shape == (32,)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # Pairs that turn 32 times and more in 262,144 tokens stay as they are, slower ones are interpolated.
    dimension = 64 * math.log(262144 / (32 * 2 * math.pi)) / (2 * math.log(1e4))
    assert (inverse[: math.floor(dimension) + 1] == plain.astype(np.float32)[: math.floor(dimension) + 1]).all()
    assert (inverse[math.floor(dimension) + 1 :] < plain[math.floor(dimension) + 1 :]).all()


@pytest.mark.parametrize("factor", [0.25, 1.0])
@pytest.mark.parametrize("yarn", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}])
def test_tables_rotate_the_first_dimensions_only(factor, yarn):
    config = target_config(hybrid(rope_parameters=ROPE | {"partial_rotary_factor": factor} | yarn))
    positions = jnp.array([[0, 1, 5], [7, 100, 3]], jnp.int32)
    cos, sin = map(np.asarray, rope_tables(config, positions))
    half, rotated = config.head_dim // 2, int(config.head_dim * factor) // 2
    assert cos.shape == sin.shape == (2, 3, half)
    inverse, scale = inverse_frequencies(config.rope, config.head_dim)
    angles = np.asarray(positions)[..., None] * inverse.astype(np.float64)
    np.testing.assert_allclose(cos[..., :rotated], np.cos(angles) * scale, atol=1e-5)
    np.testing.assert_allclose(sin[..., :rotated], np.sin(angles) * scale, atol=1e-5)
    assert (cos[..., rotated:] == 1).all()
    assert (sin[..., rotated:] == 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_gate_type": "tanh"}, ["output_gate_type='tanh'", "swish, silu, sigmoid"]),
        ({"output_gate_type": ["silu"]}, ["output_gate_type=['silu']"]),
        ({"linear_num_value_heads": 5}, ["linear_num_value_heads=5", "linear_num_key_heads=2"]),
        ({"linear_conv_kernel_dim": 0}, ["linear_conv_kernel_dim=0"]),
        ({"attn_output_gate": False}, ["attn_output_gate=false"]),
        ({"layer_types": [LINEAR]}, ["1", "num_hidden_layers=5"]),
        ({"layer_types": [SLIDING] * 5}, [SLIDING, "linear_attention, full_attention"]),
        ({"layer_types": None, "full_attention_interval": 0}, ["full_attention_interval=0"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.03}}, ["partial_rotary_factor=0.03", "rotates 0"]),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.2}}, ["partial_rotary_factor=0.2", "rotates 3 of"]),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor=1.5"]),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": "x"}}, ["partial_rotary_factor='x'"]),
    ],
)
def test_bad_hybrid(changes, words):
    with pytest.raises(ConfigError) as error:
        target_config(hybrid(**changes), "some/config.json")
    for word in ["some/config.json, text_config", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["Qwen3_5VLForConditionalGeneration", "Qwen4NextForCausalLM"])
def test_other_hybrids_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"'{name}' is not supported.*Qwen3ForCausalLM.*Qwen3_5ForCausalLM"):
        target_config(HYBRID | {"architectures": [name]})


@pytest.mark.parametrize(
    ("name", "mixer", "attention", "block"),
    [
        ("q35_dense", GatedDelta(2, 4, 16, 16, 4), (3, 7), None),
        ("q35_fp8_block", GatedDelta(2, 4, 32, 32, 4), (1,), (128, 128)),
    ],
)
def test_published_layout(name, mixer, attention, block):
    config = target_config(json.loads((GOLDEN / name / "target" / "config.json").read_text()))
    assert config.gated_delta == mixer
    assert config.attention_layers == attention
    assert config.rope == RopeConfig(theta=1e4, partial_rotary_factor=0.25)
    assert config.weight_block_size == block
    generation = read_json(GOLDEN / name / "target" / "generation_config.json")
    assert frontend._eos_token_ids(generation, config, None) == (2, 1)  # the end of a turn, and of a text


# --- drafters

# The text fields of z-lab's drafters of Qwen3.6-27B: the first generation, and the retrained one.
FIRST_GENERATION = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "rope_scaling": None,
    "layer_types": [SLIDING] * 4 + [FULL],
    "use_sliding_window": True,
    "sliding_window": 2048,
    "max_window_layers": 5,
    "num_target_layers": 64,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
SECOND_GENERATION = {name: value for name, value in FIRST_GENERATION.items() if name != "block_size"} | {
    "num_hidden_layers": 6,
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "layer_types": [SLIDING] * 5 + [FULL],
    "sliding_window": 4096,
    "max_window_layers": 6,
    "dflash_config": {
        "mask_token_id": 248077,
        "target_layer_ids": [1, 10, 18, 27, 35, 44, 52, 61],
        "block_size": 16,
    },
}


@pytest.mark.parametrize(
    ("raw", "window", "taps", "mask"),
    [(FIRST_GENERATION, 2048, 5, 248070), (SECOND_GENERATION, 4096, 8, 248077)],
    ids=["first", "second"],
)
def test_both_generations_of_published_drafters(raw, window, taps, mask):
    config = draft_config(raw, fc_inputs=taps * 5120)
    layers = raw["num_hidden_layers"]
    causal, full = LayerSpec.attention(window, causal=True), LayerSpec.attention(None, causal=False)
    assert config.layers == (causal,) * (layers - 1) + (full,)
    assert (config.block_size, config.mask_token_id, len(config.target_layer_ids)) == (16, mask, taps)
    assert config.rope == RopeConfig(theta=1e7)  # over the whole head, unlike the target's
    assert not config.zero_centered_norms
    unnamed = raw | {"dflash_config": {**raw["dflash_config"], "target_layer_ids": None}}
    assert draft_config(unnamed, fc_inputs=taps * 5120) == config


def test_the_mask_may_be_a_padded_row():
    """248077 is no token of the tokenizer, but a row of the embedding."""
    sizes = {"hidden_size": 5120, "vocab_size": 248320, "num_hidden_layers": 64}
    target = target_config(hybrid(layer_types=None, **sizes))
    check_draft_fits(target, draft_config(SECOND_GENERATION), "draft")
    beyond = SECOND_GENERATION | {"dflash_config": SECOND_GENERATION["dflash_config"] | {"mask_token_id": 248320}}
    with pytest.raises(ConfigError, match=r"mask_token_id=248320 but the target has 248320 tokens"):
        check_draft_fits(target, draft_config(beyond), "draft")


@pytest.mark.parametrize("place", ["top", "dflash_config"])
@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("fc_layernorm", True, False),
        ("sample_from_anchor", True, False),
        ("projector_type", "mlp", "dflash"),
        ("input_embedding_scale", 45.0, 1.0),
        ("output_multiplier", 0.5, 1.0),
        ("final_logit_softcapping", 30.0, 0.0),
        ("conv_kernel_size", 2, None),
        ("conv_group_size", 16, None),
        ("selector_rank", 256, None),
        ("selector_top_k", 16, None),
    ],
)
def test_flags_of_other_families_are_refused_by_name(name, value, neutral, place):
    def flagged(value):
        if place == "top":
            return FIRST_GENERATION | {name: value}
        return FIRST_GENERATION | {"dflash_config": FIRST_GENERATION["dflash_config"] | {name: value}}

    assert draft_config(flagged(neutral)) == draft_config(FIRST_GENERATION)
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not supported"):
        draft_config(flagged(value))


def test_the_drafter_of_a_folder_is_compared_with_its_weights(tmp_path):
    """A golden drafter has four taps and three layers."""
    source = GOLDEN / "q35_dense"
    target = target_config(read_json(source / "target" / "config.json"))
    assert read_draft_config(source / "draft", target).target_layer_ids == (1, 3, 4, 6)
    raw = read_json(source / "draft" / "config.json")
    (tmp_path / "model.safetensors").write_bytes((source / "draft" / "model.safetensors").read_bytes())

    def read(**dflash):
        changed = raw | {"dflash_config": raw["dflash_config"] | dflash}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return read_draft_config(tmp_path, target)

    assert read(target_layer_ids=None).target_layer_ids == (1, 2, 4, 5)
    with pytest.raises(ConfigError, match="names 3 capture layers, but the weight fc takes the features of 4"):
        read(target_layer_ids=[1, 3, 4])
    (tmp_path / "model.safetensors").unlink()
    assert read(target_layer_ids=[1, 3, 4]).target_layer_ids == (1, 3, 4)
    save_file({"fc.weight": np.zeros(256, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'fc\.weight' of shape \[256\] is no matrix"):
        read()
