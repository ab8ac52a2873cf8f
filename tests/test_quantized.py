"""A drafter in fp8 says nearly what it says in full, is held as the original was, and changes no output."""

import gc
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, ConfigError, SamplingParams
from dflash_jax.engine import engine as engine_module
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.projections import project_whole
from dflash_jax.parallel.collectives import Devices
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.formats.fp8 import CONTEXT, QUANTIZED, Quantized, QuantizedRows, to_e4m3
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.formats.weight import logits_of, project
from dflash_jax.weights.loader import load_params
from pallas_kernels import _compat
from tests.kernels.cases import cuda_lowering
from tests.pairs import (
    GOLDEN,
    OF_TWO_LAYERS,
    TWO_LAYERS,
    empty_cache,
    golden_cases,
    golden_llm,
    greedy,
    prompt,
    reciter,
    tokens_of,
    write_model,
)
from tests.test_lossless import SETTINGS, prompts_of
from tests.test_reciter import GREEDY, PROMPTS

E4M3 = ml_dtypes.float8_e4m3fn
HALF_ULP, HALF_SUBNORMAL = 2.0**-4, 2.0**-10  # of e4m3: relative, and beside zero


def numbers(shape, seed=0):
    """Rows of very different size, the first of zeros."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 6, (shape[0], *[1] * (len(shape) - 1)))
    sizes[0] = 0
    return (sizes * rng.standard_normal(shape)).astype(np.float32)


def quantized(weight, rows):
    return Quantized(*to_e4m3(jnp.asarray(weight), rows))


def dequantized(weight: Quantized):
    values, scales = np.asarray(weight.values.astype(jnp.float32)), np.asarray(weight.scales)
    return values * scales.reshape(*scales.shape, *[1] * (values.ndim - scales.ndim))


# --- matrices


@pytest.mark.parametrize(("shape", "rows"), [((5, 64), 1), ((3, 2, 4, 32), 3), ((6, 4, 8), 1)])
def test_rows_are_quantised_by_their_largest_number(shape, rows):
    weight = numbers(shape)
    found = quantized(weight, rows)
    assert (found.values.dtype, found.scales.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert (found.shape, found.scales.shape) == (shape, shape[:rows])
    inner = tuple(range(rows, weight.ndim))
    scales = np.abs(weight).max(axis=inner, keepdims=True) / np.float32(448)
    np.testing.assert_allclose(found.scales[1:], scales.reshape(shape[:rows])[1:], rtol=1e-6)
    np.testing.assert_array_equal(found.values[1:], (weight[1:] / scales[1:]).astype(E4M3))
    assert (dequantized(found)[0] == 0).all()
    error = np.abs(dequantized(found) - weight)
    assert (error <= np.maximum(HALF_ULP * np.abs(weight), HALF_SUBNORMAL * scales) * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("outer", "inner"), [((3, 2, 4), (64,)), ((6,), (8, 8))])
def test_products_are_those_of_the_numbers_that_are_left(outer, inner, dtype):
    weight, x = numbers((*outer, *inner), 1), numbers((2 * 5, *inner), 2).reshape(2, 5, *inner)
    x, bias = jnp.asarray(x, dtype), jnp.asarray(numbers(outer, 3), dtype)
    held, rows = quantized(weight, len(outer)), quantized(x, 2)
    found = project(x, held, bias)
    assert (found.dtype, found.shape) == (dtype, (2, 5, *outer))

    def product(x, weight):
        return (x.reshape(10, 64).astype(np.float64) @ weight.reshape(-1, 64).T).reshape(2, 5, *outer)

    exact, wide = np.asarray(bias, np.float64), np.asarray(x, np.float32)
    spread = product(np.abs(wide), np.abs(weight))
    rounding = float(jnp.finfo(dtype).eps) * (spread + np.abs(exact))
    assert (
        np.abs(np.asarray(found, np.float64) - exact - product(dequantized(rows), dequantized(held))) <= rounding
    ).all()
    # numbers far below the largest of their row lose more than half an ulp, which the norms of the rows bound
    norms = product(np.ones_like(wide) * np.abs(wide).max(axis=-1, keepdims=True), np.abs(weight))
    off = np.abs(np.asarray(found, np.float64) - exact - product(wide, weight))
    assert (off <= 2.1 * HALF_ULP * spread + 1e-3 * norms + rounding).all()
    assert off.max() > 0


def test_products_of_large_numbers_are_finite_in_float16():
    """Before they are scaled those of 64 ones are 64 * 448 * 448."""
    found = project(jnp.ones((1, 2, 64), jnp.float16), quantized(np.ones((3, 64), np.float32), 1))
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, np.full((1, 2, 3), 64))


@pytest.mark.parametrize("is_whole", [False, True])
def test_only_weights_of_one_device_go_to_kernels(monkeypatch, is_whole):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))

    def call(x, values, scales):
        return Quantized(values, scales, is_whole).product(x, jnp.bfloat16)

    given = [((64, 4096), jnp.bfloat16), ((4096, 4096), jnp.float8_e4m3fn), ((4096,), jnp.float32)]
    text = cuda_lowering(call, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given))
    assert ("mosaic_gpu" in text, "xla.gpu.triton" in text) == (is_whole, is_whole)


@pytest.mark.parametrize("mesh", [None, 1, 2])
def test_features_are_projected_in_4_bits_by_kernels(monkeypatch, mesh):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    devices = Devices(None if mesh is None else Mesh.of(mesh))

    def call(x, values, scales, zeros):
        return project_whole(x, Grouped(values, scales, zeros), devices)

    shapes = [((1, 16, 1024), jnp.bfloat16), ((512, 256), jnp.uint16), ((512, 8), jnp.float16), ((512, 8), jnp.uint8)]
    text = cuda_lowering(call, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    assert ("mosaic_gpu" in text) == (mesh is not None)


def test_logits_are_float32():
    head, hidden = numbers((7, 32), 4), jnp.asarray(numbers((3, 32), 5)[None], jnp.bfloat16)
    found = logits_of(hidden, quantized(head, 1))
    assert (found.dtype, found.shape) == (jnp.float32, (1, 3, 7))
    np.testing.assert_array_equal(found, project(hidden.astype(jnp.float32), quantized(head, 1)))


# --- what an engine holds


def leaves_by_name(params):
    paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def assert_same(params, expected):
    for found, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, leaf)


def configs_of(engine):
    return engine.spec.target, engine.spec.draft


def small_pair(folder, target=(), draft=()):
    return write_model(folder / "target", TWO_LAYERS | dict(target), 0), write_model(
        folder / "draft", OF_TWO_LAYERS | dict(draft), 1
    )


OWN_HEAD = {"draft_vocab_size": 20}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("draft", [{}, OWN_HEAD, {"attention_bias": True}], ids=["plain", "own head", "biases"])
def test_projections_and_the_head_are_quantised_and_nothing_else(tmp_path, tied, draft):
    folders = small_pair(tmp_path, {"tie_word_embeddings": tied}, draft)
    small = LLM(*folders, max_num_seqs=1, draft_quantization="fp8").engine
    target, full = (load_params(*pair, jnp.float32) for pair in zip(folders, configs_of(small), strict=True))
    before, after = leaves_by_name(full), leaves_by_name(small.runner.params[1])
    head = after.pop("['lm_head']")
    original = before.pop("['lm_head']", target["embed_tokens" if tied else "lm_head"])
    np.testing.assert_array_equal(head.values, quantized(original, 1).values)
    for ending in ("", "_bias"):  # joined; those of all layers without queries, for the context, stand beside them
        names = [name for name in before if f"['q_proj{ending}']" in name]
        keys_values = [before.pop(name.replace("q_proj", "kv_proj")) for name in names]
        for name, of_context in zip(names, keys_values, strict=True):
            before[name.replace("q_proj", "qkv_proj")] = np.concatenate([before.pop(name), of_context], axis=1)
        if names:
            before[f"['{CONTEXT}{ending}']"] = np.concatenate(keys_values, axis=1)
    assert before.keys() == after.keys()
    for name, leaf in after.items():
        if name.endswith(tuple(f"['{projection}']" for projection in (*QUANTIZED, CONTEXT))):
            assert leaf.shape == before[name].shape
            error = np.abs(dequantized(leaf) - np.asarray(before[name]))
            assert 0 < error.max() <= HALF_ULP * np.abs(before[name]).max()
        else:
            np.testing.assert_array_equal(leaf, before[name])
    assert_same(small.runner.params[0], LLM(*folders, max_num_seqs=1).engine.runner.params[0])


def test_originals_are_gone_when_memory_is_planned(tmp_path, monkeypatch):
    folders, live = small_pair(tmp_path), []

    def bytes_live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def plan(*args):
        live.append(bytes_live())
        return plan_layout(*args)

    plan_layout, before = engine_module.plan_layout, bytes_live()
    monkeypatch.setattr(engine_module, "plan_layout", plan)
    engine = LLM(*folders, max_num_seqs=1, draft_quantization="fp8").engine
    assert live[0] - before == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.params))


def test_other_weights_are_quantised_too(tmp_path):
    folders, other = small_pair(tmp_path), write_model(tmp_path / "other", OF_TWO_LAYERS, 2)
    options = {"max_num_seqs": 1, "draft_quantization": "fp8"}
    llm, expected = LLM(*folders, **options), LLM(folders[0], other, **options)
    llm.replace_draft(other)
    assert_same(llm.engine.runner.params[1], expected.engine.runner.params[1])


def test_another_drafter_may_bring_scales_of_its_cache(tmp_path):
    llm = golden_llm("qwen3_full", draft_kv_cache_dtype="fp8")
    prompts = [prompt(*golden_cases("qwen3_full")[0]["input_ids"])]
    expected = tokens_of(llm.generate(prompts, greedy(12)))
    other = shutil.copytree(GOLDEN / "qwen3_full" / "draft", tmp_path / "draft")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("k_proj.weight")]:
        tensors |= {name.replace("k_proj.weight", f"{x}_proj.{x}_scale"): np.float32([2]) for x in "kv"}
    save_file(tensors, file)
    llm.replace_draft(other)
    (output,) = llm.generate(prompts, greedy(12))
    assert (output.outputs[0].error, tokens_of([output])) == (None, expected)


def test_only_a_drafter_of_the_same_configuration_takes_anothers_place(tmp_path):
    folders = small_pair(tmp_path)
    wider = write_model(tmp_path / "wider", OF_TWO_LAYERS | {"intermediate_size": 96}, 2)
    llm, bare = LLM(*folders, max_num_seqs=1), LLM(folders[0], max_num_seqs=1)
    before = llm.engine.runner.params[1]
    for engine, draft in ((llm, wider), (bare, folders[1])):
        with pytest.raises(ConfigError, match=f"{draft}: its configuration is not that of the drafter in use"):
            engine.replace_draft(draft)
    assert llm.engine.runner.params[1] is before
    llm.engine.add(llm.frontend.request(prompt(1, 2), SamplingParams(max_tokens=4)).sequences)
    with pytest.raises(RuntimeError, match="at work"):
        llm.replace_draft(folders[1])


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("heads", [4, 6])  # which four devices can share, and cannot
def test_four_devices_hold_what_one_holds(tmp_path, heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 64}
    folders = small_pair(tmp_path, sizes, sizes)
    options = {"max_num_seqs": 1, "num_speculative_tokens": 5, "draft_quantization": "fp8"}
    one, four = (LLM(*folders, tensor_parallel_size=devices, **options) for devices in (1, 4))
    assert_same(four.engine.runner.params[1], one.engine.runner.params[1])
    draft = four.engine.runner.params[1]
    layer = draft["layers_0"]
    for weight, divided, by_rows in (
        (draft["lm_head"], True, True),
        (draft["fc"], False, False),
        (draft[CONTEXT], heads == 4, heads == 4),
        (layer["self_attn"]["qkv_proj"], heads == 4, heads == 4),
        (layer["self_attn"]["o_proj"], heads == 4, False),
        (layer["mlp"]["gate_up_proj"], True, True),
        (layer["mlp"]["down_proj"], True, False),
    ):
        shards = [array.addressable_shards[0].data.size * 4 == array.size for array in (weight.values, weight.scales)]
        assert shards == [divided, by_rows]
    if heads == 4:
        outputs = [llm.generate(prompts_of(2, 64), greedy(20)) for llm in (one, four)]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])


@pytest.mark.parametrize("draft", [{}, {"attention_bias": True}], ids=["plain", "biases"])
def test_keys_and_values_of_all_layers_at_once_are_those_of_each(tmp_path, draft):
    engine = LLM(*small_pair(tmp_path, draft=draft), max_num_seqs=1, draft_quantization="fp8").engine
    config, params = engine.spec.draft, engine.runner.params[1]
    apart = dict(params)
    for ending in ("", "_bias") if draft else ("",):
        joined = apart.pop(f"{CONTEXT}{ending}")
        for i in range(config.num_hidden_layers):
            own = jax.tree.map(lambda x, i=i: x[:, 2 * i : 2 * i + 2], joined)
            name, layer = f"layers_{i}", apart[f"layers_{i}"]
            apart[name] = layer | {"self_attn": layer["self_attn"] | {f"kv_proj{ending}": own}}
    features = jnp.asarray(numbers((7, len(engine.spec.taps) * config.hidden_size))[None, 1:])
    positions = jnp.arange(6)[None]

    def context(params):
        drafter = DraftModel(config, Devices(engine.spec.mesh)).bind({"params": params})
        return drafter.write_context(features, positions, empty_cache(config, 6))

    found = context(params)
    assert_same(found, context(apart))
    assert all(np.abs(array).max() > 0 for array in found.keys + found.values)


def test_rows_in_fp8_want_a_weight_in_fp8():
    rows = QuantizedRows(*to_e4m3(jnp.ones((1, 2, 64)), 2), jnp.float32)
    with pytest.raises(TypeError, match="multiplied by a weight in fp8; this is a plain array"):
        project(rows, jnp.ones((3, 64)))


# --- outputs and acceptance


def mean_length(lengths):
    return np.mean(np.concatenate(list(lengths)))


@pytest.mark.parametrize("name", [pytest.param("qwen3_full", marks=pytest.mark.long), "qwen3_swa_tied"])
def test_golden_outputs_stay_and_so_do_their_drafts(name):
    cases = golden_cases(name)
    prompts = [prompt(*case["input_ids"]) for case in cases]
    llm = golden_llm(name, draft_quantization="fp8")
    outputs = llm.generate(prompts, greedy(80))
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    in_full = mean_length(case["acceptance_lengths"] for case in cases)
    assert mean_length(output.metrics.acceptance_lengths for output in outputs) >= 0.97 * in_full
    if name == "qwen3_swa_tied":
        seeded = [prompts[i % len(prompts)] for i in range(len(SETTINGS))]
        plain = golden_llm(name, drafter=False).generate(seeded, SETTINGS)
        assert tokens_of(llm.generate(seeded, SETTINGS)) == tokens_of(plain)


@pytest.mark.long
def test_outputs_of_a_drafter_with_a_vocabulary_of_its_own(tmp_path):
    target, draft = small_pair(tmp_path, draft=OWN_HEAD)
    prompts = prompts_of(3, TWO_LAYERS["vocab_size"])
    small = LLM(target, draft, max_num_seqs=2, num_speculative_tokens=5, draft_quantization="fp8")
    expected = LLM(target, max_num_seqs=2).generate(prompts, greedy(30))
    assert tokens_of(small.generate(prompts, greedy(30))) == tokens_of(expected)


@pytest.mark.parametrize(("form", "share"), [pytest.param("fp8", 0.97, marks=pytest.mark.long), ("int4", 0.9)])
def test_recites_as_fast(form, share):
    full, narrow = (reciter(max_num_seqs=2, draft_quantization=q).generate(PROMPTS, GREEDY) for q in (None, form))
    before = mean_length(output.metrics.acceptance_lengths for output in full)
    assert tokens_of(narrow) == tokens_of(full)
    assert mean_length(output.metrics.acceptance_lengths for output in narrow) >= share * before > 8 * share
