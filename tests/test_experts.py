"""Targets with experts: how their files are read, who routes where, and the golden pairs in every way of running."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.models.mlp.experts import SparseMLP, routes_of
from dflash_jax.spec import Dense, Experts, target_config
from dflash_jax.spec.hybrid import text_raw_config
from dflash_jax.weights.export import save_model
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.naming import Naming, default_naming
from dflash_jax.weights.parameters import checkpoint_tensors
from dflash_jax.weights.safetensors import list_tensors
from dflash_jax.weights.tables import checkpoint_table
from tests.pairs import (
    HYBRID,
    TARGET,
    assert_empty,
    golden_cases,
    golden_llm,
    greedy,
    in_parts,
    prompt,
    random_tensors,
    tokens_of,
)

MOE = TARGET | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
}
TEXT = {name: value for name, value in HYBRID["text_config"].items() if name != "intermediate_size"}
HYBRID_MOE = HYBRID | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": TEXT
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 12,
    },
}
NEXT = HYBRID_MOE["text_config"] | {"architectures": ["Qwen3NextForCausalLM"]}


def experts_of(raw, **changes):
    return [layer.mlp for layer in target_config(raw | changes).layers]


# --- config.json


def test_experts_of_each_architecture():
    assert experts_of(MOE) == [Experts(6, 2, 10, renormalize=True)] * 5
    assert experts_of(MOE, norm_topk_prob=None) == [Experts(6, 2, 10, renormalize=False)] * 5
    shared = Experts(6, 2, 10, renormalize=True, shared_width=12)
    assert experts_of(HYBRID_MOE) == [shared] * 5
    assert experts_of(NEXT) == [shared] * 5
    assert experts_of(NEXT, norm_topk_prob=False)[0].renormalize is False
    text = HYBRID_MOE["text_config"] | {"norm_topk_prob": False, "mlp_only_layers": [0]}
    assert experts_of(HYBRID_MOE, text_config=text) == [shared] * 5  # transformers reads neither of these here
    assert target_config(HYBRID_MOE).intermediate_size == 0
    assert target_config(TARGET).experts is None


def test_defaults_are_those_of_transformers():
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    absent = dict.fromkeys(names)
    assert experts_of(MOE, **absent)[0] == Experts(128, 8, 768, renormalize=True)
    assert experts_of(NEXT, **absent)[0] == Experts(512, 10, 512, renormalize=True, shared_width=512)
    text = HYBRID_MOE["text_config"] | absent
    assert experts_of(HYBRID_MOE, text_config=text)[0] == Experts(256, 8, 512, renormalize=True, shared_width=512)


def test_the_number_of_experts_has_two_names():
    saved_by_transformers = MOE | {"num_experts": None, "num_local_experts": 9}
    assert experts_of(saved_by_transformers)[0].count == 9


def test_layers_without_experts():
    def dense(**changes):
        config = target_config(MOE | changes)
        assert config.intermediate_size == 48
        return [i for i, layer in enumerate(config.layers) if layer.mlp == Dense()]

    assert dense(mlp_only_layers=[1, 4]) == [1, 4]
    assert dense(decoder_sparse_step=2) == [0, 2, 4]
    assert dense(decoder_sparse_step=2, mlp_only_layers=[3]) == [0, 2, 3, 4]


def test_windows_are_in_all_layers_or_none():
    assert {layer.window for layer in target_config(MOE | {"sliding_window": 8}).layers} == {None}
    assert {
        layer.window for layer in target_config(MOE | {"sliding_window": 8, "use_sliding_window": True}).layers
    } == {8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most num_experts=6"),
        ({"mlp_only_layers": [5]}, r"mlp_only_layers=\[5\] must be a list of layers from 0 to 4"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list"),
        ({"num_experts": 0}, "num_experts=0 must be a positive integer"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "'intermediate_size' is missing"),
    ],
)
def test_impossible_experts(changes, words):
    with pytest.raises(ConfigError, match=words):
        target_config(MOE | changes)


# --- weights


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def save(folder, raw, naming, beside=()):
    """Random tensors of a configuration in another naming than the usual one, and others that no model has."""
    config = target_config(raw)
    usual, renamed = default_naming(config), {name: np.zeros((2, 2), np.float32) for name in beside}
    for old, array in random_tensors(config, seed=3).items():
        name = old if old == usual.head else naming.prefix + old.removeprefix(usual.prefix)
        if naming.experts_apart and name.endswith("experts.gate_up_proj"):
            gate_up = array.reshape(len(array), 2, -1, array.shape[-1])
            for i, (gate, up) in enumerate(gate_up):
                renamed[name.replace("gate_up_proj", f"{i}.gate_proj.weight")] = gate
                renamed[name.replace("gate_up_proj", f"{i}.up_proj.weight")] = up
        elif naming.experts_apart and name.endswith("experts.down_proj"):
            renamed |= {name.replace("down_proj", f"{i}.down_proj.weight"): down for i, down in enumerate(array)}
        else:
            renamed[name] = array
    folder.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in renamed.items()}, folder / "model.safetensors")
    return set(renamed)


@pytest.mark.parametrize("apart", [False, True])
def test_the_built_in_drafter_may_name_its_experts_otherwise(tmp_path, apart):
    """Quantised Qwen3.6-35B-A3B has the experts apart and the drafter's stacked; Qwen3.5-35B-A3B has the reverse."""
    others = ("gate_up_proj", "down_proj") if apart else ("0.gate_proj.weight", "0.down_proj.weight")
    beside = [f"mtp.layers.0.mlp.experts.{name}" for name in others]
    save(tmp_path / "model", HYBRID_MOE, Naming("model.language_model.", experts_apart=apart), beside)
    assert "layers_3" in load_params(tmp_path / "model", target_config(HYBRID_MOE), jnp.float32)


def test_experts_stacked_and_apart_are_the_same(tmp_path):
    """Qwen3.5 is published with stacked experts in 16 bits, and with each apart where it is quantised."""
    config = target_config(HYBRID_MOE)
    for apart in (False, True):
        naming = Naming("model.language_model.", experts_apart=apart)
        assert save(tmp_path / str(apart), HYBRID_MOE, naming) == set(checkpoint_table(config, naming))
    stacked, apart = (load_params(tmp_path / str(kind), config, jnp.float32) for kind in (False, True))
    assert_equal(stacked, apart)
    held = stacked["layers_3"]["mlp"]
    tensors = random_tensors(config, seed=3)
    gate_up = tensors["model.layers.3.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(held["experts"]["gate_up_proj"][4, 1, 7], gate_up[4, 10 + 7])
    assert held["gate"].shape == (6, 32)
    assert held["shared_expert_gate"].shape == (32,)
    assert held["shared_expert"]["down_proj"].shape == (32, 12)


@pytest.mark.parametrize(
    "raw", [MOE, MOE | {"mlp_only_layers": [1]}, HYBRID_MOE, NEXT], ids=["moe", "dense", "3.5", "next"]
)
def test_export_round_trip(raw, tmp_path):
    config = target_config(raw)
    tensors = random_tensors(config, seed=1)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(tmp_path, config, jnp.float32)
    for name, written in checkpoint_tensors(config, params).items():  # norms of 1 + w round
        np.testing.assert_allclose(written, tensors[name], rtol=0, atol=1e-7)
    save_model(tmp_path / "new", raw, config, params, "float32")
    assert set(list_tensors(tmp_path / "new")) == set(tensors)
    written = target_config(text_raw_config(raw))
    assert written.layers == config.layers
    assert_equal(load_params(tmp_path / "new", config, jnp.float32)["layers_2"]["mlp"], params["layers_2"]["mlp"])


def test_projections_of_next_lie_as_ours_do(tmp_path):
    """Its rows of a key head, query, key, values and gates, are those that two tensors of Qwen3.5 have."""
    text = HYBRID_MOE["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"]}
    config, other = target_config(NEXT), target_config(text)
    tensors = random_tensors(config, seed=2)
    (tmp_path / "next").mkdir()
    save_file(tensors, tmp_path / "next" / "model.safetensors")
    params = load_params(tmp_path / "next", config, jnp.float32)
    renamed = checkpoint_tensors(other, params)
    mixer, layer = config.gated_delta, "model.layers.0.linear_attn."
    r, dk, dv = mixer.values_per_key, mixer.key_dim, mixer.value_dim
    grouped = tensors[layer + "in_proj_qkvz.weight"].reshape(mixer.key_heads, -1, config.hidden_size)
    q, k, v, z = np.split(grouped, [dk, 2 * dk, 2 * dk + r * dv], axis=1)  # fix_query_key_value_ordering
    expected = np.concatenate([part.reshape(-1, config.hidden_size) for part in (q, k, v)])
    np.testing.assert_array_equal(renamed[layer + "in_proj_qkv.weight"], expected)
    np.testing.assert_array_equal(renamed[layer + "in_proj_z.weight"], z.reshape(-1, config.hidden_size))
    b, a = np.split(tensors[layer + "in_proj_ba.weight"].reshape(mixer.key_heads, 2 * r, -1), 2, axis=1)
    np.testing.assert_array_equal(renamed[layer + "in_proj_b.weight"], b.reshape(mixer.value_heads, -1))
    np.testing.assert_array_equal(renamed[layer + "in_proj_a.weight"], a.reshape(mixer.value_heads, -1))


def test_a_missing_expert_is_named(tmp_path):
    config = target_config(MOE)
    tensors = random_tensors(config, seed=0)
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'model.layers.2.mlp.experts.5.up_proj.weight' of shape \[10, 32\] is missing"
    ):
        load_params(tmp_path, config, jnp.float32)


@pytest.mark.parametrize("apart", [False, True])
def test_loading_holds_one_array_at_a_time(tmp_path, monkeypatch, apart):
    """A layer's experts are the largest: files may exceed the host's memory many times.

    A device has memory of its own, where a CPU keeps the host's arrays as they are.
    """
    monkeypatch.setattr(jax, "device_put", lambda array, _: jnp.zeros(array.shape, array.dtype))
    text = HYBRID_MOE["text_config"] | {"num_experts": 16, "moe_intermediate_size": 256, "hidden_size": 128}
    config = target_config(HYBRID_MOE | {"text_config": text})
    naming = Naming("model.language_model.", experts_apart=apart)
    save(tmp_path / "large", HYBRID_MOE | {"text_config": text}, naming)
    largest = 16 * 2 * 256 * 128 * 4  # bytes
    tracemalloc.start()
    try:
        params = load_params(tmp_path / "large", config, jnp.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert params["layers_0"]["mlp"]["experts"]["gate_up_proj"].nbytes == largest
    assert peak < 1.3 * largest


# --- routing


def test_weights_of_the_chosen_experts():
    h, router = jnp.ones((1, 1, 1)), jnp.log(jnp.asarray([[1.0], [4.0], [2.0], [4.0], [1.0]]))
    is_token = jnp.ones((1, 1), bool)
    chosen, weights, _ = routes_of(h, router, is_token, None, Experts(5, 3, 8, renormalize=True))
    assert chosen.tolist() == [[[1, 3, 2]]]  # the first of equals first
    np.testing.assert_allclose(weights, [[[0.4, 0.4, 0.2]]], rtol=1e-6)
    _, weights, _ = routes_of(h, router, is_token, None, Experts(5, 3, 8, renormalize=False))
    np.testing.assert_allclose(weights, [[[4 / 12, 4 / 12, 2 / 12]]], rtol=1e-6)


def test_logits_are_not_rounded():
    """256.0 and 256.5 are one number in bfloat16."""
    h, router = jnp.ones((1, 1, 2), jnp.bfloat16), jnp.asarray([[256, 0], [256, 0.5]], jnp.bfloat16)
    chosen, *_ = routes_of(h, router, jnp.ones((1, 1), bool), None, Experts(2, 1, 8, renormalize=True))
    assert chosen.tolist() == [[[1]]]


def test_padding_reaches_no_expert(monkeypatch):
    config = target_config(HYBRID_MOE)
    sent = []

    def experts(x, gate_up, down, chosen, weights, **_):
        sent.append(chosen)
        return jnp.zeros_like(x)

    monkeypatch.setattr("dflash_jax.models.mlp.experts.experts", experts)
    x = jnp.ones((2, 3, 32))
    module = SparseMLP(config)
    is_token = jnp.asarray([[True, True, False], [False, False, False]])
    module.init_with_output(jax.random.key(0), x, x, jnp.ones(32), is_token)
    (chosen,) = sent
    assert (np.asarray(chosen < 6).all(axis=-1) == np.asarray(is_token)).all()


# --- golden pairs; `test_golden.py` has their modules

PAIRS = ("q35_moe_tied", "qwen3_moe")


@pytest.mark.parametrize("name", [PAIRS[0], pytest.param(PAIRS[1], marks=pytest.mark.long)])
def test_prefix_hits_change_nothing(name):
    cases = golden_cases(name)
    llm = golden_llm(name, page_size=16, max_num_seqs=16)  # room for the sliding pages of every case
    prompts, expected = [prompt(*case["input_ids"]) for case in cases], [case["output_ids"] for case in cases]
    assert tokens_of(in_parts(llm, prompts, greedy(80))) == expected
    again = in_parts(llm, prompts, greedy(80))
    assert tokens_of(again) == expected
    assert sum(output.metrics.num_cached_tokens for output in again) > 0
    for output, case in zip(again, cases, strict=True):
        lengths = output.metrics.acceptance_lengths
        assert lengths[:-1] == case["acceptance_lengths"][: len(lengths) - 1]
    assert_empty(llm.engine)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("name", [PAIRS[1], pytest.param(PAIRS[0], marks=pytest.mark.long)])
def test_over_four_devices(name):
    cases = golden_cases(name)
    llm = golden_llm(name, tensor_parallel_size=4, max_num_seqs=2)
    matrices = llm.engine.target.params["layers_0"]["mlp"]["experts"]
    assert {shard.data.shape[2] for shard in matrices["gate_up_proj"].addressable_shards} == {6}
    assert {shard.data.shape[2] for shard in matrices["down_proj"].addressable_shards} == {6}
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert tokens_of(in_parts(llm, prompts, greedy(80), most=1)) == [case["output_ids"] for case in cases]


@pytest.mark.long
@pytest.mark.parametrize(("name", "memory"), [(PAIRS[0], 700_000), (PAIRS[1], 1_500_000)])
def test_after_preemption(name, memory):
    cases = golden_cases(name)
    llm = golden_llm(
        name, page_size=8, max_model_len=232, kv_cache_memory_bytes=memory, state_cache_fraction=0.2, max_num_seqs=4
    )
    prompts = [prompt(*case["input_ids"]) for case in cases]
    llm.compile(prompts, greedy(80))
    outputs = llm.generate(prompts, greedy(80))
    assert llm.engine.scheduler.num_preemptions > 0
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    assert_empty(llm.engine)
