"""Checkpoint folders: every dtype, sharded files, scales, and one clear sentence for everything damaged."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.spec import draft_config, target_config
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.folder import resolve_folder
from dflash_jax.weights.layouts import row_scales
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import checkpoint_tensors, parameters_of
from dflash_jax.weights.safetensors import list_tensors
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table
from tests.pairs import DRAFT, TARGET, random_tensors, write_byte_tokenizer, write_model

CONFIG = target_config(TARGET)
UP = "model.layers.1.mlp.up_proj.weight"
DTYPE_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
}


def write_raw(path, tensors):
    """safetensors by its definition, also for the dtypes that the package cannot write from numpy."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        blob = tensor.tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(blob)],
        }
        data += blob
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def at(params, tensor, config=CONFIG):
    return checkpoint_tensors(config, params)[tensor]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype(tmp_path, dtype):
    tensors = {name: t.astype(dtype) for name, t in random_tensors(CONFIG, 0).items()}
    write_raw(tmp_path / "model.safetensors", tensors)
    for wanted in (jnp.float32, jnp.bfloat16):
        params = load_params(tmp_path, CONFIG, wanted)
        found = at(params, UP)
        assert found.dtype == wanted
        np.testing.assert_array_equal(found, tensors[UP].astype(np.float32).astype(wanted))


def test_heads_lie_as_the_table_says(tmp_path):
    """4 query heads and 2 kv heads of 16: each kv head has its own queries beside it."""
    tensors = random_tensors(CONFIG, 0)
    save_file(tensors, tmp_path / "model.safetensors")
    attention = load_params(tmp_path, CONFIG, jnp.float32)["layers_0"]["self_attn"]
    q, k, v, o = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkvo")
    fused = np.asarray(attention["qkv_proj"])
    assert fused.shape == (2, 4, 16, 32)
    np.testing.assert_array_equal(fused[1, 0, 3], q[2 * 16 + 3])
    np.testing.assert_array_equal(fused[1, 2, 3], k[16 + 3])
    np.testing.assert_array_equal(fused[1, 3, 3], v[16 + 3])
    np.testing.assert_array_equal(attention["o_proj"][:, 2, 3], o[:, 2 * 16 + 3])


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_fp8_with_scales(tmp_path, kind):
    tensors = random_tensors(CONFIG, 0)
    weight = tensors[UP]
    scale, spread = {
        "tensor": (np.float32(0.01).reshape(1), 0.01),
        "row": (s := np.linspace(0.01, 0.02, 48, dtype=np.float32).reshape(48, 1), s),
        "block": (b := np.float32([[0.01, 0.02], [0.03, 0.04]]), np.kron(b, np.ones((32, 20)))[:48, :32]),
    }[kind]
    stored = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    name = UP + ("_scale_inv" if kind == "block" else "_scale")
    write_raw(tmp_path / "model.safetensors", tensors | {UP: stored, name: scale})
    config = target_config(TARGET | {"quantization_config": {"weight_block_size": [32, 20]}})
    found = at(dense_params(config, load_params(tmp_path, config, jnp.float32)), UP, config)
    np.testing.assert_allclose(found, stored.astype(np.float32) * spread, rtol=1e-6)
    np.testing.assert_allclose(found, weight, atol=0.1)


def test_blocks_are_the_usual_ones_where_the_configuration_says_nothing_of_them():
    """A folder of int4 experts beside Qwen's own fp8 matrices has the configuration of the experts alone."""
    scale = np.float32([[1, 2], [3, 4]])
    info = SimpleNamespace(file="a", name=f"{UP}_scale_inv", shape=scale.shape)
    scales, group = row_scales(scale, (200, 160), None, info)
    np.testing.assert_array_equal(scales, np.repeat(scale, 128, axis=0)[:200])
    assert group == 128
    info.name = f"{UP}_scale"
    with pytest.raises(CheckpointError, match=r"fits neither the whole, nor the rows, nor the blocks None of"):
        row_scales(scale, (200, 160), None, info)


@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_a_scale_that_fits_nothing_is_refused(tmp_path, name):
    """Also for a tensor of one axis, which has no blocks."""
    tensors = random_tensors(CONFIG, 0)
    stored = {name: tensors[name].astype(ml_dtypes.float8_e4m3fn), f"{name}_scale": np.ones(2, np.float32)}
    write_raw(tmp_path / "model.safetensors", tensors | stored)
    config = target_config(TARGET | {"quantization_config": {"weight_block_size": [32, 20]}})
    with pytest.raises(CheckpointError, match=rf"{name}_scale' of shape \[2\] fits neither .* blocks \(32, 20\)"):
        load_params(tmp_path, config, jnp.float32)


def test_sharded_with_index(tmp_path):
    tensors = random_tensors(CONFIG, 0)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    save_file({"stray": np.zeros(3, np.float32)}, tmp_path / "stray.safetensors")  # not in the index: not read
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    params = load_params(tmp_path, CONFIG, jnp.float32)
    found = checkpoint_tensors(CONFIG, params)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)

    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names 'b\.safetensors'"):
        load_params(tmp_path, CONFIG, jnp.float32)


def test_one_file_of_the_usual_name_is_preferred(tmp_path):
    write_model(tmp_path, TARGET, 0)
    save_file({"copy": np.zeros(3, np.float32)}, tmp_path / "consolidated.safetensors")
    assert set(list_tensors(tmp_path)) == set(checkpoint_table(CONFIG))
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors.*'copy'.*surplus"):
        load_params(tmp_path, CONFIG, jnp.float32)


def test_tensors_are_mapped_not_read(tmp_path):
    save_file(random_tensors(CONFIG, 0), tmp_path / "model.safetensors")
    assert isinstance(list_tensors(tmp_path)[UP].load(), np.memmap)


def test_harmless_extras_are_ignored(tmp_path):
    tied = target_config(TARGET | {"tie_word_embeddings": True})
    extras = {
        "lm_head.weight": np.zeros((61, 32), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8),
    }
    save_file(random_tensors(tied, 0) | extras, tmp_path / "model.safetensors")
    assert "lm_head" not in load_params(tmp_path, tied, jnp.float32)


def test_drafter_with_own_vocabulary(tmp_path):
    raw = DRAFT | {"draft_vocab_size": 20}
    config = draft_config(raw)
    tensors = random_tensors(config, 0) | {"d2t": np.arange(20, dtype=np.int64)}
    extras = {"embed_tokens.weight": np.zeros((61, 32), np.float32), "t2d": np.zeros(61, np.bool_)}
    save_file(tensors | extras, tmp_path / "model.safetensors")
    params = load_params(tmp_path, config, jnp.bfloat16)
    assert params["d2t"].dtype == jnp.int32
    assert params["lm_head"].shape == (20, 32)
    assert params["fc"].dtype == jnp.bfloat16


def missing(tensors):
    del tensors[UP]


def surplus(tensors):
    tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)


def misshaped(tensors):
    tensors[UP] = np.zeros((48, 31), np.float32)


def integers(tensors):
    tensors[UP] = np.zeros((48, 32), np.int32)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, [UP, "[48, 32]", "missing"]),
        (surplus, ["model.layers.9.mlp.up_proj.weight", "[2, 2]", "surplus"]),
        (misshaped, [UP, "[48, 32]", "[48, 31]", "model.safetensors"]),
        (integers, [UP, "int32", "floats"]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, damage, words):
    tensors = random_tensors(CONFIG, 0)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_params(tmp_path, CONFIG, jnp.float32)
    for word in [str(tmp_path), *words]:
        assert word in str(error.value)


def test_all_that_is_wrong_in_one_error(tmp_path):
    tensors = random_tensors(CONFIG, 0)
    kept = {name: t for name, t in tensors.items() if ".mlp." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="and 10 more"):
        load_params(tmp_path, CONFIG, jnp.float32)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_truncated_file(tmp_path, cut):
    path = write_model(tmp_path, TARGET, 0) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[1, 2]",
        b'{"x": {"dtype": "F32"}}',
        b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_corrupt_header(tmp_path, header):
    write_model(tmp_path, TARGET, 0)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*download it again"):
        LLM(tmp_path)


@pytest.mark.parametrize("dtype", ['"C64"', '["C64"]'])
def test_unknown_dtype(tmp_path, dtype):
    header = b'{"x": {"dtype": %b, "shape": [2], "data_offsets": [0, 16]}}' % dtype.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="C64"):
        list_tensors(tmp_path)


def test_folders_without_weights_or_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        LLM(tmp_path)


def test_weights_that_cannot_be_opened(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(Is a directory\)"):
        list_tensors(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[]")])
def test_damaged_tokenizer(tmp_path, name, content):
    (write_byte_tokenizer(tmp_path) / name).write_text(content)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        Tokenizer.of(tmp_path)


def test_index_may_not_leave_the_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"\.\./x\.safetensors"):
        list_tensors(tmp_path)


def test_models_that_cannot_be_found(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        resolve_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="5 is no model"):
        resolve_folder(5)
    with pytest.raises(CheckpointError, match=r"'nobody/nothing'.*Hugging Face Hub.*network"):
        resolve_folder("nobody/nothing")


def test_names_shapes_and_paths_agree():
    table = checkpoint_table(CONFIG)
    parameters = {parameter.path: parameter for parameter in parameters_of(table, CONFIG)}
    assert sorted(name for parameter in parameters.values() for name in parameter.parts) == sorted(table)
    assert checkpoint_shape(table["model.layers.4.self_attn.k_proj.weight"], CONFIG) == (32, 32)
    weight = parameters["layers_4", "self_attn", "qkv_proj"]
    assert (weight.axes, weight.shape) == (("K", "J", "H", "D"), (2, 4, 16, 32))
