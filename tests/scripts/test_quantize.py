"""`scripts/quantize.py`: what rounding costs, what its folders hold, and that the engine multiplies just that."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantize
import shards

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import draft_config, read_json, target_config
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.cache import SequenceCache
from dflash_jax.weights.encodings import Fp8Blocks, Int4
from dflash_jax.weights.export import dense_params, save_json, save_model, save_tensors
from dflash_jax.weights.folder import EMBEDDED
from dflash_jax.weights.gptq import gptq, nearest
from dflash_jax.weights.layouts import compressed
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.packing import to_numbers
from dflash_jax.weights.safetensors import list_tensors
from pallas_kernels.lib.norm import rms_norm
from tests.packers import config_of
from tests.pairs import DRAFT, GOLDEN, greedy, prompt, tokens_of, write_model

TARGET = EMBEDDED / "target"
ROOT = Path(__file__).parents[2]
CALIBRATION = [ROOT / "dflash_jax" / name for name in ("serve/http", "weights", "state")]
HELD_OUT = ROOT / "dflash_jax/engine/host/scheduler.py"
HYBRID = GOLDEN / "q35_dense" / "target"
FP8_HYBRID = GOLDEN / "q35_fp8_block" / "target"


def correlated(rows=2000, inputs=384, seed=0):
    """Inputs of which a few directions hold most, each dimension of another size."""
    rng = np.random.default_rng(seed)
    few = rng.normal(size=(rows, 48)) @ rng.normal(size=(48, inputs))
    return np.float32((few + 0.3 * rng.normal(size=(rows, inputs))) * np.exp(rng.normal(size=inputs)))


# --- one matrix


@pytest.mark.parametrize("symmetric", [True, False])
def test_errors_of_products_with_the_inputs_become_small(symmetric):
    """Over three blocks of columns; the numbers stand where files have them, whatever order they were rounded in."""
    x, weight = correlated(), np.float32(np.random.default_rng(1).normal(0.01, 0.02, (40, 384)))
    moment = jnp.asarray(x.T @ x / len(x))

    def error(matrix):
        return np.square(x @ (matrix.dense() - weight).T).mean() / np.square(x @ weight.T).mean()

    simple = nearest(weight, 128, symmetric=symmetric)
    good = gptq(weight, moment, 128, symmetric=symmetric, name="weight")
    assert simple.scales.shape == good.scales.shape == (40, 3)
    assert error(good) < 0.05 * error(simple) < 0.05 * 0.02
    assert (good.zeros == 8).all() == symmetric


@pytest.mark.parametrize("symmetric", [True, False])
def test_nearest_numbers_are_off_by_half_a_step(symmetric):
    weight = np.random.default_rng(0).normal(0.01, 0.02, (9, 256)).astype(np.float32)
    weight[0], weight[1] = 0, np.abs(weight[1]) + 1  # zeros, and a range that must contain 0
    matrix = nearest(weight, 64, symmetric=symmetric)
    steps = np.repeat(matrix.scales.astype(np.float32), 64, axis=1)
    clipped = 1.0 if symmetric else 0.5  # the largest number of a symmetric group, 7.5 steps, has only 7
    assert (np.abs(matrix.dense() - weight) <= steps * (clipped + 0.1)).all()
    assert np.abs(matrix.dense() - weight).mean() < 0.3 * steps.mean()
    # Numbers are rounded for the scales that the file holds.
    zeros = np.repeat(matrix.zeros.astype(np.float32), 64, axis=1)
    np.testing.assert_array_equal(to_numbers(matrix.values), np.clip(np.rint(weight / steps) + zeros, 0, 15))


def test_inputs_must_be_finite():
    with pytest.raises(CheckpointError, match=r"^o_proj: the inputs from the calibration text are not all finite"):
        gptq(np.ones((8, 16), np.float32), jnp.full((16, 16), jnp.nan), 16, symmetric=True, name="o_proj")


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_loader_reads_what_is_packed(tmp_path, symmetric):
    """Rows that fill no int32 of zero points."""
    weight = np.random.default_rng(0).normal(0.01, 0.02, (13, 96)).astype(np.float32)
    matrix = nearest(weight, 32, symmetric=symmetric)
    encoding = Int4(32, symmetric=symmetric)
    tensors = encoding.tensors("weight", weight, None)
    save_tensors(tmp_path / "model.safetensors", tensors)
    infos = {info.name: info for info in list_tensors(tmp_path).values()}
    read = compressed(infos, (13, 96), config_of(encoding.configuration([])))
    assert read.problems == ()
    assert ("weight_zero_point" in tensors) == (not symmetric)
    for part in ("values", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(read.load(), part), getattr(matrix, part))
    np.testing.assert_array_equal(encoding.dense(tensors), matrix.dense())


def test_blocks_have_a_scale_each():
    weight = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    weight[128:, :128] *= 1000
    tensors = Fp8Blocks().tensors("weight", weight, None)
    assert tensors["weight_scale_inv"].shape == (2, 3)
    np.testing.assert_allclose(tensors["weight_scale_inv"][1, 0], np.abs(weight[128:, :128]).max() / 448, rtol=1e-6)
    np.testing.assert_allclose(
        Fp8Blocks().dense(tensors), weight, rtol=2**-4, atol=np.abs(weight[:128]).max() / 448 / 512
    )


# --- whole models


# Layers that are rounded, and pieces of text: errors add up, and 16 layers need more inputs than one does.
SIZES = [(1, 8), (16, 64)]


def perplexity(folders):
    """Perplexity of the held-out file for the parameters of folders of the embedded target, in float32."""
    rows = jnp.array(Tokenizer(TARGET).encode(HELD_OUT.read_text())[:1024], jnp.int32).reshape(4, 256)
    configs = [target_config(read_json(folder / "config.json")) for folder in folders]
    model = TargetModel(configs[0])

    @jax.jit
    def loss(params):
        bound = model.bind({"params": params})
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        logits = jax.nn.log_softmax(bound.logits(bound(rows, positions, SequenceCache())[0]))
        return -jnp.take_along_axis(logits[:, :-1], rows[:, 1:, None], axis=2).mean()

    params = [dense_params(c, load_params(f, c, jnp.float32)) for f, c in zip(folders, configs, strict=True)]
    return [float(jnp.exp(loss(of_folder))) for of_folder in params]


@pytest.mark.long
@pytest.mark.parametrize(("layers", "samples"), SIZES)
def test_calibration_loses_less_than_rounding(tmp_path, layers, samples):
    """On text that was not calibrated with, where the first layers are rounded; and fp8 loses almost nothing."""
    source = quantize.Source.of(TARGET)
    calibration = quantize.calibrated(source, CALIBRATION, samples=samples, length=128)
    chosen = {f"layers_{index}" for index in range(layers)}
    first = replace(source, parameters=[p for p in source.parameters if p.path[0] in chosen])
    int4 = Int4(128, symmetric=True)
    quantize.quantize(first, tmp_path / "nearest", int4)
    quantize.quantize(first, tmp_path / "gptq", int4, calibration)
    quantize.quantize(first, tmp_path / "blocks", Fp8Blocks())
    again, config = quantize.calibrated(source, CALIBRATION, samples=samples, length=128), source.config
    params = dense_params(config, load_params(tmp_path / "gptq", config, jnp.float32))
    for index in range(layers):
        again.advance(index, params[f"layers_{index}"])
    np.testing.assert_allclose(again.stream, calibration.stream, atol=1e-3)  # later layers see rounded ones
    wide, *costs = perplexity([TARGET, *(tmp_path / name for name in ("nearest", "gptq", "blocks"))])
    simple, calibrated, blocks = (cost / wide - 1 for cost in costs)
    assert calibrated < 0.6 * simple
    assert calibrated < 0.05
    assert abs(blocks) < 0.01


def test_rows_of_an_fp8_model_are_its_own_again(tmp_path):
    quantize.main([str(TARGET), str(tmp_path), "--format", "fp8-channel"])
    assert (tmp_path / "model.safetensors").read_bytes() == (TARGET / "model.safetensors").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()


def test_drafters_are_what_save_model_writes(tmp_path):
    source = write_model(tmp_path / "source", DRAFT, 1, scale=4.0)
    config = draft_config(DRAFT)
    save_model(tmp_path / "saved", DRAFT, config, load_params(source, config, jnp.float32), "fp8_e4m3")
    quantize.main([str(source), str(tmp_path / "out"), "--format", "fp8-channel"])
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


# --- a hybrid, with vision and MTP


def test_layers_see_what_they_see_in_the_model():
    """The stream after three layers of one kind and one of the other, and the inputs of projections of both."""
    source = quantize.Source.of(HYBRID)
    config = replace(source.config, layers=source.config.layers[:5])
    params = load_params(HYBRID, source.config, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 100, (3, 40))
    calibration = quantize.Calibration(config, np.array(params["embed_tokens"])[tokens], rows=80)
    delta = calibration.moments(0, params["layers_0"])
    for index in range(3):
        calibration.advance(index, params[f"layers_{index}"])
    before, moments = calibration.stream.copy(), calibration.moments(3, params["layers_3"])
    calibration.advance(3, params["layers_3"])

    @jax.jit
    def streams(params):
        model = TargetModel(config).bind({"params": params})
        positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
        return jnp.split(model(jnp.array(tokens), positions, SequenceCache(), taps=(2, 3))[1], 2, axis=-1)

    for mine, wanted in zip((before, calibration.stream), streams(params), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    x = np.asarray(rms_norm(before, params["layers_3"]["input_layernorm"], config.rms_norm_eps)).reshape(-1, 64)
    np.testing.assert_allclose(moments["self_attn", "qkv_proj"], x.T @ x / len(x), rtol=1e-3, atol=1e-4)
    widths = {("self_attn", "qkv_proj"): 64, ("self_attn", "o_proj"): 128, ("mlp", "gate_up_proj"): 64}
    assert {path: len(moment) for path, moment in moments.items()} == widths | {("mlp", "down_proj"): 64}
    assert {path for path in delta if path[0] == "linear_attn"} == {("linear_attn", x) for x in ("in_proj", "out_proj")}


def quantized_and_dense(out, encoding):
    """A quantised folder, one with the float32 matrices that its tensors stand for, and the tensors of the first."""
    source = quantize.Source.of(FP8_HYBRID)
    quantize.quantize(source, out / "quantized", encoding)
    held, tensors = {name: info.load() for name, info in list_tensors(out / "quantized").items()}, {}
    for name in filter(lambda name: not name.endswith("_scale_inv"), source.tensors):
        base = name.removesuffix("weight")
        parts = {key.removeprefix(base): array for key, array in held.items() if key.startswith(base + "weight")}
        tensors[name] = unpacked(parts, encoding) if len(parts) > 1 else held[name]
    (out / "dense").mkdir()
    config = read_json(FP8_HYBRID / "config.json")
    del config["quantization_config"]
    save_json(out / "dense" / "config.json", config)
    save_tensors(out / "dense" / "model.safetensors", tensors)
    return out / "quantized", out / "dense", held


def unpacked(parts, encoding):
    """Independent of the product's own unpacking."""
    if "weight_scale_inv" in parts:
        numbers, scales = parts["weight"].astype(np.float32), parts["weight_scale_inv"]
        rows, columns = (np.arange(size) // 128 for size in numbers.shape)
        return numbers * scales[rows][:, columns]
    shape, words = tuple(parts["weight_shape"]), parts["weight_packed"]
    numbers, zeros = np.empty(shape, np.float32), np.empty(parts["weight_scale"].shape, np.float32)
    for place in range(8):
        numbers[:, place::8] = words >> 4 * place & 15
        zeros[place::8] = parts["weight_zero_point"] >> 4 * place & 15
    groups = np.arange(shape[1]) // encoding.group
    return (numbers - zeros[:, groups]) * parts["weight_scale"].astype(np.float32)[:, groups]


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        pytest.param(Int4(16, symmetric=False), "compressed-tensors", id="int4", marks=pytest.mark.long),
        pytest.param(Fp8Blocks(), "fp8", id="fp8"),
    ],
)
def test_a_hybrid_decodes_as_the_dequantised_weights(tmp_path, encoding, name):
    folder, dense_folder, held = quantized_and_dense(tmp_path, encoding)
    prompts = [prompt(*np.random.default_rng(2).integers(0, 100, 24).tolist())]
    options = {"dtype": "float32", "max_num_seqs": 2, "compile_at_start": False}
    answers = [
        tokens_of(LLM(path, quantization=method, **options).generate(prompts, greedy(24)))
        for path, method in ((folder, name), (dense_folder, None))
    ]
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0] for token in tokens}) > 8
    small = {key for key, array in held.items() if array.dtype.itemsize == 1 or key.endswith("_packed")}
    rounded = {key.removeprefix("model.language_model.layers.").rpartition(".")[0][2:] for key in small}
    assert rounded == {
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        *(f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "out_proj")),
    }
    config = read_json(folder / "config.json")["quantization_config"]
    wide = set(config["modules_to_not_convert" if name == "fp8" else "ignore"])
    delta = {f"model.language_model.layers.0.linear_attn.{x}" for x in ("conv1d", "in_proj_a", "in_proj_b")}
    assert wide >= {"lm_head", "model.language_model.embed_tokens", "mtp.fc", "model.visual.patch_embed.proj", *delta}
    assert held["mtp.fc.weight"].dtype.itemsize == 2


def test_large_models_are_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 15)
    source = quantize.Source.of(HYBRID)
    quantize.quantize(source, tmp_path, Fp8Blocks())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert list_tensors(tmp_path).keys() >= source.tensors.keys()
    assert not list(tmp_path.glob(".quantize-*"))
    with pytest.raises(CheckpointError, match="give another folder"):
        quantize.quantize(source, tmp_path, Fp8Blocks())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([GOLDEN / "qwen3_moe" / "target", "--format", "fp8-block"], "Qwen3MoeForCausalLM has .* experts"),
        ([GOLDEN / "q35_int4_autoround" / "target", "--format", "fp8-block"], "has 4 bits already"),
        ([HYBRID, "--format", "int4", "--nearest"], "64 inputs, which groups of 128 do not divide; .* --group-size"),
        ([HYBRID, "--format", "int4", "--calibration", HELD_OUT], "has no tokenizer"),
        ([TARGET, "--format", "int4", "--calibration", HELD_OUT, "--length", "2049"], "the model's 2048"),
        ([EMBEDDED / "draft", "--format", "int4", "--nearest"], "is a drafter"),
        (
            [TARGET, "--format", "int4", "--calibration", "nope"],
            "--calibration nope does not exist; give text files or folders.",
        ),
        (
            [TARGET, "--format", "int4", "--calibration", HYBRID],
            "--calibration .*target holds none of .py, .txt, .md and .rst; give text files.",
        ),
    ],
    ids=["experts", "4 bits", "groups", "tokenizer", "length", "drafter", "no path", "no text"],
)
def test_what_cannot_be_quantised_is_refused_by_name(tmp_path, capsys, arguments, message):
    source, *options = map(str, arguments)
    assert quantize.main([source, str(tmp_path / "out"), *options]) == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_help_has_no_default_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        quantize.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "format of the written matrices" in shown
    assert "None" not in shown
    assert "pieces of the calibration text (default: 128)" in shown
