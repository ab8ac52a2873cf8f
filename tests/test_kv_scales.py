"""Scales of fp8 keys and values: from every name in a checkpoint to attention over the pages that need them."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError
from dflash_jax.engine.device.memory import plan_layout
from dflash_jax.engine.device.pools import make_caches
from dflash_jax.engine.device.slots import Slots, Tables
from dflash_jax.models.target import TargetModel
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import draft_config, target_config
from dflash_jax.weights.loader import KVScales, load_kv_scales, load_params
from tests.conftest import RUNS_LONG
from tests.pairs import DRAFT, TARGET, greedy, prompt, random_tensors, tokens_of, write_model

LLAMA = TARGET | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG, DRAFT_CONFIG = target_config(TARGET), draft_config(DRAFT)  # both with K=2
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 21), dtype=np.int32)


def write(folder, config, extra):
    """A random model with further tensors."""
    save_file(random_tensors(config, 0) | extra, folder / "model.safetensors")
    return folder


def scale(*values, shape=None):
    return np.float32(values).reshape(shape if shape is not None else (len(values),))


# --- from the checkpoint


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("config", [CONFIG, DRAFT_CONFIG], ids=["target", "drafter"])
def test_names(tmp_path, config, k_name, v_name):
    layer = ("model." if config is CONFIG else "") + "layers.1.self_attn."
    write(tmp_path, config, {layer + k_name: scale(3), layer + v_name: scale(5, shape=())})
    scales = load_kv_scales(tmp_path, config)
    expected = np.ones((2, config.num_hidden_layers, 2), np.float32)
    expected[:, 1] = [[3, 3], [5, 5]]
    np.testing.assert_array_equal([scales.k, scales.v], expected)
    load_params(tmp_path, config, jnp.float32)  # which takes no scale for surplus


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2)])
def test_one_scale_a_head(tmp_path, shape):
    stored = scale(3, 7, shape=shape).astype(ml_dtypes.bfloat16).astype(np.float16)
    write(tmp_path, CONFIG, {"model.layers.0.self_attn.k_scale": stored})
    scales = load_kv_scales(tmp_path, CONFIG)
    assert scales.k.dtype == scales.v.dtype == np.float32
    np.testing.assert_array_equal(scales.k[:2], [[3, 7], [1, 1]])
    np.testing.assert_array_equal(scales.v, 1)
    np.testing.assert_array_equal(load_kv_scales(tmp_path, CONFIG.over(4)).k[:2], [[3, 3, 7, 7], [1, 1, 1, 1]])


def test_one_scale_for_keys_and_values(tmp_path):
    write(tmp_path, CONFIG, {"model.layers.4.self_attn.kv_scale": scale(0.5)})
    scales = load_kv_scales(tmp_path, CONFIG)
    np.testing.assert_array_equal([scales.k[4], scales.v[4]], 0.5)


def test_no_scales(tmp_path):
    queries = {"model.layers.0.self_attn.q_scale": scale(2), "model.layers.0.self_attn.attn.prob_scale": scale(2)}
    write(tmp_path, CONFIG, queries | {"model.layers.0.self_attn.q_proj.output_scale": scale(2)})
    assert load_kv_scales(tmp_path, CONFIG) is None
    load_params(tmp_path, CONFIG, jnp.float32)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (scale(0), ["positive", "0.0"]),
        (scale(1, -2), ["positive", "-2.0"]),
        (scale(np.nan), ["finite", "nan"]),
        (scale(np.inf), ["finite", "inf"]),
        (scale(1, 2, 3), ["2 kv heads", "[3]"]),
        (scale(1, 2, 3, 4, shape=(2, 2)), ["2 kv heads", "[2, 2]"]),
        (np.zeros(0, np.float32), ["2 kv heads", "[0]"]),
        (np.ones(1, np.int32), ["float", "int32"]),
    ],
)
def test_bad_scales(tmp_path, stored, words):
    name = "model.layers.3.self_attn.v_scale"
    write(tmp_path, CONFIG, {name: stored})
    with pytest.raises(CheckpointError) as error:
        load_kv_scales(tmp_path, CONFIG)
    for word in ["model.safetensors", name, *words]:
        assert word in str(error.value)


def test_scales_that_nothing_asks_for(tmp_path):
    twice = {f"model.layers.0.self_attn.{name}": scale(2) for name in ("k_scale", "kv_scale")}
    write(tmp_path, CONFIG, twice)
    with pytest.raises(CheckpointError, match=r"'.*k_scale' and '.*kv_scale' are the same scale"):
        load_kv_scales(tmp_path, CONFIG)
    write(tmp_path, CONFIG, {"model.layers.5.self_attn.k_scale": scale(2)})  # there are five layers
    with pytest.raises(CheckpointError, match=r"layers\.5\.self_attn\.k_scale.*surplus"):
        load_params(tmp_path, CONFIG, jnp.float32)


# --- to attention


def caches_of(config, scales, *, devices=1, draft=None, **options):
    args = EngineArgs(
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=1 << 24,
        max_num_seqs=2,
        tensor_parallel_size=devices,
        page_size=8,
        **options,
    )
    engine = EngineConfig.of(args, config, draft)
    return make_caches(config, draft, plan_layout(config, draft, engine), engine, Mesh.of(devices), scales)


@partial(jax.jit, static_argnames="config", donate_argnames="caches")
def step(params, caches, *, config):
    """The last hidden states of `TOKENS`, in two parts over one cache; and the pools after them."""
    table = np.arange(8).reshape(2, 4)
    tables = Tables.pack(np.arange(2), [np.zeros(2, int)], [table] * 2)
    caches = caches.for_round(Tables(jnp.asarray(tables.packed)), Slots(jnp.zeros((2, 3), jnp.int32)))
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    for part in (slice(0, 16), slice(16, None)):
        hidden, _, cache = TargetModel(config).apply(
            {"params": params}, jnp.asarray(TOKENS[:, part]), positions[:, part], caches.target
        )
        caches = caches.with_target(cache)
    return hidden, caches.pools()


def write_unbalanced(folder, config, by):
    """A random Llama whose keys and values of kv head j are `by[j]` times as large, and that answers as before."""
    tensors = random_tensors(config, 0)
    stored = np.repeat(np.float32(by), config.head_dim)[:, None]
    asking = np.repeat(np.float32(by), config.num_attention_heads // len(by) * config.head_dim)[:, None]
    for i in range(config.num_hidden_layers):
        attention = f"model.layers.{i}.self_attn."
        tensors[attention + "k_proj.weight"] *= stored
        tensors[attention + "v_proj.weight"] *= stored
        tensors[attention + "q_proj.weight"] /= asking
        tensors[attention + "o_proj.weight"] /= asking.T
    names = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(config.num_hidden_layers) for x in "kv"]
    scales = scale(by[0]) if len(set(by)) == 1 else scale(*by)
    folder.mkdir(exist_ok=True)
    save_file(tensors | dict.fromkeys(names, scales), folder / "model.safetensors")


# The second format is one more shape of what is tested anyway.
FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2") if RUNS_LONG else ("fp8_e4m3",)


@pytest.mark.parametrize("by", [(1024,) * 4, (1024, 1 / 1024, 1, 32)], ids=["tensor", "head"])
@pytest.mark.parametrize(
    ("kv_heads", "devices"), [(4, 1), *(pytest.param(heads, 4, marks=pytest.mark.long) for heads in (4, 2))]
)
def test_large_and_small_keys_survive_in_fp8(tmp_path, by, kv_heads, devices):
    config = target_config(LLAMA | {"num_key_value_heads": kv_heads})
    write_unbalanced(tmp_path, config, by[:kv_heads])
    params = load_params(tmp_path, config, jnp.float32, Mesh.of(devices).place)
    scales = load_kv_scales(tmp_path, config)
    folder = tmp_path / "balanced"  # the first file may be mapped still
    write_unbalanced(folder, config, (1,) * kv_heads)
    balanced = load_params(folder, config, jnp.float32, Mesh.of(devices).place)

    def hidden(params, scales, dtype):
        caches = caches_of(config, (scales, None), devices=devices, kv_cache_dtype=dtype)
        return np.asarray(step(params, caches, config=config)[0])

    exact = hidden(params, None, "float32")
    np.testing.assert_allclose(hidden(balanced, None, "float32"), exact, atol=1e-4)
    for dtype in FP8_FORMATS:  # powers of two scale without rounding
        np.testing.assert_allclose(hidden(params, scales, dtype), hidden(balanced, None, dtype), atol=1e-4)

    def error(scales):
        return np.linalg.norm(hidden(params, scales, "fp8_e4m3") - exact) / np.linalg.norm(exact)

    assert error(scales) < 0.25 < 1 < error(None)


@pytest.mark.parametrize(("kv_heads", "spec"), [(4, P(None, "tp")), (2, P(None, None))])
def test_scales_are_split_as_the_pools_and_stay_so(tmp_path, kv_heads, spec):
    config = target_config(LLAMA | {"num_key_value_heads": kv_heads})
    write_unbalanced(tmp_path, config, (1024, 1 / 1024, 1, 32)[:kv_heads])
    scales = load_kv_scales(tmp_path, config)
    mesh = Mesh.of(4)
    caches = caches_of(config, (scales, None), devices=4, kv_cache_dtype="fp8")
    wanted = NamedSharding(mesh.devices, spec)
    assert caches.target.k_scale.sharding.is_equivalent_to(wanted, 2)
    _, after = step(load_params(tmp_path, config, jnp.float32, mesh.place), caches, config=config)
    for found, given in ((after.target.k_scale, scales.k), (after.target.v_scale, scales.v)):
        assert found.sharding.is_equivalent_to(wanted, 2)
        np.testing.assert_array_equal(found, given)


def test_each_model_has_its_own(tmp_path):
    ones = np.ones((5, 2), np.float32)
    scales = (KVScales(k=ones, v=2 * ones), KVScales(k=3 * ones[:2], v=4 * ones[:2]))
    of = partial(caches_of, CONFIG, scales, draft=DRAFT_CONFIG)
    both = of(kv_cache_dtype="fp8")
    np.testing.assert_array_equal(both.target.v_scale, scales[0].v)
    np.testing.assert_array_equal(both.draft.k_scale, scales[1].k)
    one = of(kv_cache_dtype="bfloat16", draft_kv_cache_dtype="fp8_e5m2")
    assert (one.target.keys[0].dtype, one.draft.keys[0].dtype) == (jnp.bfloat16, jnp.float8_e5m2)
    assert one.target.k_scale is None
    np.testing.assert_array_equal(one.draft.v_scale, scales[1].v)


@pytest.mark.parametrize("devices", [4, pytest.param(1, marks=pytest.mark.long)])
def test_from_checkpoint_to_text(tmp_path, devices):
    """A target with keys of large and small magnitude says what its balanced twin does."""
    said = []
    for by in ((1024, 1 / 1024, 1, 32), (1,) * 4):
        folder = tmp_path / str(by)
        write_unbalanced(folder, target_config(LLAMA), by)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        llm = LLM(folder, kv_cache_dtype="fp8", tensor_parallel_size=devices, page_size=8)
        said += tokens_of(llm.generate(prompt(*TOKENS[0].tolist()), greedy(24)))
    assert said[0] == said[1]


def test_from_checkpoint_to_drafter(tmp_path):
    target, draft = write_model(tmp_path / "target", TARGET, 0), write_model(tmp_path / "draft", DRAFT, 0)
    write(draft, DRAFT_CONFIG, {"layers.1.self_attn.v_scale": scale(3, 5)})
    llm = LLM(target, draft, draft_kv_cache_dtype="fp8", page_size=8)
    caches = llm.engine.runner.caches
    assert caches.target.v_scale is None
    assert (caches.target.keys[0].dtype, caches.draft.keys[0].dtype) == (jnp.float32, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(caches.draft.v_scale, [[1, 1], [3, 5]])
    assert len(tokens_of(llm.generate(prompt(1, 2, 3), greedy(8)))[0]) == 8
