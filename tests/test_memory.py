"""What a step and the pools take of a device's memory, what that leaves, and what is said when it is too little."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import LLM
from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.round_models import configs_of
from dflash_jax.engine.device import memory
from dflash_jax.engine.device.budget import (
    ROOM,
    draft_bytes,
    fitted,
    has_room,
    parameter_bytes,
    parts_of,
    with_draft_quantization,
)
from dflash_jax.engine.device.memory import (
    FULL,
    SLIDING,
    capacity_of,
    explain_out_of_memory,
    plan_layout,
)
from dflash_jax.engine.device.pools import make_caches, place_layers
from dflash_jax.engine.device.slots import DEFERRED
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.parallel.platform import compiler_options
from dflash_jax.spec import draft_config, target_config
from dflash_jax.state.group import PageGroup
from dflash_jax.state.layout import Layout
from tests.pairs import DRAFT, HYBRID, TARGET, write_model

QWEN3_8B = TARGET | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
QWEN3_8B_DRAFT = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
}
SLIDING_DRAFT = DRAFT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
PAIR = (target_config(QWEN3_8B), draft_config(QWEN3_8B_DRAFT))
SMALL = (target_config(TARGET), draft_config(SLIDING_DRAFT))
GIB = 1 << 30


def options(pair, **changes):
    return EngineConfig.of(EngineArgs(**changes), *pair)


def capacity(**changes):
    config = options(PAIR, **({"max_model_len": 32768, "kv_cache_memory_bytes": int(103.4 * GIB)} | changes))
    return capacity_of(*PAIR, plan_layout(*PAIR, config), config)


def device_with(monkeypatch, *, limit, in_use):
    """Devices that say how much memory they have; the second one has less left."""
    stats = [{"bytes_limit": limit, "bytes_in_use": in_use + more} for more in (0, GIB)]
    devices = [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
    monkeypatch.setattr(memory.jax, "devices", lambda: devices)


# --- capacity


@pytest.mark.parametrize(
    ("dtype", "seqs", "share", "tokens"), [("bfloat16", 32, 0.92, 720_000), ("fp8", 64, 0.46, 1_440_000)]
)
def test_qwen3_8b_at_32k(dtype, seqs, share, tokens):
    found = capacity(kv_cache_dtype=dtype, max_num_seqs=seqs)
    assert found.sequence_bytes(32768) <= share * found.full_allocation_bytes(32768)
    assert found.tokens >= tokens
    assert int(found.max_concurrency) * 32768 >= tokens


def test_bytes_of_each_group():
    found = capacity(kv_cache_dtype="fp8", draft_kv_cache_dtype="bfloat16")
    of_layer = 2 * 8 * 128  # elements
    assert (found.full_bytes, found.sliding_bytes) == (36 * of_layer + 2 * of_layer, 4 * 2 * of_layer)
    assert found.unshared_bytes == 2 * 41 * of_layer
    assert 2048 + 3 * 16 <= found.sliding_tokens <= 2048 + 3 * 16 + 2 * 64
    assert found.sequence_bytes(100) == 100 * (found.full_bytes + found.sliding_bytes)
    growth = found.sequence_bytes(10_001) - found.sequence_bytes(10_000)
    assert growth == found.full_bytes


def test_capacity_is_logged(caplog):
    config = options(PAIR, max_model_len=32768, kv_cache_memory_bytes=int(103.4 * GIB), max_num_seqs=32)
    with caplog.at_level(logging.INFO, logger="dflash_jax"):
        memory.log_capacity(*PAIR, plan_layout(*PAIR, config), config)
    assert [record.getMessage() for record in caplog.records] == [
        "KV cache size: 725,056 tokens",
        "KV cache bytes per token: 151,552 in layers that keep every token",
        "KV cache bytes per token: 16,384 in sliding layers, which keep 2,176 tokens a sequence",
        "Maximum concurrency for 32,768 tokens per sequence: 22.08x",
        "KV cache bytes per sequence of 32,768 tokens: 4,770 MiB, 90.9% of a full allocation",
    ]


def test_an_engine_logs_it_at_start(caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="dflash_jax"):
        LLM(write_model(tmp_path, TARGET, 0), max_num_seqs=2)
    assert "KV cache size: 1,152 tokens" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("devices", [1, 2, 4])  # 2 kv heads divide over two devices and not over four
@pytest.mark.parametrize("draft_dtype", ["auto", "fp8", "int4_had"])
def test_pools_take_the_memory_that_was_planned(devices, draft_dtype):
    budget = 4_000_000
    config = options(
        SMALL,
        kv_cache_memory_bytes=budget,
        max_num_seqs=8,
        page_size=16,
        tensor_parallel_size=devices,
        draft_kv_cache_dtype=draft_dtype,
    )
    layout = plan_layout(*SMALL, config)
    caches = make_caches(*SMALL, layout, config, Mesh.of(devices))
    taken = sum(
        shard.data.nbytes
        for pool in jax.tree.leaves((caches.target, caches.draft))
        for shard in pool.addressable_shards
    )
    page = layout.page_size * memory.group_bytes(*SMALL, config)[memory.FULL]
    assert budget - page < taken <= budget


# --- what a device has left


def test_layers_share_pools():
    layout = Layout(16, 4, 5, (PageGroup(10, 16), PageGroup(3, 16, window=7)))
    places, pages = place_layers([SLIDING, FULL, SLIDING, SLIDING, FULL], layout, 1, jnp.dtype(jnp.float32))
    assert pages == [20, 9]
    assert places == ((SLIDING, 1, 0), (FULL, 0, 0), (SLIDING, 1, 3), (SLIDING, 1, 6), (FULL, 0, 10))
    assert place_layers([SLIDING], layout, 1, jnp.dtype(jnp.float32)) == (((SLIDING, 0, 0),), [3])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16])
@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 36])
@pytest.mark.parametrize("gib", [2, 2.2, 3, 3.4, 3.66, 4, 4.1, 5])
def test_no_pool_has_a_size_that_triton_cannot_address(gib, num_layers, dtype):
    layout = Layout(16, 4, 5, (PageGroup(10, 16), PageGroup(0, 16)))
    page_bytes = int(gib * GIB) // (10 * num_layers)
    places, pages = place_layers([FULL] * num_layers, layout, page_bytes, jnp.dtype(dtype))
    assert sum(pages) == 10 * num_layers
    if dtype != jnp.bfloat16:
        assert not [size for size in pages if 2 * GIB < size * page_bytes <= 4 * GIB]
    if dtype == jnp.bfloat16 or not 2 < gib <= 4:
        assert len(pages) == 1
    ends = [10 * (place.first_page // 10 + 1) for place in places]
    assert all(end <= pages[place.pool] for end, place in zip(ends, places, strict=True))
    assert len({place[1:] for place in places}) == num_layers


def test_a_layer_that_triton_cannot_address_is_logged(caplog):
    layout = Layout(16, 4, 5, (PageGroup(10, 16), PageGroup(0, 16)))
    assert place_layers([FULL], layout, 3 * GIB // 10, jnp.dtype(jnp.float8_e4m3fn))[1] == [10]
    assert "3.00 GiB" in caplog.text
    assert "kv_cache_memory_bytes" in caplog.text


def test_room_for_steps_is_left_on_a_device(monkeypatch):
    device_with(monkeypatch, limit=100 * GIB, in_use=16 * GIB)
    config = options(PAIR)
    left = 90 * GIB - 16 * GIB
    assert memory.free_bytes(*PAIR, config) == left - memory.working_bytes(*PAIR, config)
    both = options(PAIR, tensor_parallel_size=2)  # the second device has a GiB less
    assert memory.free_bytes(*PAIR, both) == 2 * (left - GIB - memory.working_bytes(*PAIR, both))
    assert memory.working_bytes(*PAIR, both) < memory.working_bytes(*PAIR, config)


def test_what_a_step_takes():
    chunk = memory.step_bytes(*PAIR, options(PAIR), tokens=8192, rows=1)
    assert chunk == 2 * 8192 * (5 * 4096 + 4 * 4096 + 3 * 12288)
    rounds = memory.step_bytes(*PAIR, options(PAIR), tokens=1024, rows=1024)
    assert rounds == 2 * 1024 * 5 * 4096 + memory.LOGITS_COPIES * 4 * 1024 * 151936
    assert memory.step_bytes(PAIR[0], None, options(PAIR), tokens=8192, rows=1) == 2 * 8192 * (4 * 4096 + 3 * 12288)
    narrow = [replace(model, hidden_size=64, intermediate_size=64, num_attention_heads=8) for model in PAIR]
    of_context = memory.step_bytes(*narrow, options(PAIR), tokens=8192, rows=1)
    assert of_context == 2 * 8192 * (5 * 64 + 64 + 2 * 2 * 5 * 8 * 128)
    few, many, longer = (
        memory.working_bytes(*PAIR, options(PAIR, **more))
        for more in ({"max_num_seqs": 1}, {"max_num_seqs": 64}, {"max_num_seqs": 1, "max_num_batched_tokens": 16384})
    )
    slot = memory.SAMPLING_STATE_BYTES * 151936 + 2 * DEFERRED * 5 * 4096
    assert few == chunk + slot  # the chunk is larger than a round of one sequence
    assert many == rounds + 64 * slot
    assert longer == 2 * chunk + slot


def test_no_room_is_no_negative_number(monkeypatch):
    device_with(monkeypatch, limit=20 * GIB, in_use=18 * GIB)
    with pytest.raises(ConfigError, match=r"^0 bytes for .* 0 tokens.*max_model_len=40960.*max_num_batched_tokens"):
        plan_layout(*PAIR, options(PAIR))


def test_little_room_is_told_in_a_unit_that_shows_it():
    hybrid = configs_of("qwen3.5-0.8b", None)
    with pytest.raises(ConfigError, match=r"^kv_cache_memory_bytes=62914560 \(60\.0 MiB\) holds 0 tokens") as error:
        plan_layout(*hybrid, options(hybrid, kv_cache_memory_bytes=60 << 20))
    assert str(error.value).endswith("; lower max_model_len or max_num_seqs, or raise kv_cache_memory_bytes.")


def test_bytes_of_the_cache_that_are_too_few_are_named_with_what_would_help():
    alone = (SMALL[0], None)
    few = r"^kv_cache_memory_bytes=1000 holds 0 tokens, and one sequence of max_model_len=100 needs 128"
    with pytest.raises(ConfigError, match=rf"{few}; lower max_model_len or raise kv_cache_memory_bytes\.$"):
        plan_layout(*alone, options(alone, kv_cache_memory_bytes=1000, max_model_len=100))


# --- when it runs out


FULL_DEVICE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.00GiB.\nlong summary"
FLAGS = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "tensor_parallel_size",
)


def raising(message):
    def function(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(message)

    return function


def test_pools_that_do_not_fit(monkeypatch):
    config = options(SMALL, page_size=16, kv_cache_memory_bytes=1 << 24)
    layout = plan_layout(*SMALL, config)
    monkeypatch.setattr(jnp, "zeros", raising(FULL_DEVICE))
    with pytest.raises(ConfigError, match=r"out of memory.*allocate 20\.00GiB") as error:
        make_caches(*SMALL, layout, config, Mesh.of(1))
    assert all(flag in str(error.value) for flag in FLAGS)
    assert "\n" not in str(error.value)


def test_parameters_that_do_not_fit(monkeypatch, tmp_path):
    write_model(tmp_path, TARGET, 0)
    monkeypatch.setattr(jax, "device_put", raising(FULL_DEVICE))
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(tmp_path)


def test_other_errors_stay_as_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explain_out_of_memory():
        raising("INTERNAL: broken")()


# --- a bound on all that is taken


QWEN3_6 = configs_of("qwen3.6-27b", None)


def bounded(**changes):
    """The options of Qwen3.6-27B in int4 under 23 GiB, its plan, and bytes of the parameters of both models."""
    config = options(QWEN3_6, **({"gpu_memory_bytes": 23 * GIB, "num_speculative_tokens": 16} | changes))
    of_target = parameter_bytes(QWEN3_6[0], config.dtype, 4)
    config = with_draft_quantization(config, *QWEN3_6, of_target)
    parameters = [of_target, draft_bytes(*QWEN3_6, config.dtype, config.draft_quantization)]
    config = fitted(*QWEN3_6, config, sum(parameters))
    return config, plan_layout(*QWEN3_6, config, sum(parameters)), parameters


@pytest.mark.parametrize(("dtype", "longest"), [("fp8_e5m2", 96_000), ("int4_had", 180_000)])
def test_qwen3_6_27b_in_int4_on_a_card_of_24_gib(dtype, longest):
    """vLLM's issue 41559: this target with its drafter, whose pages and states left no room for 96,000 tokens."""
    config, layout, parameters = bounded(kv_cache_dtype=dtype, max_model_len=longest)
    assert layout.num_tokens >= longest
    assert (config.max_num_seqs, config.draft_quantization, config.num_speculative_tokens) == (4, "int4", 15)
    assert layout.groups[layout.snapshots].num_units >= 1
    parts = parts_of(*QWEN3_6, layout, config, parameters)
    page = layout.page_size * sum(memory.group_bytes(*QWEN3_6, config))
    assert 23 * GIB - page - parts["2 snapshots"] // 2 < sum(parts.values()) <= 23 * GIB
    assert parts["target"] == pytest.approx(16.47 * GIB, rel=1e-3)


def test_bytes_of_parameters_are_those_of_arrays(tmp_path):
    write_model(tmp_path / "target", HYBRID, 0)
    write_model(tmp_path / "draft", DRAFT, 1)
    engine = LLM(tmp_path / "target", tmp_path / "draft", max_num_seqs=1, draft_quantization="int4").engine
    target, draft = (sum(leaf.nbytes for leaf in jax.tree.leaves(params)) for params in engine.runner.params)
    assert target == parameter_bytes(engine.spec.target, engine.config.dtype)
    assert draft == draft_bytes(engine.spec.target, engine.spec.draft, engine.config.dtype, "int4")
    assert "lm_head" not in engine.runner.params[1]


def test_what_is_given_is_not_lowered():
    config, _, _ = bounded(kv_cache_dtype="fp8", max_model_len=32_000, max_num_seqs=2, max_num_batched_tokens=4096)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (2, 4096)
    roomy, _, _ = bounded(gpu_memory_bytes=80 * GIB, kv_cache_dtype="fp8", max_model_len=32_000)
    assert (roomy.max_num_seqs, roomy.max_num_batched_tokens, roomy.draft_quantization) == (16, 8192, None)
    wide, _, _ = bounded(gpu_memory_bytes=int(22.75 * GIB), kv_cache_dtype="fp8", max_model_len=32_000)
    assert (wide.max_num_seqs >= ROOM["max_num_seqs"], wide.draft_quantization) == (True, "fp8")


def test_a_bound_that_holds_too_little_names_the_parts():
    parts = r"gpu_memory_bytes=20\.00 GiB less parameters 17\.31 GiB.* CUDA .*states of"
    with pytest.raises(ConfigError, match=rf"{parts}.* raise gpu_memory_bytes"):
        bounded(gpu_memory_bytes=20 * GIB, kv_cache_dtype="fp8", max_model_len=96_000)
    with pytest.raises(ConfigError, match=r"\(gpu_memory_bytes=1000 bytes less parameters 17\.31 GiB, "):
        bounded(gpu_memory_bytes=1000, kv_cache_dtype="fp8", max_model_len=96_000)


def test_a_bound_is_that_of_each_device(monkeypatch):
    device_with(monkeypatch, limit=79 * GIB, in_use=16 * GIB)
    config = options(PAIR, gpu_memory_bytes=40 * GIB)
    outside = memory.OUTSIDE_BYTES + memory.GAPS_BYTES + memory.working_bytes(*PAIR, config)
    assert memory.free_bytes(*PAIR, config) == 24 * GIB - outside
    device_with(monkeypatch, limit=30 * GIB, in_use=16 * GIB)
    assert memory.free_bytes(*PAIR, config) == 14 * GIB - outside + memory.OUTSIDE_BYTES


# --- recurrent states


def test_a_sequence_of_a_hybrid_takes_little_more_than_one_state():
    """Qwen3.6-27B in 66 GiB, 16 slots, the mixed drafter: vLLM 0.26 keeps 16 states a request, and 92,261 tokens."""
    pair = configs_of("qwen3.6-27b", None)
    config = options(pair, max_num_seqs=16, kv_cache_memory_bytes=66 * GIB)
    figures = capacity_of(*pair, plan_layout(*pair, config), config)
    one_state = 48 * (4 * 48 * 128 * 128 + 2 * 3 * 10240)  # of 48 layers, with the tail of the convolution
    assert figures.state_bytes - figures.tape_bytes == one_state
    assert figures.state_bytes <= 1.2 * one_state
    assert figures.tokens >= 850_000
    assert figures.snapshots == int(0.1 * 66 * GIB) // figures.state_bytes
    halved = options(pair, max_num_seqs=16, kv_cache_memory_bytes=66 * GIB, kv_cache_dtype="fp8")
    tokens_in_fp8 = capacity_of(*pair, plan_layout(*pair, halved), halved).tokens
    assert tokens_in_fp8 >= 1.9 * figures.tokens  # where pages grow to the size of a state, fp8 gains nothing
    text = "\n".join(figures.lines())
    assert f"KV cache size: {figures.tokens:,} tokens" in text
    assert "Recurrent states: 162.0 MiB a sequence, of which 15.1 MiB are the tape of a block; room for 41" in text


@pytest.mark.parametrize("devices", [2, 4])
def test_qwen3_5_122b_keeps_one_kv_head_on_each_of_several_devices(devices):
    """Four streams in as much memory as vLLM's PR 40898 had on each of four GPUs for its 5,988,876 tokens."""
    pair = [model.over(devices) for model in configs_of("qwen3.5-122b-a10b", None)]
    size = int(94.35 * GIB) * devices
    config = options(pair, max_num_seqs=4, kv_cache_memory_bytes=size, tensor_parallel_size=devices)
    figures = capacity_of(*pair, plan_layout(*pair, config), config)
    tokens = (size - 4 * figures.state_bytes) * 262_144 // figures.sequence_bytes(262_144)
    assert tokens == {2: 6_963_080, 4: 7_550_829}[devices]


def test_a_target_without_attention_is_refused():
    text = HYBRID["text_config"] | {"layer_types": ["linear_attention"] * 5}
    target = target_config(HYBRID | {"text_config": text})
    with pytest.raises(ConfigError, match="no layer of the target has attention"):
        plan_layout(target, None, EngineConfig.of(EngineArgs(), target, None))


@pytest.mark.parametrize("changes", [{"enable_prefix_caching": False}, {"state_cache_fraction": 0.0}])
def test_without_snapshots_nothing_is_set_aside_for_them(changes):
    pair = configs_of("qwen3.6-27b", None)
    config = options(pair, max_num_seqs=16, kv_cache_memory_bytes=66 * GIB, **changes)
    layout = plan_layout(*pair, config)
    assert layout.groups[layout.snapshots].num_units == 0
    assert layout.num_tokens > 950_000


@pytest.mark.parametrize(("free", "fits"), [(1279, False), (1280, True)])
def test_products_are_timed_only_where_their_operands_fit_a_second_time(free, fits):
    """XLA copies operands to time products with them; a program of a full device could not be compiled."""

    def leaf(size):
        data = SimpleNamespace(nbytes=size)
        device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 5000, "bytes_in_use": 5000 - free})
        return SimpleNamespace(devices=lambda: [device], addressable_shards=[SimpleNamespace(data=data)])

    assert has_room([leaf(10), leaf(1024)]) == fits
    options = compiler_options("gpu", has_room=fits)
    assert options.get("xla_gpu_autotune_level") == (None if fits else 0)
