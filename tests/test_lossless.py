"""Speculation never changes an answer: not with a trained, a random or an adversarial drafter, at no temperature."""

import json
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.stats import chisquare

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.programs.store import programs
from tests.pairs import DRAFT, GOLDEN, TARGET, golden_cases, golden_llm, greedy, prompt, tokens_of, write_model

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"num_hidden_layers": 3, "num_target_layers": 3}  # as many layers as the taps of a drafter below
FLAVOURS = {  # of random drafters
    "one_layer": {"num_hidden_layers": 1, "dflash_config": {"target_layer_ids": [0, 1, 2]}},
    "all_sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 4},
    "symmetric_window": {"layer_types": [SLIDING, FULL], "sliding_window": 5, "is_causal": False},
    "causal_multi_query": {"is_causal": True, "num_key_value_heads": 1, "block_size": 2},
    "own_vocabulary": {"draft_vocab_size": 20, "block_size": 9},
}


def random_pair(folder, seed=1, target=TARGET | SIZES, **changes):
    dflash = DRAFT["dflash_config"] | {"target_layer_ids": [0, 1]} | changes.pop("dflash_config", {})
    raw = DRAFT | {"dflash_config": dflash} | changes
    raw |= {name: target[name] for name in ("vocab_size", "num_target_layers") if name in target}
    return write_model(folder / "target", target, 0), write_model(folder / "draft", raw, seed)


def prompts_of(number, vocab_size, seed=5):
    rng = np.random.default_rng(seed)
    return [prompt(*rng.integers(0, vocab_size, rng.integers(1, 40)).tolist()) for _ in range(number)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A random target, prompts, and what it answers alone."""
    target = write_model(tmp_path_factory.mktemp("plain") / "target", TARGET | SIZES, 0)
    prompts = prompts_of(4, TARGET["vocab_size"])
    return target, prompts, tokens_of(LLM(target, max_num_seqs=2).generate(prompts, greedy(30)))


RARELY = ("one_layer", "all_sliding", "symmetric_window", "causal_multi_query")  # test_oracle.py has such, too


@pytest.mark.parametrize(
    "flavour", [pytest.param(name, marks=pytest.mark.long if name in RARELY else ()) for name in FLAVOURS]
)
def test_random_drafters(tmp_path, plain, flavour):
    target, prompts, expected = plain
    _, draft = random_pair(tmp_path, **FLAVOURS[flavour])
    # Adaptive lengths take many programs: one flavour has them.
    drafts = None if flavour == "all_sliding" else FLAVOURS[flavour].get("block_size", DRAFT["block_size"]) - 1
    llm = LLM(target, draft, max_num_seqs=2, num_speculative_tokens=drafts)
    assert tokens_of(llm.generate(prompts, greedy(30))) == expected


def adversarial(source, folder, value):
    """A golden drafter whose final norm is replaced: it always drafts one token, or its least likely ones."""
    shutil.copytree(source, folder)
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors["norm.weight"] = (tensors["norm.weight"] * value).astype(tensors["norm.weight"].dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [-1.0, np.nan, pytest.param(0.0, marks=pytest.mark.long)])
def test_adversarial_drafters(tmp_path, value):
    name = "qwen3_swa_tied"
    draft = adversarial(GOLDEN / name / "draft", tmp_path / "draft", value)
    cases = golden_cases(name)
    llm = LLM(GOLDEN / name / "target", draft, dtype="float32", max_num_seqs=1, num_speculative_tokens=15)
    outputs = llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(80))
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    assert np.mean(outputs[0].metrics.acceptance_lengths) < 2  # the trained drafter reaches 15.8 here


SETTINGS = [
    SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=8, seed=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2**63 - 1, max_tokens=40, min_tokens=20),
    SamplingParams(temperature=0.9, min_p=0.05, seed=-6, max_tokens=33, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=37, ignore_eos=True),
]


def test_seeded_sampling_is_the_same_with_and_without_drafter():
    name = "qwen3_swa_tied"
    prompts = [prompt(*golden_cases(name)[i % 4]["input_ids"]) for i in range(len(SETTINGS))]
    with_drafter = golden_llm(name).generate(prompts, SETTINGS)
    plain = golden_llm(name, drafter=False)
    assert tokens_of(with_drafter) == tokens_of(plain.generate(prompts, SETTINGS))
    accepted = [length for output in with_drafter for length in output.metrics.acceptance_lengths]
    assert max(accepted) > 2  # or nothing has been tested
    # ... and whatever runs beside it
    assert tokens_of(plain.generate(prompts[2], SETTINGS[2])) == tokens_of(with_drafter[2:3])


def test_unseeded_requests_differ_but_the_engine_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2)
    runs = [tokens_of(golden_llm("llama_full", seed=s).generate([prompt(5, 6)] * 2, params)) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


@pytest.mark.parametrize("drafted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_joint_distribution_of_two_tokens(tmp_path, drafted):
    """Chi-square of the first round's two tokens against the target's own probabilities, on 5 tokens.

    The drafter is a copy of the target in no way: it drafts one fixed token, so that accepting and rejecting
    both occur.
    """
    vocabulary, samples, slots = 5, 2000, 8
    target = TARGET | {"vocab_size": vocabulary, "max_position_embeddings": 64}
    target |= {"num_hidden_layers": 2, "num_target_layers": 2}
    changes = {"dflash_config": {"mask_token_id": 4}, "num_hidden_layers": 1, "block_size": 3}
    folders = random_pair(tmp_path, target=target, **changes)
    drafter = {"draft_model": folders[1], "num_speculative_tokens": 2} if drafted else {}
    llm = LLM(folders[0], **drafter, max_num_seqs=slots)
    start = [1, 3, 0]
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, n=samples, seed=11)
    llm.generate(prompt(*start), replace(params, n=slots))
    programs().join()  # else thousands take turns in small programs until those of all slots are compiled
    outputs = llm.generate(prompt(*start), params)[0].outputs

    continuations = [(), *product(range(vocabulary), repeat=1), *product(range(vocabulary), repeat=2)]
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=vocabulary, ignore_eos=True)
    answers = llm.generate([prompt(*start, *tokens) for tokens in continuations], one)
    entries = [answer.outputs[0].logprobs[0] for answer in answers]
    probabilities = {
        tokens: np.exp([entry[token].logprob for token in range(vocabulary)])
        for tokens, entry in zip(continuations, entries, strict=True)
    }
    first = probabilities[()]
    second = [probabilities[(a,)] for a in range(vocabulary)]
    third = probabilities
    # tokens 2 and 3 come from one round when the draft of token 2 is accepted
    counts = np.zeros((vocabulary, vocabulary))
    for completion in outputs:
        counts[completion.token_ids[1], completion.token_ids[2]] += 1
    joint = np.einsum(
        "a,ab,abc->bc",
        first,
        np.array(second),
        np.array([[third[a, b] for b in range(vocabulary)] for a in range(vocabulary)]),
    )
    assert chisquare(counts.ravel(), joint.ravel() / joint.sum() * samples).pvalue > 1e-3


@pytest.mark.parametrize("drafts", [1, 15, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_speculative_tokens(drafts):
    name = "qwen3_swa_tied"
    cases = golden_cases(name)[:2]
    outputs = golden_llm(name, num_speculative_tokens=drafts).generate(
        [prompt(*case["input_ids"]) for case in cases], greedy(80)
    )
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    assert max(length for output in outputs for length in output.metrics.acceptance_lengths) <= drafts + 1


def test_speculators_format_equals_native(tmp_path):
    name = "qwen3_swa_tied"
    raw = json.loads((GOLDEN / name / "draft" / "config.json").read_text())
    dflash = raw.pop("dflash_config")
    block_size = raw.pop("block_size")
    converted = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "block_size": block_size,
        "draft_vocab_size": raw["vocab_size"],
        "transformer_layer_config": {k: v for k, v in raw.items() if k not in ("architectures", "num_target_layers")},
    }
    folder = tmp_path / "draft"
    shutil.copytree(GOLDEN / name / "draft", folder)
    (folder / "config.json").write_text(json.dumps(converted))
    llm = LLM(GOLDEN / name / "target", folder, dtype="float32", num_speculative_tokens=block_size - 1)
    native = golden_llm(name)
    assert llm.engine.draft.config.layers == native.engine.draft.config.layers
    case = prompt(*golden_cases(name)[0]["input_ids"])
    found, expected = (m.generate(case, greedy(80))[0].metrics for m in (llm, native))
    assert found.acceptance_lengths == expected.acceptance_lengths


@pytest.mark.parametrize("dtype", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.long)])
def test_speculation_is_lossless_over_an_fp8_cache(dtype):
    name = "qwen3_full"
    cases = [prompt(*case["input_ids"]) for case in golden_cases(name)]
    outputs = [
        tokens_of(golden_llm(name, drafter=drafter, kv_cache_dtype=dtype, max_num_seqs=2).generate(cases, greedy(40)))
        for drafter in (True, False)
    ]
    assert outputs[0] == outputs[1]
