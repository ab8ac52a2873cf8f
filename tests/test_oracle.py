"""Random pairs over the whole space of configurations, against an independent implementation."""

import itertools
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from tests import oracle
from tests.dense_kv import DenseKVCache
from tests.pairs import greedy, prompt, write_model

EXAMPLES = 2  # of each way to attend: the simplest one, which is alike in all of them, and a random one
ATTENDS = {"mixed": 15, "all_sliding": 26, "full": 17, "use_swa": 23, "speculators": 9}  # and their seeds
RARELY = ("all_sliding", "full", "use_swa", "speculators")  # "mixed" has sliding and full layers
RELATIVE = 2e-4
UNDECIDED = 1e-5  # relative gap of the two best logits below which float32 may choose the other
MAX_TOKENS = 24
SLIDING, FULL = "sliding_attention", "full_attention"
RUNS_LONG = "DFLASH_TEST_LONG" in os.environ

ROPES = [
    {
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "attention_factor": 0.8,
        }
    },
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 0.5, "rope_theta": 300.0}},
    {
        "rope_theta": 2000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48,
        },
    },
    {"rope_theta": 500.0},
]


@st.composite
def geometries(draw):
    """Heads of any grouping, and a head size that has nothing to do with the width."""
    kv_heads = draw(st.sampled_from([2, 1, 3]))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([2, 1, 4])),
        "head_dim": draw(st.sampled_from([6, 4, 16])),
        "intermediate_size": draw(st.sampled_from([12, 40])),
        "attention_bias": draw(st.sampled_from([True, False])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }


@st.composite
def targets(draw):
    layers = draw(st.sampled_from([5, 4]))
    raw = {
        "architectures": [draw(st.sampled_from(["Qwen3ForCausalLM", "LlamaForCausalLM"]))],
        "vocab_size": draw(st.integers(8, 14)),
        "hidden_size": draw(st.sampled_from([16, 20, 32])),
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
        "tie_word_embeddings": draw(st.booleans()),
        "dtype": "float32",
        **draw(geometries()),
        **draw(st.sampled_from(ROPES)),
    }
    windows = draw(st.sampled_from(["types", "none", "unused", "layers"]))
    if windows != "none":
        raw |= {"sliding_window": draw(st.integers(1, 12)), "use_sliding_window": windows != "unused"}
        raw["max_window_layers"] = 1
    if windows == "types":
        raw["layer_types"] = draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=layers, max_size=layers))
    return raw


@st.composite
def drafters(draw, target, attends):
    """A drafter for a target: every way to say where it attends, taps, and how long its block is."""
    layers = draw(st.sampled_from([2, 1, 3]))
    raw = {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_hidden_layers": layers,
        "max_position_embeddings": 256,
        "rope_theta": draw(st.sampled_from([100.0, 10000.0])),
        "dtype": "float32",
        **draw(geometries()),
    }
    dflash = {"mask_token_id": draw(st.integers(0, target["vocab_size"] - 1))}
    window = draw(st.sampled_from([4, 1, 2, 7, 12]))
    if attends == "all_sliding":
        raw |= {"layer_types": [SLIDING] * layers, "sliding_window": window}
    elif attends == "use_swa":
        dflash |= {"use_swa": True, "swa_window_size": window}
    elif attends != "full":
        raw |= {"layer_types": ([SLIDING, FULL] * layers)[:layers], "sliding_window": window}
    taps = draw(st.none() | st.lists(st.integers(0, target["num_hidden_layers"] - 1), min_size=1, max_size=4))
    block = {"block_size": draw(st.sampled_from([6, 2, 9, 16, 17]))}
    if attends == "speculators":
        raw |= {"sliding_window_non_causal": True} if draw(st.booleans()) else {}
        return {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": [i + 1 for i in taps or [3, 1, 0]],
            "mask_token_id": dflash["mask_token_id"],
            "draft_vocab_size": target["vocab_size"] - draw(st.sampled_from([3, 0])),
            "transformer_layer_config": raw,
            **block,
        }
    match draw(st.sampled_from(["nowhere", "top", "nowhere", "dflash_config"])):
        case "top":
            raw["is_causal"] = draw(st.booleans())
        case "dflash_config":
            dflash["causal"] = draw(st.booleans())
    (raw if draw(st.booleans()) else dflash).update(block)
    dflash |= {"target_layer_ids": taps} if taps else {}
    return raw | {"architectures": ["DFlashDraftModel"], "dflash_config": dflash}


@st.composite
def cases(draw, attends):
    """A pair, weights and a batch of prompts, some shorter and some longer than the windows."""
    target = draw(targets())
    lengths = draw(st.lists(st.sampled_from([30, 1, 5, 18]), min_size=2, max_size=4))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, target["vocab_size"], length).tolist() for length in lengths]
    loudness = draw(st.sampled_from([8.0, 4.0, 16.0]))
    return target, draw(drafters(target, attends)), prompts, seed, loudness


def write_pair(folder, target, draft, seed, loudness):
    """A random pair in which both like to repeat: drafts hold for a while, then do not, as in a trained pair.

    The louder the embeddings, the more often the target repeats its last token. The drafter's attention carries
    what it sees over to its output, so that a block repeats the anchor and the latest context.
    """
    folders = write_model(folder / "target", target, seed), write_model(folder / "draft", draft, seed + 1)
    own, drafter = (dict(load_file(f / "model.safetensors")) for f in folders)
    config = draft.get("transformer_layer_config", draft)
    embedding = own["model.embed_tokens.weight"]
    embedding *= loudness
    mask_token = draft["mask_token_id"] if "mask_token_id" in draft else draft["dflash_config"]["mask_token_id"]
    embedding[mask_token] *= 1e-3  # or a block repeats the mask
    if "lm_head.weight" in own:
        own["lm_head.weight"] = embedding + own["lm_head.weight"] / 4
    number, width = config["num_hidden_layers"], config["hidden_size"]
    drafter["fc.weight"] += np.tile(np.eye(width, dtype=np.float32), drafter["fc.weight"].shape[1] // width)
    for attention in (f"layers.{i}.self_attn." for i in range(number)):
        values = drafter[attention + "v_proj.weight"].reshape(config["num_key_value_heads"], config["head_dim"], -1)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        drafter[attention + "o_proj.weight"] = np.repeat(values, group, axis=0).reshape(-1, width).T.copy()
    if "d2t" in drafter:  # its own head is the target's without the first tokens
        first = target["vocab_size"] - len(drafter["d2t"])
        drafter["d2t"][:], drafter["lm_head.weight"] = first, embedding[first:].copy()
    for tensors, model in zip((own, drafter), folders, strict=True):
        save_file(tensors, model / "model.safetensors")
    return folders


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= RELATIVE * np.abs(expected).max()


def assert_modules_agree(llm, target, drafter, tokens):
    """Logits, taps, the drafter's hidden states and drafts over one prompt, in one call of each module."""
    target_module = TargetModel(llm.engine.target.config).bind({"params": llm.engine.target.params})
    draft_module = DraftModel(llm.engine.draft.config).bind({"params": llm.engine.draft.params})
    block = [tokens[-1]] + [drafter.mask_token] * (drafter.block_size - 1)

    def cache(config, slots):
        shape = (1, slots, config.num_key_value_heads, config.head_dim)
        return DenseKVCache.zeros(config.num_hidden_layers, shape, jnp.float32)

    @jax.jit
    def run(tokens, block):
        length = tokens.shape[1]
        positions = jnp.arange(length)[None]
        hidden, features, _ = target_module(
            tokens, positions, cache(target_module.config, length), draft_module.config.target_layer_ids
        )
        context = draft_module.write_context(features, positions, cache(draft_module.config, length + block.shape[1]))
        draft_hidden, _ = draft_module(target_module.embed(block), length + jnp.arange(block.shape[1])[None], context)
        drafts = draft_module.tokens(draft_hidden, target_module.head)
        return target_module.logits(hidden)[0], features[0], draft_hidden[0], drafts[0]

    logits, features, draft_hidden, drafts = map(np.asarray, run(jnp.asarray([tokens]), jnp.asarray([block])))
    expected_logits, after = target(tokens)
    assert_close(logits, expected_logits)
    assert_close(features, np.concatenate([after[i] for i in drafter.taps], axis=-1))
    expected_hidden = drafter(drafter.context(after), block[0])
    assert_close(draft_hidden, expected_hidden)
    draft_logits = drafter.logits(expected_hidden)
    best = np.sort(draft_logits, axis=-1)
    decided = best[:, -1] - best[:, -2] > UNDECIDED * np.abs(draft_logits).max()
    assert decided.mean() > 0.5
    np.testing.assert_array_equal(drafts[decided], drafter.tokens(draft_logits)[decided])


def over_random_cases(attends, examples):
    """Decorates a check of one case; the seeds give every way to attend another target."""

    def decorate(check):
        config = settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        return hypothesis.seed(ATTENDS[attends])(config(given(cases(attends))(check)))

    return decorate


@contextmanager
def written(case):
    """A pair's folders, the oracle's models of it, and what these say to the prompts."""
    raw_target, raw_draft, prompts, seed, loudness = case
    with tempfile.TemporaryDirectory() as folder:
        folders = write_pair(Path(folder), raw_target, raw_draft, seed, loudness)
        target = oracle.Target(folders[0])
        drafter = oracle.Drafter(folders[1], target)
        completions = [oracle.complete(target, drafter, tokens, MAX_TOKENS) for tokens in prompts]
        assume(min(completion.margin for completion in completions) > UNDECIDED)
        yield folders, target, drafter, completions


@pytest.mark.parametrize(
    "attends", [pytest.param(name, marks=pytest.mark.long if name in RARELY else ()) for name in ATTENDS]
)
def test_random_pairs_agree_with_the_oracle(attends):
    """Token ids, acceptance lengths of every round but the last (which max_tokens cuts), and states."""

    number = itertools.count()

    @over_random_cases(attends, EXAMPLES)
    def agree(case):
        if next(number) == 0 and attends != "mixed" and not RUNS_LONG:
            return
        prompts = case[2]
        with written(case) as (folders, target, drafter, expected):
            llm = LLM(*folders, dtype="float32", max_num_seqs=2, num_speculative_tokens=drafter.block_size - 1)
            assert_modules_agree(llm, target, drafter, prompts[0])
            outputs = llm.generate([prompt(*tokens) for tokens in prompts], greedy(MAX_TOKENS))
        for output, completion in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == completion.tokens
            found = output.metrics.acceptance_lengths
            assert found[:-1] == completion.acceptance_lengths[:-1]
            assert len(found) == len(completion.acceptance_lengths)

    agree()


def test_random_pairs_accept_some_drafts_and_not_others():
    """Or their acceptance lengths would be no test."""
    lengths = []
    for attends in ATTENDS:

        @over_random_cases(attends, 5 if RUNS_LONG else 3)
        def collect(case):
            with written(case) as (*_, completions):
                lengths.extend(length for completion in completions for length in completion.acceptance_lengths)

        collect()
    assert len(set(lengths)) > 6
    assert 1.2 < np.mean(lengths) < 6
