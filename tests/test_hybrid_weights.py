"""Weights of hybrids: rows moved at load and back at export, float32 norms and decays, names as published."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.base.errors import CheckpointError
from dflash_jax.models.rope import rope_tables
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import TargetConfig, read_json, target_config
from dflash_jax.weights.export import dense_params, save_model
from dflash_jax.weights.formats.transposed import Transposed
from dflash_jax.weights.initial import initializer
from dflash_jax.weights.loader import load_kv_scales, load_params
from dflash_jax.weights.orders import inverse, rotary_order
from dflash_jax.weights.parameters import PROJECTIONS, checkpoint_tensors, declare, parameters_of
from dflash_jax.weights.safetensors import list_tensors
from dflash_jax.weights.tables import checkpoint_table, gated_delta_table
from dflash_jax.weights.target import read_target_config
from pallas_kernels.lib.rotary import rotate
from tests.pairs import GOLDEN, HYBRID, random_tensors, write_model

CONFIG = target_config(HYBRID)
PUBLISHED = "model.language_model."
GOLDENS = ("q35_dense", "q35_fp8_block")


def golden(name: str) -> tuple[dict, TargetConfig, dict[str, np.ndarray]]:
    """Raw and read configuration of a golden target, and its tensors in float64 by the names after the prefix."""
    folder = GOLDEN / name / "target"
    raw, infos = read_json(folder / "config.json"), list_tensors(folder)
    config = target_config(raw)
    tensors = {}
    for key, info in infos.items():
        tensor = info.load().astype(np.float64)
        if f"{key}_scale_inv" in infos:  # the definition: a scale for each block of 128 x 128
            scale = infos[f"{key}_scale_inv"].load().astype(np.float64)
            rows, columns = (np.arange(n) // 128 for n in tensor.shape)
            tensor = tensor * scale[rows][:, columns]
        tensors[key.removeprefix(PUBLISHED)] = tensor
    return raw, config, tensors


@pytest.fixture(scope="module", params=GOLDENS)
def pair(request):
    raw, config, tensors = golden(request.param)
    params = load_params(GOLDEN / request.param / "target", config, jnp.float32)
    return raw, config, tensors, dense_params(config, params)


def wide(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


# --- orders of rows


def test_the_order_of_a_head():
    assert rotary_order(8, 8).tolist() == list(range(8))
    assert rotary_order(16, 4).tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 2, 3, 10, 11, 12, 13, 14, 15]
    order = rotary_order(256, 64)
    assert order[:33].tolist() == [*range(32), 64]
    assert order[128:161].tolist() == [*range(32, 64), 160]
    assert order[inverse(order)].tolist() == list(range(256))


def test_projections_of_gated_delta(pair):
    """Queries, keys, values, output gates and the gates of the state, as a checkpoint's own order has them."""
    _, config, tensors, params = pair
    mixer, layer = config.gated_delta, config.recurrent_layers[-1]
    HK, r, dk, dv = mixer.key_heads, mixer.values_per_key, mixer.key_dim, mixer.value_dim
    raw = {name: tensors[f"layers.{layer}.linear_attn.{name}"] for name in gated_delta_table()}
    held = {name: wide(array) for name, array in params[f"layers_{layer}"]["linear_attn"].items()}
    assert held["in_proj"].shape == (HK, 2 * dk + 2 * r * dv, config.hidden_size)
    assert held["in_proj_ba"].shape == (HK, r, 2, config.hidden_size)
    assert held["conv1d"].shape == (HK, 2 * dk + r * dv, mixer.conv_width)
    assert held["out_proj"].shape == (config.hidden_size, HK, r * dv)
    assert held["A_log"].shape == held["dt_bias"].shape == (HK, r)

    x = np.random.default_rng(0).standard_normal((5, config.hidden_size))
    channels = x @ raw["in_proj_qkv.weight"].T
    taps = raw["conv1d.weight"][:, 0]
    convolved = sum(np.roll(channels, 3 - i, axis=0) * taps[:, i] for i in range(4))
    q, k, v = np.split(convolved, [HK * dk, 2 * HK * dk], axis=1)
    z, b, a = (x @ raw[f"in_proj_{name}.weight"].T for name in "zba")

    c = 2 * dk + r * dv
    projected = np.einsum("td,hjd->thj", x, held["in_proj"])
    mine = sum(np.roll(projected[..., :c], 3 - i, axis=0) * held["conv1d"][..., i] for i in range(4))
    close(mine[..., :dk].reshape(5, -1), q)
    close(mine[..., dk : 2 * dk].reshape(5, -1), k)
    close(mine[..., 2 * dk :].reshape(5, -1), v)
    close(projected[..., c:].reshape(5, -1), z)
    gates = np.einsum("td,hrjd->thrj", x, held["in_proj_ba"])
    close(gates[..., 0].reshape(5, -1), b)
    close(gates[..., 1].reshape(5, -1), a)
    values = np.random.default_rng(1).standard_normal((5, HK, r * dv))
    close(np.einsum("thz,dhz->td", values, held["out_proj"]), values.reshape(5, -1) @ raw["out_proj.weight"].T)
    close(held["A_log"].ravel(), raw["A_log"])
    close(held["dt_bias"].ravel(), raw["dt_bias"])
    close(held["norm"], raw["norm.weight"])


def test_scores_and_gates_of_attention(pair):
    """Normed, rotated queries and keys have the scores of the checkpoint's; gates and values are in its order."""
    _, config, tensors, params = pair
    layer = config.attention_layers[-1]
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    R, T, half = N // K, 5, config.rope.rotary_dim(H) // 2
    raw = {name: tensors[f"layers.{layer}.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
    norms = {x: 1 + tensors[f"layers.{layer}.self_attn.{x}_norm.weight"] for x in "qk"}
    x = np.random.default_rng(0).standard_normal((T, config.hidden_size))
    positions = np.array([0, 1, 7, 30, 100])
    angles = positions[:, None] * config.rope.theta ** (-np.arange(half) / half)

    def normed(heads, weight):
        return heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weight

    def rotated(heads):
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    query, gate = np.split((x @ raw["q_proj"].T).reshape(T, N, 2 * H), 2, axis=-1)
    key = (x @ raw["k_proj"].T).reshape(T, K, H)
    expected = np.einsum(
        "tkrh,skh->krts",
        rotated(normed(query, norms["q"])).reshape(T, K, R, H),
        rotated(normed(key, norms["k"])),
    )

    held = {name: wide(array) for name, array in params[f"layers_{layer}"]["self_attn"].items()}
    assert held["qkv_proj"].shape == (K, 2 * R + 2, H, config.hidden_size)
    heads = np.einsum("td,kjhd->tkjh", x, held["qkv_proj"])
    cos, sin = rope_tables(config, jnp.asarray(positions[None], jnp.int32))

    def ours(heads, weight):  # over the whole head, as kernels rotate
        array = jnp.asarray(normed(heads, weight), jnp.float32)
        return wide(rotate(array, cos[0], sin[0]))

    queries = ours(heads[:, :, R : 2 * R].reshape(T, N, H), held["q_norm"]).reshape(T, K, R, H)
    scores = np.einsum("tkrh,skh->krts", queries, ours(heads[:, :, -2], held["k_norm"]))
    np.testing.assert_allclose(scores, expected, atol=1e-4 * np.abs(expected).max())
    close(heads[:, :, :R].reshape(T, N, H), gate)
    close(heads[:, :, -1].reshape(T, -1), x @ raw["v_proj"].T)
    close(held["o_proj"].reshape(config.hidden_size, -1), tensors[f"layers.{layer}.self_attn.o_proj.weight"])


# --- dtypes


def test_norms_and_decays_are_float32():
    config = golden("q35_dense")[1]
    params = load_params(GOLDEN / "q35_dense" / "target", config, jnp.bfloat16)
    tensors = golden("q35_dense")[2]
    wide_names = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *_, module, name = ("", *(key.key for key in path))
        is_wide = name in ("A_log", "dt_bias") or (name.endswith("norm") and module != "linear_attn")
        assert leaf.dtype == (jnp.float32 if is_wide else jnp.bfloat16), path
        wide_names |= {name} if is_wide else set()
    assert wide_names == {
        *("A_log", "dt_bias", "norm", "q_norm", "k_norm"),
        *("input_layernorm", "post_attention_layernorm"),
    }
    np.testing.assert_array_equal(params["norm"], np.float32(1) + tensors["norm.weight"].astype(np.float32))
    np.testing.assert_array_equal(
        params["layers_3"]["post_attention_layernorm"],
        np.float32(1) + tensors["layers.3.post_attention_layernorm.weight"].astype(np.float32),
    )
    np.testing.assert_array_equal(
        wide(params["layers_0"]["linear_attn"]["norm"]), tensors["layers.0.linear_attn.norm.weight"]
    )


# --- writing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GOLDENS)
def test_what_was_written_is_read(tmp_path, name, dtype):
    raw, config, tensors = golden(name)
    params = load_params(GOLDEN / name / "target", config, dtype)
    save_model(tmp_path / "new", raw, config, params, dtype)
    written = read_json(tmp_path / "new" / "config.json")
    assert written["architectures"] == ["Qwen3_5ForCausalLM"]
    assert not {"text_config", "vision_config", "quantization_config"} & written.keys()
    again = target_config(written)
    assert set(list_tensors(tmp_path / "new")) == set(checkpoint_table(config))
    before, loaded = dense_params(config, params), load_params(tmp_path / "new", again, dtype)
    for (path, old), (new_path, new) in zip(*map(jax.tree.leaves_with_path, (before, loaded)), strict=True):
        assert path == new_path
        assert new.dtype == (dtype if path[-1].key in PROJECTIONS else old.dtype)
        np.testing.assert_array_equal(wide(new), wide(old.astype(new.dtype)), err_msg=str(path))
    stored = list_tensors(tmp_path / "new")
    for key, info in stored.items():
        expected = tensors.get(key.removeprefix("model."), tensors.get(key))
        assert info.shape == expected.shape
        assert info.dtype == (np.float32 if key.endswith(("A_log", "dt_bias")) else dtype)
        if name == "q35_dense":  # whose numbers are bfloat16
            np.testing.assert_array_equal(wide(info.load()), expected, err_msg=key)


def test_fp8_leaves_the_gates_of_the_state_as_they_are(tmp_path):
    write_model(tmp_path / "first", HYBRID, 0)
    params = load_params(tmp_path / "first", CONFIG, jnp.float32)
    save_model(tmp_path / "fp8", HYBRID, CONFIG, params, "fp8_e4m3")
    stored = list_tensors(tmp_path / "fp8")
    quantized = {name.split(".")[-2] for name, info in stored.items() if info.dtype == ml_dtypes.float8_e4m3fn}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert quantized == {*attention, *mlp, "in_proj_qkv", "in_proj_z", "out_proj"}
    read = read_json(tmp_path / "fp8" / "config.json")
    assert "re:.*in_proj_[ab]$" in read["quantization_config"]["ignore"]
    found = checkpoint_tensors(
        CONFIG, dense_params(CONFIG, load_params(tmp_path / "fp8", target_config(read), "float32"))
    )
    for name, before in checkpoint_tensors(CONFIG, params).items():
        np.testing.assert_allclose(found[name], before, rtol=2.0**-4, atol=1e-2, err_msg=name)


# --- names


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model.")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_prefixes(tmp_path, caplog, prefix, head, tied):
    raw = HYBRID | {"tie_word_embeddings": tied}
    config = target_config(raw)
    tensors = random_tensors(config, 0)
    names = {name: (head if name == "lm_head.weight" else prefix) + name.removeprefix("model.") for name in tensors}
    scale = {f"{prefix}layers.3.self_attn.k_scale": np.float32([2.0])}
    copied_head = {f"{head}lm_head.weight": np.zeros((61, 32), np.float32)} if tied else {}
    save_file({names[name]: t for name, t in tensors.items()} | scale | copied_head, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, "dflash_jax"):
        params = load_params(tmp_path, config, jnp.float32)
    assert not caplog.records
    assert ("lm_head" in params) is not tied
    found = checkpoint_tensors(config, params)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(found[name], tensor, atol=1e-7, err_msg=name)
    assert load_kv_scales(tmp_path, config).k[3].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("text_alone", [True, False], ids=["flag of the text alone", "flag of both"])
@pytest.mark.parametrize(
    ("head", "tied"),
    [(None, True), (lambda embedding: embedding, True), (lambda embedding: 2 * embedding, False)],
    ids=["no head", "a copy", "a head of its own"],
)
def test_a_head_in_the_file_is_used_whatever_the_flags_say(tmp_path, caplog, text_alone, head, tied):
    """As transformers 5.24 does, seen over all flags at both levels: only a head that is absent or equal is tied."""
    raw = {name: value for name, value in HYBRID.items() if name != "tie_word_embeddings"}
    raw["text_config"] = raw["text_config"] | {"tie_word_embeddings": True}
    write_model(tmp_path, raw if text_alone else raw | {"tie_word_embeddings": True}, seed=0)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = {name: np.array(info.load()) for name, info in list_tensors(tmp_path).items()}
    embedding = tensors["model.embed_tokens.weight"]
    if head is not None:
        save_file(tensors | {"lm_head.weight": head(embedding)}, file)
    config = read_target_config(tmp_path)
    assert config.tie_word_embeddings is tied
    assert caplog.text.count("holds a head 'lm_head.weight' of its own, which is used") == (not tied)
    params = load_params(tmp_path, config, jnp.float32)
    np.testing.assert_array_equal(params.get("lm_head", params["embed_tokens"]), embedding * (1 if tied else 2))


def test_what_else_a_checkpoint_holds_is_skipped_and_said(caplog):
    config = golden("q35_dense")[1]
    with caplog.at_level(logging.INFO, "dflash_jax"):
        load_params(GOLDEN / "q35_dense" / "target", config, jnp.bfloat16)
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert "21 tensors of visual and 4 tensors of mtp are skipped" in record.getMessage()


def test_errors_name_the_tensor_of_the_file(tmp_path):
    tensors = {PUBLISHED + name.removeprefix("model."): t for name, t in random_tensors(CONFIG, 0).items()}
    tensors["lm_head.weight"] = tensors.pop(f"{PUBLISHED}lm_head.weight")
    conv = f"{PUBLISHED}layers.0.linear_attn.conv1d.weight"
    tensors[conv] = tensors[conv].transpose(0, 2, 1).copy()  # as MLX stores it
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    del tensors[f"{PUBLISHED}norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_params(tmp_path, CONFIG, jnp.float32)
    for words in (
        f"'{conv}' should have shape [56, 1, 4] and has [56, 4, 1]",
        f"'{PUBLISHED}norm.weight' of shape [32] is missing",
        "'model.layers.0.mlp.up_proj.weight' of shape [2, 2] is surplus",
    ):
        assert words in str(error.value)


def test_a_dense_model_has_no_images(tmp_path):
    raw = {"architectures": ["Qwen3ForCausalLM"], **HYBRID["text_config"]}
    raw |= {"layer_types": None, "rope_parameters": {"rope_theta": 1e4}}
    config = target_config(raw)
    save_file(random_tensors(config, 0) | {"mtp.norm.weight": np.ones(32, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'mtp\.norm\.weight'.*surplus"):
        load_params(tmp_path, config, jnp.float32)


# --- layouts and new models


def test_cpus_hold_projections_transposed(tmp_path):
    write_model(tmp_path, HYBRID, 0)
    params = load_params(tmp_path, CONFIG, jnp.float32, transpose=True)
    plain = load_params(tmp_path, CONFIG, jnp.float32)
    mixer = params["layers_0"]["linear_attn"]
    transposed = {name for name, leaf in mixer.items() if isinstance(leaf, Transposed)}
    assert transposed == {"in_proj", "in_proj_ba", "out_proj"}
    for name in transposed:
        weight = plain["layers_0"]["linear_attn"][name]
        assert mixer[name].shape == weight.shape
        inputs = 32 if name != "out_proj" else weight.shape[1] * weight.shape[2]
        np.testing.assert_array_equal(mixer[name].values, weight.reshape(-1, inputs).T)


def test_key_heads_are_shared_by_devices():
    mesh = Mesh.of(2)
    for parameter in parameters_of(gated_delta_table(), CONFIG):
        spec = mesh.place(parameter.axes, parameter.shape).spec
        (name,) = parameter.path
        heads = {"norm": None, "out_proj": 1}.get(name, 0)
        assert [axis for axis, shared in enumerate(spec) if shared] == ([] if heads is None else [heads]), name


def test_a_new_model_forgets_slowly():
    draw = {name: initializer(name)(jax.random.key(0), (64, 64)) for name in ("A_log", "dt_bias", "conv1d")}
    decay, step = jnp.exp(draw["A_log"]), jax.nn.softplus(draw["dt_bias"])
    assert 1 <= decay.min() < 1.1
    assert 15 < decay.max() <= 16
    assert step.min() * 1.001 >= 1e-3
    assert step.max() <= 0.1001
    assert 0.008 < jnp.exp(jnp.log(step).mean()) < 0.012
    assert jnp.abs(draw["conv1d"]).max() <= 1 / 8


class Mixer(nn.Module):
    """Declares what a Gated DeltaNet layer holds."""

    def setup(self):
        self.weights = declare(self, gated_delta_table(), CONFIG)

    def __call__(self):
        return self.weights


def test_a_layer_declares_what_is_loaded():
    declared = Mixer().init(jax.random.key(0))["params"]
    loaded = {
        parameter.path[2]: parameter.shape
        for parameter in parameters_of(checkpoint_table(CONFIG), CONFIG)
        if parameter.path[:2] == ("layers_0", "linear_attn")
    }
    assert {name: array.shape for name, array in declared.items()} == loaded
    assert set(loaded) == {"A_log", "conv1d", "dt_bias", "in_proj", "in_proj_ba", "norm", "out_proj"}
