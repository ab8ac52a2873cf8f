"""Checkpoints written are checkpoints read: weights, configurations of drafters, and files that are whole."""

import json
import os
import stat
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.spec import DraftConfig, LayerSpec, RopeConfig, draft_config, read_json, target_config
from dflash_jax.weights import export
from dflash_jax.weights.export import dense_params, draft_raw_config, quantize_rows, save_json, save_model, save_tensors
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import checkpoint_tensors
from dflash_jax.weights.safetensors import list_tensors
from tests.pairs import DRAFT, HYBRID, TARGET, write_model

HALF_STEP = 2.0**-4  # of e4m3: 3 bits of mantissa, so half a step is 1/16 of a number at most


def loaded(tmp_path, raw):
    config = draft_config(raw) if "dflash_config" in raw else target_config(raw)
    return config, load_params(write_model(tmp_path / "first", raw, 0), config, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "raw",
    [
        TARGET,
        TARGET | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
        TARGET | {"tie_word_embeddings": True},
        DRAFT | {"attention_bias": True},
        DRAFT | {"draft_vocab_size": 20},
    ],
    ids=["qwen3", "llama", "tied", "draft", "own_vocabulary"],
)
def test_what_was_written_is_read(tmp_path, raw, dtype):
    config, params = loaded(tmp_path, raw)
    save_model(tmp_path / "new" / "model", raw, config, params, dtype)
    again = load_params(tmp_path / "new" / "model", config, jnp.float32)
    found = checkpoint_tensors(config, again)
    for name, before in checkpoint_tensors(config, params).items():
        np.testing.assert_array_equal(found[name], before if name == "d2t" else before.astype(dtype))
    assert read_json(tmp_path / "new" / "model" / "config.json") == raw
    stored = {info.dtype for info in list_tensors(tmp_path / "new" / "model").values()}
    assert stored == {np.dtype(dtype)} | ({np.dtype(np.int64)} if "draft_vocab_size" in raw else set())


@pytest.mark.parametrize(
    ("raw", "devices", "kv_heads"),
    [
        (TARGET | {"attention_bias": True}, 4, 4),
        (DRAFT, 4, 4),
        (HYBRID, 4, 4),
        (TARGET, 2, 2),  # divide
        (TARGET, 3, 2),  # queries do not divide
    ],
)
def test_copies_of_kv_heads_are_written_once(tmp_path, raw, devices, kv_heads):
    config, params = loaded(tmp_path, raw)
    over = config.over(devices)
    assert (over.num_key_value_heads, over.stored) == (kv_heads, config)
    assert (over.over(1), over.over(devices)) == (config, over)
    copied = load_params(tmp_path / "first", over, jnp.float32)
    written = checkpoint_tensors(over, copied)
    for name, tensor in checkpoint_tensors(config, params).items():
        np.testing.assert_array_equal(written[name], tensor)


@pytest.mark.parametrize("raw", [TARGET, DRAFT | {"draft_vocab_size": 20, "attention_bias": True}])
def test_fp8_is_close_and_only_in_projections(tmp_path, raw):
    config, params = loaded(tmp_path, raw)
    save_model(tmp_path / "fp8", raw, config, params, "fp8_e4m3")
    again = dense_params(config, load_params(tmp_path / "fp8", config, jnp.float32))
    tensors = list_tensors(tmp_path / "fp8")
    found = checkpoint_tensors(config, again)
    for name, before in checkpoint_tensors(config, params).items():
        after, scale = found[name], tensors.get(f"{name}_scale")
        if name.endswith(("_proj.weight", "fc.weight")):
            assert tensors[name].dtype == ml_dtypes.float8_e4m3fn
            assert (scale.dtype, scale.shape) == (np.float32, (tensors[name].shape[0], 1))
            # A small number of a row has fewer bits: the smallest steps are 2**-9 in units of the scale.
            np.testing.assert_allclose(after, before, rtol=HALF_STEP, atol=float(np.abs(before).max()) / 448 / 2**10)
            assert not np.array_equal(after, before)
        else:
            assert scale is None
            assert tensors[name].dtype == (np.int64 if name == "d2t" else ml_dtypes.bfloat16)
            np.testing.assert_array_equal(after, before if name == "d2t" else before.astype(jnp.bfloat16))
    read = read_json(tmp_path / "fp8" / "config.json")
    assert read.pop("quantization_config")["format"] == "float-quantized"
    assert read == raw


def test_the_largest_of_a_row_is_kept_and_zeros_stay_zeros():
    weight = np.float32([[0, 0, 0], [1e-3, -2e-3, 5e-4], [700, 3, -1], [1e-45, 0, 0]])
    stored, scale = quantize_rows(weight)
    assert np.abs(stored.astype(np.float32)).max(axis=1)[1:3].tolist() == [448, 448]
    again = stored.astype(np.float32) * scale
    np.testing.assert_allclose(np.abs(again).max(axis=1), np.abs(weight).max(axis=1), rtol=1e-6, atol=1e-38)
    assert np.isfinite(again).all()
    assert (again[0] == 0).all()


def test_weights_dequantised_lose_their_quantization_config(tmp_path):
    raw = TARGET | {"quantization_config": {"weight_block_size": [32, 20]}}
    config, params = loaded(tmp_path, raw)
    save_model(tmp_path / "new", raw, config, params, "bfloat16")
    assert read_json(tmp_path / "new" / "config.json") == TARGET


def test_strided_arrays_are_written_as_they_read(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_tensors(tmp_path / "model.safetensors", {"a": array.T, "b": array[:, 1:3]})
    tensors = list_tensors(tmp_path)
    np.testing.assert_array_equal(tensors["a"].load(), array.T)
    np.testing.assert_array_equal(tensors["b"].load(), array[:, 1:3])


def test_files_are_readable_by_all_and_replaced_only_when_whole(tmp_path, monkeypatch):
    config, params = loaded(tmp_path, DRAFT)
    folder = tmp_path / "model"
    before = os.umask(0o077)
    try:
        save_model(folder, DRAFT, config, params, "float32")
    finally:
        os.umask(before)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert set(files) == {"config.json", "model.safetensors"}
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in files} == {0o644}

    def fail_half_way(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(export, "save_file", fail_half_way)
    with pytest.raises(OSError, match="no space"):
        save_model(folder, DRAFT | {"block_size": 4}, config, params, "bfloat16")
    with pytest.raises(TypeError):
        save_json(folder / "config.json", {"a": object()})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files


def test_refusals(tmp_path):
    config, params = loaded(tmp_path, TARGET)
    with pytest.raises(ConfigError, match=r"dtype='fp4' is unknown; choose one of float32, bfloat16, fp8_e4m3"):
        save_model(tmp_path / "new", TARGET, config, params, "fp4")
    (tmp_path / "first" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="would hide the new weights"):
        save_model(tmp_path / "first", TARGET, config, params, "float32")


def positive(least=1e-3, most=1e3):
    return st.floats(least, most)


ROPES = st.one_of(
    st.builds(RopeConfig, theta=positive(1, 1e8)),
    st.builds(RopeConfig, rope_type=st.just("linear"), theta=positive(1, 1e8), factor=positive()),
    st.builds(
        RopeConfig,
        rope_type=st.just("llama3"),
        factor=positive(),
        original_max_position_embeddings=st.integers(1, 10**6),
        low_freq_factor=positive(0.1, 1),
        high_freq_factor=positive(2, 8),
    ),
    st.builds(
        RopeConfig,
        rope_type=st.just("yarn"),
        factor=positive(),
        original_max_position_embeddings=st.integers(1, 10**6),
        beta_fast=positive(),
        beta_slow=positive(),
        attention_factor=st.none() | positive(),
        mscale=st.none() | positive(),
        mscale_all_dim=st.none() | positive(),
        truncate=st.booleans(),
    ),
)


@st.composite
def layers_of(draw):
    """Masks that a config.json can say."""
    window = draw(st.integers(1, 4096))
    windows = draw(st.lists(st.sampled_from([None, window]), min_size=1, max_size=8))
    mask = draw(st.sampled_from(["usual", "causal", "block"]))
    usual = {None: "block", window: "causal"}
    return tuple(LayerSpec.attention(w, causal=(usual[w] if mask == "usual" else mask) == "causal") for w in windows)


@st.composite
def drafts(draw):
    size = st.integers(1, 64)
    kv_heads, vocab, hidden = draw(size), draw(st.integers(2, 10**6)), draw(size)
    return DraftConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=draw(size),
        num_attention_heads=kv_heads * draw(st.integers(1, 8)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(size),
        rms_norm_eps=draw(positive(1e-12, 1e-3)),
        rope=draw(ROPES),
        layers=draw(layers_of()),
        qk_norm=True,
        attention_bias=draw(st.booleans()),
        mlp_bias=False,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        block_size=draw(st.integers(2, 64)),
        target_layer_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=8))),
        mask_token_id=draw(st.integers(0, vocab - 1)),
        target_hidden_size=draw(st.sampled_from([hidden, 2 * hidden])),
        draft_vocab_size=draw(st.none() | st.integers(1, vocab - 1)),
        weight_block_size=None,
    )


@settings(max_examples=200, deadline=None)
@given(drafts(), st.integers(1, 100))
def test_draft_configs_are_read_as_they_were(config, num_target_layers):
    raw = json.loads(json.dumps(draft_raw_config(config, num_target_layers)))
    assert draft_config(raw) == config
    assert raw["num_target_layers"] == num_target_layers


def test_draft_config_has_the_words_of_the_published_ones():
    layers = (LayerSpec.attention(2048, causal=True), LayerSpec.attention(None, causal=False))
    config = replace(draft_config(DRAFT), layers=layers, block_size=16)
    raw = draft_raw_config(config, 5, max_position_embeddings=8192)
    assert (raw["architectures"], raw["model_type"], raw["block_size"]) == (["DFlashDraftModel"], "qwen3", 16)
    assert raw["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 60}
    assert raw["layer_types"] == ["sliding_attention", "full_attention"]
    assert (raw["use_sliding_window"], raw["sliding_window"], raw["max_window_layers"]) == (True, 2048, 2)
    assert (raw["max_position_embeddings"], raw["rope_theta"], raw["rope_scaling"]) == (8192, 10000.0, None)
    assert "is_causal" not in raw


@pytest.mark.parametrize(
    "layers",
    [
        (LayerSpec.attention(8, causal=True), LayerSpec.attention(9, causal=True)),
        (LayerSpec.attention(8, causal=True), LayerSpec.attention(8, causal=False)),
        (LayerSpec.attention(None, causal=False), LayerSpec.attention(None, causal=True)),
        (LayerSpec.attention(8, causal=False), LayerSpec.attention(None, causal=True)),
    ],
)
def test_masks_without_words_are_refused(layers):
    with pytest.raises(ConfigError, match=r"cannot say that its layers are (causal|block) .*; give all sliding"):
        draft_raw_config(replace(draft_config(DRAFT), layers=layers), 5)
