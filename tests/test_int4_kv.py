"""The engine over 4-bit keys and values: the same answers with drafts, after hits and preemption, on many devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.base.errors import ConfigError
from dflash_jax.engine.device import memory
from dflash_jax.engine.device.steps import bind
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.weights.loader import load_params
from tests.pairs import TARGET, empty_cache, golden_cases, golden_llm, greedy, prompt, tokens_of, write_model
from tests.test_kv_scales import LLAMA, caches_of, step, write_unbalanced

BUDGET = 200_000  # bytes: too few for all cases side by side
INT4 = {"kv_cache_dtype": "int4_had", "max_num_seqs": 2}


def cases_of(name, number=2):
    return [prompt(*case["input_ids"]) for case in golden_cases(name)[:number]]


def keys_are_rounded_for_256_tokens_at_random(runner):
    """Offsets are mean keys of all but the first four, over a dense cache; the target's alone."""
    spec, tokens = runner.spec, 256
    if spec.target.recurrent_layers:  # which have no dense cache here
        return
    target, _ = bind(runner.params, spec)
    text = np.random.default_rng(0).integers(spec.target.vocab_size, size=(1, tokens), dtype=np.int32)
    positions = jnp.arange(tokens)[None]
    *_, cache = jax.jit(lambda text, cache: target(text, positions, cache))(text, empty_cache(spec.target, tokens))
    means = np.stack([np.asarray(keys)[0, 4:].mean(0) for keys in cache.keys])
    assert np.abs(means).max() > 0.1
    rounding = runner.caches.target.k_rounding
    np.testing.assert_allclose(rounding.offset, means, atol=2e-3)
    assert 100 < np.abs(np.asarray(rounding.feedback)).max() < 4096  # of 1024 for 1
    assert runner.caches.draft.k_rounding is None


@pytest.mark.parametrize("name", ["qwen3_full", pytest.param("q35_dense", marks=pytest.mark.long)])
def test_speculation_is_lossless(name):
    """What a token is stored as does not depend on whether a round of one token, of a block, or a prefill wrote it.

    Nor on whether it is found in the prefix cache.
    """
    cases = cases_of(name, 4)[2:]
    llm = golden_llm(name, **INT4, page_size=16)
    drafted = tokens_of(llm.generate(cases, greedy(80)))
    hit = llm.generate(cases, greedy(80))
    assert [output.metrics.num_cached_tokens for output in hit] == [16, 48]
    assert tokens_of(hit) == drafted
    assert {pool.dtype for pool in (*llm.engine.runner.caches.target.keys, *llm.engine.runner.caches.draft.keys)} == {
        jnp.dtype(jnp.int4)
    }
    keys_are_rounded_for_256_tokens_at_random(llm.engine.runner)
    assert drafted == tokens_of(golden_llm(name, drafter=False, **INT4, page_size=16).generate(cases, greedy(80)))
    assert drafted != [case["output_ids"] for case in golden_cases(name)[2:4]]  # of float32: the format is felt


@pytest.mark.long
def test_hits_and_preemption_change_nothing():
    """The pair has sliding layers, whose pages are given back."""
    name, tokens = "qwen3_swa_tied", 40
    cases = cases_of(name, 4)
    expected = tokens_of(golden_llm(name, **INT4).generate(cases, greedy(tokens)))
    llm = golden_llm(name, kv_cache_dtype="int4_had", page_size=8, max_model_len=160, kv_cache_memory_bytes=BUDGET)
    llm.compile(cases, greedy(tokens))
    for _ in "first", "hit":
        assert tokens_of(llm.generate(cases, greedy(tokens))) == expected
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [4, 2])  # divide, and do not
def test_four_devices_compute_what_one_does(tmp_path, kv_heads):
    config = target_config(LLAMA | {"num_key_value_heads": kv_heads})
    write_unbalanced(tmp_path, config, (1,) * kv_heads)

    def hidden(devices, dtype):
        caches = caches_of(config, (None, None), devices=devices, kv_cache_dtype=dtype)
        if dtype == "int4_had":
            pool = caches.target.keys[0]
            shards = {shard.data.shape[1] for array in jax.tree.leaves(pool) for shard in array.addressable_shards}
            assert shards == {kv_heads if kv_heads % devices else kv_heads // devices}
        params = load_params(tmp_path, config, jnp.float32, Mesh.of(devices).place)
        return np.asarray(step(params, caches, config=config)[0])

    one, exact = hidden(1, "int4_had"), hidden(1, "float32")
    # Sums over devices may move a number over a border; a random model's answers then differ in the third place.
    np.testing.assert_allclose(hidden(4, "int4_had"), one, atol=5e-3)
    assert np.linalg.norm(one - exact) > 0.02 * np.linalg.norm(exact)


def test_what_a_token_takes():
    config = target_config(TARGET | {"head_dim": 128})
    heads = config.num_key_value_heads
    assert memory.bytes_per_token(config, jnp.dtype(jnp.int4), 1) == 2 * heads * (64 + 2 + 2)
    assert memory.bytes_per_token(config, jnp.dtype(jnp.bfloat16), 1) == 2 * heads * 256


def test_a_head_size_that_does_not_suit_is_refused(tmp_path):
    folder = write_model(tmp_path, TARGET | {"head_dim": 24}, 0)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: int4_had needs .* this is 24; take fp8 or bfloat16"):
        LLM(folder, kv_cache_dtype="int4_had")
