"""Experts that checkpoints hold in 4 bits and in fp8, each apart: stacked as they are, and multiplied so."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.layouts import rounded
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.naming import Naming
from dflash_jax.weights.tables import checkpoint_table
from tests.packers import AUTO_ROUND, AWQ, COMPRESSED, GPTQ_V2, packed
from tests.pairs import greedy, prompt, random_tensors, tokens_of, write_model
from tests.test_experts import HYBRID_MOE
from tests.test_quantized_targets import save_raw

GROUP = 8
NAMING = Naming("model.language_model.", experts_apart=True)
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
AUTO = AUTO_ROUND | {"sym": True, "group_size": GROUP}
MIXED = FP8 | AUTO | {"sym": False}


def raw_config(quantization=None, **changes):
    sizes = {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16} | changes
    raw = HYBRID_MOE | {"text_config": HYBRID_MOE["text_config"] | sizes}
    return raw if quantization is None else raw | {"quantization_config": quantization}


def in_fp8(weight, scale, suffix="_scale_inv", block=16):
    """The tensors of a matrix in e4m3 by the ends of their names, and the matrix that they stand for."""
    spread = np.kron(scale, np.ones((block, block), np.float32)) if scale.ndim == 2 and block else scale
    spread = np.broadcast_to(spread, weight.shape) if block is None else spread[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": numbers, f".weight{suffix}": scale}, numbers.astype(np.float32) * spread


def in_int4(layout, weight, rng, *, symmetric):
    groups = (weight.shape[0], weight.shape[1] // GROUP)
    zeros = np.full(groups, 8, np.uint8) if symmetric else rng.integers(1, 16, groups, np.uint8)
    scales = rng.uniform(0.02, 0.06, groups).astype(np.float16)
    each, points = (np.repeat(part.astype(np.float32), GROUP, axis=1) for part in (scales, zeros))
    numbers = np.clip(np.round(weight / each + points), 0, 15).astype(np.uint8)
    parts = packed(layout, numbers, scales, zeros)
    return {f".{name}": array for name, array in parts.items()}, (numbers - points) * each


def quantized(kind, weight, rng):
    rows, columns = weight.shape
    if kind == "blocks":
        scale = rng.uniform(0.004, 0.008, (-(-rows // 16), -(-columns // 16))).astype(ml_dtypes.bfloat16)
        return in_fp8(weight, scale.astype(np.float32))
    if kind == "channels":
        return in_fp8(weight, np.float32(rng.uniform(0.004, 0.008, (rows, 1))), "_scale", None)
    if kind == "tensor":
        return in_fp8(weight, np.float32(rng.uniform(0.004, 0.008)).reshape(()), "_scale", None)
    layout, _, rest = kind.partition(" ")
    return in_int4(layout, weight, rng, symmetric=rest == "symmetric")


def write(folder, quantization, kind_of, **changes):
    """A hybrid whose experts are quantised, in `small`, and the same numbers in float32, in `wide`.

    Args:
        folder: of both.
        quantization: what the configuration of the first says.
        kind_of: gives the kind of an expert's matrix by its name; None leaves it at float32.
        changes: of the configuration.
    """
    raw = raw_config(quantization, **changes)
    config = target_config(raw)
    rng, small, wide = np.random.default_rng(1), {}, {}
    for name, tensor in apart(random_tensors(config, seed=4)).items():
        kind = kind_of(name) if ".experts." in name else None
        wide[name] = tensor
        if kind is None:
            small[name] = tensor
            continue
        parts, wide[name] = quantized(kind, tensor, rng)
        small |= {name.removesuffix(".weight") + end: array for end, array in parts.items()}
    for name, tensors, fields in (("small", small, raw), ("wide", wide, raw_config(**changes))):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
        save_raw(folder / name / "model.safetensors", tensors)
    assert set(wide) == set(checkpoint_table(config, NAMING))
    return config


def apart(tensors):
    """Tensors by the names that published files have, each expert's by themselves."""
    renamed = {}
    for name, array in tensors.items():
        name = name.replace("model.", NAMING.prefix, 1)
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(array.reshape(len(array), 2, -1, array.shape[-1])):
                for part, matrix in zip(("gate", "up"), both, strict=True):
                    renamed[name.replace("gate_up_proj", f"{i}.{part}_proj.weight")] = matrix
        elif name.endswith("experts.down_proj"):
            renamed |= {name.replace("down_proj", f"{i}.down_proj.weight"): down for i, down in enumerate(array)}
        else:
            renamed[name] = array
    return renamed


def experts_of(params, layer=1):
    return params[f"layers_{layer}"]["mlp"]["experts"]


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        (AUTO, "gptq symmetric"),
        (GPTQ_V2 | {"group_size": GROUP}, "gptq_v2 zeros"),
        (AWQ | {"group_size": GROUP}, "awq zeros"),
        (COMPRESSED | {"config_groups": {"g": {"weights": {"group_size": GROUP}}}}, "compressed zeros"),
        (FP8, "blocks"),
        (FP8, "channels"),
        (FP8, "tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_format_is_stacked_as_it_is(tmp_path, quantization, kind):
    """On one device, and split over four: rows with their scales, and groups of inputs, which may be cut for that."""
    config = write(tmp_path, quantization, lambda name: kind)
    wide = experts_of(load_params(tmp_path / "wide", config, jnp.float32))
    mesh = Mesh.of(4)
    for place in (None, mesh.place):
        options = {"transpose": True} if place is None else {"place": place}
        params = load_params(tmp_path / "small", config, jnp.float32, **options)
        held = experts_of(params)
        dense = experts_of(dense_params(config, params))
        for name, stack in held.items():
            assert isinstance(stack, Grouped)
            assert stack.shape == wide[name].shape
            np.testing.assert_array_equal(dense[name], wide[name])
            assert (stack.zeros is None) == ("zeros" not in kind)
            bits = stack.values.nbytes * 8 / np.prod(stack.shape)
            assert bits == (8 if quantization is FP8 else 4)
            for part in jax.tree.leaves(stack) if place else []:
                assert part.sharding.shard_shape(part.shape)[2] * 4 == part.shape[2]
                assert tuple(part.sharding.spec)[:3] == tuple(stack.shard(2, "tp").values)


def half_and_half(name):
    """Layers in 4 bits with zero points, and in blocks of fp8."""
    return "gptq zeros" if int(name.split("layers.")[1][0]) % 2 else "blocks"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target in both formats, and the same numbers in float32."""
    folder = tmp_path_factory.mktemp("experts")
    two_layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    write(folder, MIXED, half_and_half, **two_layers)
    return folder


PROMPTS = [prompt(*range(2, 19)), prompt(7, 3, 11)]


@pytest.fixture(scope="module")
def expected(pair):
    """Tokens of the engine that multiplies dequantised experts."""
    return tokens_of(LLM(pair / "wide", max_num_seqs=2).generate(PROMPTS, greedy(24)))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 4])
def test_tokens_are_those_of_the_dequantized_model(pair, expected, devices):
    llm = LLM(pair / "small", max_num_seqs=2, tensor_parallel_size=devices)
    for layer, dtype in ((0, np.int16), (1, np.uint16)):
        held = experts_of(llm.engine.target.params, layer)
        assert {stack.values.dtype for stack in held.values()} == {np.dtype(dtype)}
    assert tokens_of(llm.generate(PROMPTS, greedy(24))) == expected
    assert len({token for tokens in expected for token in tokens}) > 8


def test_training_widens_fp8(tmp_path, caplog):
    config = write(tmp_path, FP8, lambda name: "blocks")
    wide = experts_of(load_params(tmp_path / "wide", config, jnp.float32))
    held = experts_of(load_params(tmp_path / "small", config, jnp.float32, keep_quantized=False))
    for name, array in held.items():
        np.testing.assert_array_equal(array, wide[name])
    assert "90 matrices of experts in fp8 are held in" in caplog.text


def test_fp8_beside_16_bits_is_widened_with_a_warning(tmp_path, caplog):
    config = write(tmp_path, FP8, lambda name: None if "layers.1.mlp.experts.3.up" in name else "blocks")
    params, wide = (load_params(tmp_path / name, config, jnp.float32) for name in ("small", "wide"))
    assert "11 matrices of experts in fp8 are held in" in caplog.text
    np.testing.assert_array_equal(experts_of(params)["gate_up_proj"], experts_of(wide)["gate_up_proj"])
    assert isinstance(experts_of(params)["down_proj"], Grouped)
    assert isinstance(experts_of(params, 2)["gate_up_proj"], Grouped)


@pytest.mark.parametrize("other", [None, "blocks"])
def test_4_bits_beside_another_format_are_refused_by_name(tmp_path, other):
    config = write(tmp_path, MIXED, lambda name: other if "layers.2.mlp.experts.3.up" in name else "gptq zeros")
    problem = r"experts\.0\.gate_proj\.qweight' is packed, and '.*layers\.2\.mlp\.experts\.3\.up_proj\.weight' is not"
    with pytest.raises(CheckpointError, match=problem):
        load_params(tmp_path / "small", config, jnp.float32)


def test_groups_that_devices_would_cut_too_small_are_refused(tmp_path):
    config = write(tmp_path, AUTO, lambda name: "gptq symmetric", moe_intermediate_size=24)
    with pytest.raises(CheckpointError, match=r"down_proj.*: 4 devices get groups of 2 inputs, .* a multiple of 4"):
        load_params(tmp_path / "small", config, jnp.float32, Mesh.of(4).place)


def test_orders_of_inputs_are_refused(tmp_path):
    config = write(tmp_path, GPTQ_V2 | {"group_size": GROUP}, lambda name: "gptq_v2 zeros")
    path = tmp_path / "small" / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    data = path.read_bytes()[8 + size :]
    index = np.roll(np.arange(32, dtype=np.int32) // GROUP, 1)
    name = "model.language_model.layers.1.mlp.experts.2.gate_proj.g_idx"
    header[name] = {"dtype": "I32", "shape": [32], "data_offsets": [len(data), len(data) + index.nbytes]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + index.tobytes())
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj\.weight has another order of inputs.*desc_act"):
        load_params(tmp_path / "small", config, jnp.float32)


@pytest.mark.parametrize("is_apart", [False, True])
def test_rounding_at_load(tmp_path, is_apart):
    """`--quantization fp8` of a checkpoint at 16 bits rounds its experts, stacked or apart."""
    config = write(tmp_path, FP8, lambda name: None)
    folder = tmp_path / "small"
    if not is_apart:
        folder = write_model(tmp_path / "stacked", raw_config(), seed=4)
    exact = experts_of(load_params(tmp_path / "wide", config, jnp.float32))
    params = load_params(folder, config, jnp.float32, quantize=rounded)
    stored = experts_of(dense_params(config, params))
    for name, stack in experts_of(params).items():
        assert (stack.values.dtype, stack.scales.shape[-1]) == (np.int16, 1)
        error = np.abs(stored[name] - exact[name]) / np.abs(exact[name]).max(axis=-1, keepdims=True)
        assert 0 < error.max() < 2**-4


@pytest.mark.parametrize(("quantization", "kind"), [(AUTO, "gptq symmetric"), (FP8, "blocks")], ids=["int4", "fp8"])
@pytest.mark.usefixtures("fresh_programs")  # threads that compile take memory, too
def test_loading_holds_one_stack_at_a_time(tmp_path, monkeypatch, quantization, kind):
    sizes = {"num_experts": 32, "moe_intermediate_size": 128, "hidden_size": 256}
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = write(tmp_path, quantization, lambda name: kind, **sizes, **one_layer)
    monkeypatch.setattr(jax, "device_put", lambda array, _: jnp.zeros(array.shape, array.dtype))
    load_params(tmp_path / "small", config, jnp.float32)  # what is traced and imported once is no tensor
    tracemalloc.start()
    try:
        params = load_params(tmp_path / "small", config, jnp.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.8 * experts_of(params, 0)["gate_up_proj"].nbytes
