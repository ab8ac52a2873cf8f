"""Quantised matrices of checkpoints: what each layout holds, what is refused, and fused arrays of several formats."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.spec.quantization import check_method
from dflash_jax.train.evaluation import engine_params
from dflash_jax.weights import packing
from dflash_jax.weights.export import dense_params, save_tensors
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.formats.side_by_side import SideBySide
from dflash_jax.weights.layouts import compressed, packed_by_groups
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.quantized import grouped
from dflash_jax.weights.safetensors import list_tensors
from dflash_jax.weights.tables import PROJECTIONS, Parameter, checkpoint_tensors
from pallas_kernels.quantized_product.reference import widened
from tests.conftest import DATA
from tests.pairs import GOLDEN, HYBRID, random_tensors

AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "sym": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
LAYOUTS = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ_V2,
    "auto_round": AUTO_ROUND | {"packing_format": "auto_round"},
    "awq": AWQ,
    "compressed": COMPRESSED,
}


def config_of(quantization):
    return target_config(HYBRID | {"quantization_config": quantization}).quantization


# --- a packer of our own, a number at a time: independent of `packing`, and of the packages behind the vectors


def words(numbers):
    """int32 [R, C / 8] of numbers [R, C] from 0 to 15, the first in the lowest bits; missing ones are 0."""
    rows, columns = numbers.shape
    found = np.zeros((rows, -(-columns // 8)), np.uint32)
    for column in range(columns):
        found[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * (column % 8))
    return found.view(np.int32)


def awq_words(numbers):
    order = np.argsort([0, 4, 1, 5, 2, 6, 3, 7])
    return words(numbers.reshape(len(numbers), -1, 8)[..., order].reshape(numbers.shape))


def packed(layout, numbers, scales, zeros, index=None):
    """The tensors of a matrix: numbers [O, I] from 0 to 15, scales and zeros [O, G], and the group of each input."""
    if layout == "compressed":
        tensors = {
            "weight_packed": words(numbers),
            "weight_scale": scales,
            "weight_zero_point": np.ascontiguousarray(words(zeros.T).T),
            "weight_shape": np.int64(numbers.shape),
        }
        return tensors | ({} if index is None else {"weight_g_idx": index})
    if layout == "awq":
        return {"qweight": awq_words(numbers.T), "qzeros": awq_words(zeros.T), "scales": scales.T.copy()}
    less = 1 if layout == "gptq" else 0
    tensors = {"qweight": words(numbers).T.copy(), "qzeros": words((zeros - less).T), "scales": scales.T.copy()}
    return tensors | ({} if index is None else {"g_idx": index})


def stored(tensors, shape, config, folder):
    save_tensors(folder / "model.safetensors", {f"m.{name}": array for name, array in tensors.items()})
    infos = {info.name.removeprefix("m."): info for info in list_tensors(folder).values()}
    return (compressed if "weight_packed" in infos else packed_by_groups)(infos, shape, config)


def dense(matrix):
    """The matrix in float64, of the numbers that kernels read."""
    name = "m.weight"
    weight = grouped(
        Parameter(("down_proj",), ("D", "F"), {name: (len(matrix.values), matrix.inputs)}),
        {name: matrix},
        lambda axes, shape: None,
    )
    found = np.asarray(weight.product(jnp.eye(matrix.inputs)).T, np.float64)
    if weight.order is None:
        np.testing.assert_array_equal(found, widened(weight.values, weight.scales, weight.zeros))
    return found


# --- layouts


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("gptq_symmetric", AUTO_ROUND | {"sym": True, "group_size": 32}),
        ("gptq_symmetric", GPTQ | {"sym": True, "group_size": 32, "desc_act": False}),
        ("gptq_zeros", AUTO_ROUND | {"group_size": 32}),
        ("gptq_whole", GPTQ | {"group_size": -1, "sym": False}),
        ("auto_round", AUTO_ROUND | {"packing_format": "auto_round", "group_size": 16}),
        ("auto_round", GPTQ_V2 | {"group_size": 16}),
        ("awq", AWQ | {"group_size": 32, "zero_point": True}),
        ("awq", AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "group_size": 32}),
        ("compressed_symmetric", COMPRESSED),
        (
            "compressed_zeros",
            COMPRESSED | {"config_groups": {"g": {"weights": {"group_size": 16, "symmetric": False}}}},
        ),
    ],
)
def test_what_other_packages_packed(case, config):
    tensors = {name: info for name, info in list_tensors(DATA / "packed").items() if name.startswith(f"{case}.")}
    parts = {name.removeprefix(f"{case}."): info for name, info in tensors.items()}
    expected = parts.pop("expected").load()
    layout = compressed if "weight_packed" in parts else packed_by_groups
    matrix = layout(parts, expected.shape, config_of(config))
    assert matrix.problems == ()
    np.testing.assert_array_equal(dense(matrix.load()), expected)
    assert np.abs(expected).max() > 0


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_was_packed_is_read(tmp_path_factory, data):
    """Every layout, groups of any size, any zero points and scales, and inputs in the order of their activations."""
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    group = data.draw(st.sampled_from([2, 4, 8, 32]))
    outputs, inputs = 8 * data.draw(st.integers(1, 3)), 8 * data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    groups = -(-inputs // group)
    numbers = rng.integers(0, 16, (outputs, inputs), np.uint8)
    zeros = rng.integers(1, 16, (outputs, groups), np.uint8)
    scales = rng.uniform(-2, 2, (outputs, groups)).astype(np.float16)
    has_order = layout != "awq" and inputs % group == 0 and data.draw(st.booleans())
    index = rng.permutation(np.arange(inputs) // group).astype(np.int32) if has_order else None
    config = LAYOUTS[layout] | {"group_size": group}
    if layout == "compressed":
        config = COMPRESSED | {"config_groups": {"group_0": {"weights": {"group_size": group}}}}
    tensors = packed(layout, numbers, scales, zeros, index)
    matrix = stored(tensors, (outputs, inputs), config_of(config), tmp_path_factory.mktemp("packed"))
    assert matrix.problems == ()
    of = np.arange(inputs) // group if index is None else index
    expected = (numbers.astype(np.float64) - zeros[:, of]) * scales.astype(np.float64)[:, of]
    found = matrix.load()
    columns = np.arange(inputs) if found.order is None else found.order
    wide = packing.to_numbers(found.values).astype(np.float64)
    each = np.arange(inputs) // found.group
    np.testing.assert_array_equal(
        (wide - found.zeros[:, each]) * found.scales.astype(np.float64)[:, each], expected[:, columns]
    )


@pytest.mark.parametrize("span", [2, 4, 32])
def test_kernels_read_halves_of_spans(span):
    numbers = np.random.default_rng(0).integers(0, 16, (3, 96), np.uint8)
    pairs, half = packing.to_pairs(numbers), span // 2
    np.testing.assert_array_equal(packing.to_numbers(pairs), numbers)
    spans = packing.to_spans(pairs, span)
    for row, i, j in np.ndindex(3, 96 // span, half):
        byte = spans[row, half * i + j]
        assert (byte & 15, byte >> 4) == (numbers[row, span * i + j], numbers[row, span * i + half + j])


# --- whole models


def quantized_model(folder, layouts, quantization, *, group=8, index=None):
    """A hybrid whose matrices of these names are packed; returns its configuration and its dense tensors."""
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
            numbers = rng.integers(0, 16, tensor.shape, np.uint8)
            zeros = rng.integers(1, 16, (outputs, inputs // group), np.uint8)
            scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
            of = np.arange(inputs) // group
            if index is not None and module in index:
                of = np.random.default_rng(index[module]).permutation(of).astype(np.int32)
            order = None if index is None or module not in index else of
            for part, array in packed(layout, numbers, scales, zeros, order).items():
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


# --- contradictions


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (AUTO_ROUND | {"group_size": 16}, {}, ["m.qweight' has 8 scales for 64 inputs", "group_size [16]"]),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, {}, ["m.qweight' should have shape [64, 3]", "AWQ"]),
        (AUTO_ROUND, {"scales": None}, ["'m.scales' of shape", "is missing"]),
        (AUTO_ROUND, {"scales": np.ones((8, 24), np.int32)}, ["m.scales' should hold floats and holds int32"]),
        (AUTO_ROUND, {"qzeros": np.ones((8, 3), np.float32)}, ["m.qzeros' should hold int32 and holds float32"]),
        (
            AUTO_ROUND,
            {"qweight": np.ones((16, 24), np.int32)},
            ["should have shape [8, 24] for 4 bits", "has [16, 24]"],
        ),
        ({"quant_method": "fp8"}, {}, ["m.qweight' is packed, but config.json has quant_method 'fp8'"]),
    ],
)
def test_tensors_that_contradict_the_configuration(tmp_path, config, change, words):
    numbers, zeros = np.zeros((24, 64), np.uint8), np.full((24, 8), 8, np.uint8)
    tensors = packed("gptq", numbers, np.ones((24, 8), np.float16), zeros) | change
    kept = {name: array for name, array in tensors.items() if array is not None}
    [*problems] = stored(kept, (24, 64), config_of(config), tmp_path).problems
    assert all(word in "; ".join(problems) for word in words), problems


@pytest.mark.parametrize(
    ("layout", "config"),
    [("gptq_v2", AUTO_ROUND), ("gptq", GPTQ_V2), ("gptq", AUTO_ROUND | {"packing_format": "auto_round"})],
)
def test_a_wrong_version_of_zero_points_is_seen_where_they_are_symmetric(tmp_path, layout, config):
    """hybrid.md 8.14: 7 or 9 instead of 8 still looks like a model."""
    numbers, zeros = np.zeros((24, 64), np.uint8), np.full((24, 8), 8, np.uint8)
    tensors = packed(layout, numbers, np.ones((24, 8), np.float16), zeros)
    matrix = stored(tensors, (24, 64), config_of(config | {"sym": True, "group_size": 8}), tmp_path)
    with pytest.raises(CheckpointError, match=r"m\.qzeros' holds the zero point [79], and config\.json says symmetric"):
        matrix.load()


def test_groups_of_unequal_size_are_refused(tmp_path):
    numbers, zeros = np.zeros((8, 16), np.uint8), np.full((8, 2), 8, np.uint8)
    index = np.int32([0] * 7 + [1] * 9)
    tensors = packed("gptq", numbers, np.ones((8, 2), np.float16), zeros, index)
    with pytest.raises(CheckpointError, match=r"m\.g_idx' gives groups of other sizes than 8"):
        stored(tensors, (8, 16), config_of(GPTQ | {"group_size": 8}), tmp_path).load()


def test_a_head_stays_at_16_bits(tmp_path):
    config, _ = quantized_model(tmp_path, {"q_proj": "gptq_v2", "lm_head": "gptq_v2"}, V2_8)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.qweight' is packed, and '.*lm_head\.weight' must be at 16 bits"
    ):
        load_params(tmp_path, config, jnp.float32)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"group_size": "128"}, "group_size='128'"),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"group_size": -3}}}, "group_size=-3"),
    ],
)
def test_configurations_that_are_refused(config, word):
    with pytest.raises(ConfigError, match="quantization_config") as error:
        config_of(config)
    assert word in str(error.value)


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (AUTO_ROUND, 4),
        (AWQ, 4),
        (COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "unheard of"}, None),
    ],
)
def test_bits(config, bits):
    assert config_of(config).bits == bits


@pytest.mark.parametrize("asked", ["auto-round", "auto_round", "inc", None])
def test_the_option_may_say_what_the_checkpoint_is(asked):
    check_method(asked, config_of(AUTO_ROUND), "m")


def test_the_option_may_not_contradict_the_checkpoint():
    with pytest.raises(ConfigError, match="quantization='awq', but m has quant_method 'auto-round'"):
        check_method("awq", config_of(AUTO_ROUND), "m")
    with pytest.raises(ConfigError, match="quantization='fp8', but m has no quantization_config"):
        check_method("fp8", None, "m")
    with pytest.raises(ConfigError, match=r"quantization='gptq_marlin', but .*int4_autoround/target has quant_method"):
        LLM(GOLDEN / "q35_int4_autoround" / "target", quantization="gptq_marlin")


def test_training_shares_packed_weights_with_its_engine():
    folder = GOLDEN / "q35_int4_autoround" / "target"
    config = target_config(json.loads((folder / "config.json").read_text()))
    params = load_params(folder, config, jnp.float32, Mesh.of(2).place)
    for (name, leaf), (_, trained) in zip(leaves(engine_params(params, config, 2)), leaves(params), strict=True):
        assert leaf.values.sharding.is_equivalent_to(trained.values.sharding, leaf.values.ndim), name
