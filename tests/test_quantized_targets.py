"""Quantised targets: rows that are moved and shared, fused arrays of several formats, rounding at load."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.base.errors import CheckpointError
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.train.evaluation import engine_params
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.formats.side_by_side import SideBySide
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import PROJECTIONS, checkpoint_tensors
from dflash_jax.weights.safetensors import list_tensors
from dflash_jax.weights.widened import of_eight_bits
from tests.packers import COMPRESSED, GPTQ, GPTQ_V2, config_of, packed
from tests.pairs import GOLDEN, HYBRID, golden_llm, random_tensors


def quantized_model(folder, layouts, quantization, *, group=8, index=None):
    """A hybrid whose matrices of these names are packed; returns its configuration and its dense tensors.

    A layout is of 4 bits, unless its name ends in " 8".
    """
    raw = HYBRID | {"quantization_config": quantization}
    config = target_config(raw)
    tensors, files, rng = random_tensors(config, 0), {}, np.random.default_rng(1)
    for name, tensor in tensors.items():
        base, module = name.removesuffix(".weight"), name.split(".")[-2]
        layout = layouts.get(module)
        if layout is None:
            files[name] = tensor
        elif layout == "fp8":
            scale = np.float32(rng.uniform(0.01, 0.02, (-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16))))
            spread = np.kron(scale, np.ones((16, 16), np.float32))[: tensor.shape[0], : tensor.shape[1]]
            files[name] = (tensor / spread).astype(ml_dtypes.float8_e4m3fn)
            files[f"{name}_scale_inv"] = scale
            tensors[name] = files[name].astype(np.float32) * spread
        else:
            outputs, inputs = tensor.shape
            layout, _, bits = layout.partition(" ")
            most = 2 ** int(bits or 4)
            numbers = rng.integers(0, most, tensor.shape, np.uint8)
            zeros = rng.integers(1, most, (outputs, inputs // group), np.uint8)
            scales = (rng.uniform(0.16, 1.6, zeros.shape) / most).astype(np.float16)
            of = np.arange(inputs) // group
            if index is not None and module in index:
                of = np.random.default_rng(index[module]).permutation(of).astype(np.int32)
            order = None if index is None or module not in index else of
            for part, array in packed(layout, numbers, scales, zeros, order, int(bits or 4)).items():
                files[f"{base}.{part}"] = array
            tensors[name] = (numbers - zeros[:, of].astype(np.float32)) * scales.astype(np.float32)[:, of]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_raw(folder / "model.safetensors", files)
    return config, tensors


def save_raw(path, tensors):
    """Write a safetensors file with fp8 tensors in it, which the package cannot."""
    header, data = {}, b""
    names = {np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    names |= {np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}
    for name, array in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_holds(config, params, tensors):
    for name, found in checkpoint_tensors(config, dense_params(config, params)).items():
        np.testing.assert_allclose(found, tensors[name], rtol=1e-6, atol=1e-7, err_msg=name)


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GATES = ("in_proj_a", "in_proj_b")  # at 16 bits in calibrated checkpoints, quantised in exports without a model
DELTA = ("in_proj_qkv", "in_proj_z", "out_proj")
V2_8 = GPTQ_V2 | {"group_size": 8}
GROUPS_OF_8 = {"config_groups": {"g": {"weights": {"group_size": 8}}}}


def test_rows_are_moved_and_joined_packed(tmp_path):
    """Heads, gates and channels in our order; the six rows of in_proj_a and in_proj_b fill no int32 of zero points."""
    config, tensors = quantized_model(tmp_path, dict.fromkeys((*EVERY, *DELTA, *GATES), "gptq_v2"), V2_8)
    params = load_params(tmp_path, config, jnp.bfloat16)
    layers = [params["layers_0"]["linear_attn"], params["layers_3"]["self_attn"], params["layers_3"]["mlp"]]
    matrices = {name: leaf for layer in layers for name, leaf in layer.items() if name in PROJECTIONS}
    assert {name for name, leaf in matrices.items() if isinstance(leaf, Grouped)} == set(matrices)
    wide = load_params(tmp_path, config, jnp.float32)  # what is not quantised is rounded to bfloat16
    assert_holds(config, wide, tensors)


@pytest.mark.parametrize(
    ("layouts", "index", "apart"),
    [
        (
            {"q_proj": "gptq_v2", "v_proj": "gptq_v2", "gate_proj": "gptq_v2"},
            {},
            {"qkv_proj": 3, "gate_up_proj": 2},
        ),
        (
            {"q_proj": "gptq_v2", "k_proj": "fp8", "v_proj": "fp8", "in_proj_z": "fp8", "up_proj": "gptq_v2"},
            {},
            {"qkv_proj": 2, "in_proj": 2, "gate_up_proj": 2},
        ),
        (
            dict.fromkeys(EVERY, "gptq_v2"),
            {"q_proj": 5, "k_proj": 5, "v_proj": 6, "down_proj": 7},
            {"qkv_proj": 2},
        ),
    ],
    ids=["left at 16 bits", "fp8 and 4 bits", "orders"],
)
def test_each_tensor_of_a_fused_array_keeps_its_own_format(tmp_path, layouts, index, apart):
    """hybrid.md 8.13: others copy 16-bit numbers into the parameters of a quantised neighbour."""
    quantization = V2_8 | {"weight_block_size": [16, 16]}
    config, tensors = quantized_model(tmp_path, layouts, quantization, index=index)
    for transpose in (False, True):
        params = load_params(tmp_path, config, jnp.float32, transpose=transpose)
        assert_holds(config, params, tensors)
        kinds = params["layers_3"]["self_attn"] | params["layers_3"]["mlp"] | params["layers_0"]["linear_attn"]
        found = {name: len(leaf.parts) for name, leaf in kinds.items() if isinstance(leaf, SideBySide)}
        # CPUs hold small matrices in fp8 as those at 16 bits.
        assert found == (apart if not transpose else {k: n for k, n in apart.items() if k != "in_proj"})


@pytest.mark.parametrize("name", ["q35_int4_autoround", "q35_fp8_block"])
def test_devices_share_packed_rows_and_groups(name):
    """Inputs of a group are split where devices split them: 128 heads' inputs in groups of 128 become groups of 64."""
    folder = GOLDEN / name / "target"
    config, mesh = target_config(json.loads((folder / "config.json").read_text())), Mesh.of(2)
    whole, shared = load_params(folder, config, jnp.float32), load_params(folder, config, jnp.float32, mesh.place)
    dense_whole = dense_params(config, whole)
    for (path, one), two in zip(leaves(whole), [leaf for _, leaf in leaves(shared)], strict=True):
        assert two.shape == one.shape
        split = {"o_proj": 1, "out_proj": 1, "down_proj": 1}.get(path, 0)
        specs = two.shard(split, "tp")
        for part in ("values", "scales"):
            array = getattr(two, part)
            assert array.sharding.spec[split] == "tp" == getattr(specs, part)[split]
            assert array.sharding.shard_shape(array.shape)[split] * 2 == array.shape[split]
    assert_holds(config, shared, checkpoint_tensors(config, dense_whole))


def leaves(params):
    layers = [layer for name, layer in sorted(params.items()) if name.startswith("layers_")]
    rooms = [room for layer in layers for _, room in sorted(layer.items()) if isinstance(room, dict)]
    return [(name, leaf) for room in rooms for name, leaf in sorted(room.items()) if isinstance(leaf, Grouped)]


@pytest.mark.parametrize("index", [None, {"lm_head": 5, "q_proj": 6}])
@pytest.mark.parametrize(
    ("layout", "quantization"),
    [("gptq_v2", V2_8), ("gptq", GPTQ | {"group_size": 8}), ("compressed", COMPRESSED | GROUPS_OF_8)],
    ids=["gptq_v2", "gptq", "compressed"],
)
def test_a_head_and_matrices_of_8_bits_are_held_wide(tmp_path, caplog, layout, quantization, index):
    """No kernel multiplies 8-bit integers, nor a packed head; AutoRound's mixed checkpoints have 8 bits beside 4."""
    layouts = {"lm_head": layout, "q_proj": f"{layout} 8", "v_proj": layout, "down_proj": f"{layout} 8"}
    config, tensors = quantized_model(tmp_path, layouts, quantization, index=index)
    for transpose in (False, True):
        params = load_params(tmp_path, config, jnp.float32, transpose=transpose)
        assert_holds(config, params, tensors)
    attention = params["layers_3"]["self_attn"]["qkv_proj"]
    assert [isinstance(part, Grouped) for part in attention.parts] == [False, True]  # q and k, v
    assert all("7 packed matrices are held in float32, " in message for message in caplog.messages)


@pytest.mark.parametrize(("layout", "quantization"), [("gptq_v2", GPTQ_V2), ("compressed", COMPRESSED)])
def test_the_last_group_of_8_bits_may_be_smaller(tmp_path, layout, quantization):
    rng = np.random.default_rng(0)
    numbers, zeros = rng.integers(0, 256, (8, 40), np.uint8), rng.integers(1, 256, (8, 3), np.uint8)
    scales = rng.uniform(0.01, 0.1, (8, 3)).astype(np.float16)
    parts = packed(layout, numbers, scales, zeros, bits=8)
    save_raw(tmp_path / "model.safetensors", {f"a.{name}": array for name, array in parts.items()})
    tensors = {name.removeprefix("a."): info for name, info in list_tensors(tmp_path).items()}
    sizes = {"group_size": 16, "config_groups": {"g": {"weights": {"group_size": 16}}}}
    matrix = of_eight_bits(tensors, (8, 40), config_of(quantization | sizes))
    group = np.arange(40) // 16
    expected = (numbers - zeros[:, group].astype(np.float32)) * scales.astype(np.float32)[:, group]
    np.testing.assert_allclose(matrix.read(), expected, rtol=1e-6)
    assert matrix.problems == ()
    (problem,) = of_eight_bits(tensors, (8, 40), config_of(quantization | {"group_size": 8})).problems
    assert "has 3 scales for 40 inputs" in problem


def test_tensors_of_8_bits_that_do_not_fit_are_named(tmp_path):
    config, _ = quantized_model(tmp_path, {"q_proj": "gptq_v2 8"}, V2_8)
    file = tmp_path / "model.safetensors"
    tensors = {name: info.load() for name, info in list_tensors(tmp_path).items()}
    name = next(name for name in tensors if name.endswith("q_proj.qzeros"))
    save_raw(file, tensors | {name: tensors[name][:, :1]})
    with pytest.raises(CheckpointError, match=r"q_proj\.qzeros' should have shape \[\d+, \d+\] for 8 bits and has"):
        load_params(tmp_path, config, jnp.float32)


def test_training_shares_packed_weights_with_its_engine():
    folder = GOLDEN / "q35_int4_autoround" / "target"
    config = target_config(json.loads((folder / "config.json").read_text()))
    params = load_params(folder, config, jnp.float32, Mesh.of(2).place)
    for (name, leaf), (_, trained) in zip(leaves(engine_params(params, config, 2)), leaves(params), strict=True):
        assert leaf.values.sharding.is_equivalent_to(trained.values.sharding, leaf.values.ndim), name


def test_fp8_rounds_a_checkpoint_that_is_not_quantised():
    """The gates of the state are left alone."""
    llm = golden_llm("q35_dense", drafter=False, quantization="fp8")
    config, params = llm.engine.target.config, llm.engine.target.params
    mixer = params["layers_0"]["linear_attn"]
    assert [isinstance(mixer[name], Grouped) for name in ("in_proj", "out_proj", "in_proj_ba")] == [True, True, False]
    original = load_params(GOLDEN / "q35_dense" / "target", config, jnp.float32)
    found = dense_params(config, params)
    for name in ("in_proj", "in_proj_ba", "out_proj"):
        exact, rounded = np.asarray(original["layers_0"]["linear_attn"][name]), found["layers_0"]["linear_attn"][name]
        np.testing.assert_allclose(rounded, exact, rtol=2**-4, atol=np.abs(exact).max() / 448 / 2**9)
        assert np.array_equal(rounded, exact) == (name == "in_proj_ba")
