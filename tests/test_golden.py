"""Parity with the public reference implementation: vectors and outputs of trained pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.loader import load_params
from tests.pairs import GOLDEN, GOLDEN_PAIRS, empty_cache, golden_cases, golden_llm, greedy, in_parts, prompt

RELATIVE = 2e-4
QUANTIZED = ("q35_int4_autoround", "q35_fp8_block")  # the references multiply exactly dequantised weights in float32


def assert_close(ours, expected):
    expected = np.asarray(expected)
    assert ours.shape == expected.shape
    assert np.linalg.norm(ours - expected) <= RELATIVE * np.linalg.norm(expected)
    assert np.abs(ours - expected).max() <= RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize("name", [*GOLDEN_PAIRS, "q35_dense", *QUANTIZED])
def test_modules_match_reference_vectors(name):
    engine = golden_llm(name).engine
    params = engine.target.params
    if name in QUANTIZED:  # as they are stored; on a CPU the engine holds small matrices in fp8 otherwise
        params = load_params(GOLDEN / name / "target", engine.target.config, jnp.float32)
    target = TargetModel(engine.target.config).bind({"params": params})
    draft = DraftModel(engine.draft.config).bind({"params": engine.draft.params})

    @jax.jit
    def run(input_ids, block_ids):
        length, block = len(input_ids), len(block_ids)
        positions = jnp.arange(length)[None]
        cache = empty_cache(target.config, length)
        hidden, features, _ = target(input_ids[None], positions, cache, draft.config.target_layer_ids)
        context = draft.write_context(features, positions, empty_cache(draft.config, length + block))
        draft_hidden, _ = draft(target.embed(block_ids[None]), length + jnp.arange(block)[None], context)
        return {
            "target_logits": target.logits(hidden)[0],
            "context_feature": features[0],
            "draft_hidden": draft_hidden[0],
            "draft_logits": target.logits(draft_hidden)[0],
        }

    cases = load_file(GOLDEN / name / "cases.safetensors")
    for i in (0, 3) if name == GOLDEN_PAIRS[1] else (3,):  # a short prompt, of one pair, and the longest
        case = {key.split(".")[1]: value for key, value in cases.items() if key.startswith(f"p{i}.")}
        for key, ours in run(case["input_ids"], case["block_ids"]).items():
            assert_close(np.asarray(ours), case[key])


def assert_matches_reference(outputs, cases):
    for output, case in zip(outputs, cases, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"]
        ours, expected = output.metrics.acceptance_lengths, case["acceptance_lengths"]
        # The reference overshoots max_tokens in its last round; ours is cut, or not needed at all.
        assert ours[:-1] == expected[: len(ours) - 1]
        assert sum(ours) + 1 == len(case["output_ids"])
        assert ours[-1] <= expected[len(ours) - 1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=f"{name}-a round at once") for name in GOLDEN_PAIRS),
        pytest.param(GOLDEN_PAIRS[1], {"logprobs": 1}, id=f"{GOLDEN_PAIRS[1]}-step by step"),
        *(
            pytest.param(name, {"logprobs": 1}, id=f"{name}-step by step", marks=pytest.mark.long)
            for name in (GOLDEN_PAIRS[0], GOLDEN_PAIRS[2])
        ),
    ],
)
def test_outputs_and_acceptance_match_reference(name, options):
    cases = golden_cases(name)
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_matches_reference(golden_llm(name).generate(prompts, greedy(80, **options)), cases)


TWO = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")


@pytest.mark.parametrize(("name", "devices"), [("q35_int4_autoround", 1), pytest.param("q35_fp8_block", 2, marks=TWO)])
def test_quantised_targets_answer_as_the_reference(name, devices):
    """`test_hybrid.py` has the answers of q35_dense."""
    cases = golden_cases(name)
    llm = golden_llm(name, tensor_parallel_size=devices)
    assert isinstance(llm.engine.target.params["layers_0"]["linear_attn"]["in_proj"], Grouped)
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_matches_reference(in_parts(llm, prompts, greedy(80), most=1), cases)


def test_one_by_one_equals_batched():
    name = "qwen3_swa_tied"
    cases = golden_cases(name)
    llm = golden_llm(name, max_num_seqs=1)
    assert_matches_reference(llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(80)), cases)


def test_chunked_prefill_leaves_no_gap_in_drafter_context():
    name = "qwen3_full"
    cases = golden_cases(name)
    llm = golden_llm(name, max_num_batched_tokens=7)  # rounds are those of the engine above
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_matches_reference(in_parts(llm, prompts, greedy(80), most=1), cases)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_sharded_over_four_devices():
    name = "qwen3_swa_tied"  # the target's 6 query heads do not divide by 4; the drafter's do: its kv heads are copied
    cases = golden_cases(name)
    llm = golden_llm(name, tensor_parallel_size=4, max_num_seqs=2)
    weight = llm.engine.target.params["layers_0"]["mlp"]["gate_up_proj"]
    assert {shard.data.shape[0] for shard in weight.addressable_shards} == {weight.shape[0] // 4}
    caches = llm.engine.runner.caches
    kept = [{shard.data.shape[1] for shard in c.keys[0].addressable_shards} for c in (caches.target, caches.draft)]
    assert kept == [{2}, {1}]
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_matches_reference(in_parts(llm, prompts, greedy(80), most=1), cases)
