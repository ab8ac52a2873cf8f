"""Targets against transformers' own models, live, over random small configurations (`make parity`)."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.make_parity_vectors import load_model, outputs, random_ids, random_weights, write_model
from tests.parity_check import TOLERANCE, Target, check, chunked, error, whole

pytestmark = pytest.mark.parity

LAYER_KINDS = ("full_attention", "sliding_attention")
MAX_POSITIONS = 256


def optional(draw, name, strategy):
    """A field that may be absent."""
    return {name: draw(strategy)} if draw(st.booleans()) else {}


@st.composite
def rope_fields(draw):
    """The rope part of a config.json, in either spelling."""
    kind = draw(st.sampled_from(("default", "linear", "yarn", "yarn", "llama3")))
    scaling = {"rope_type": kind}
    outer = {}
    if kind != "default":
        scaling["factor"] = draw(st.sampled_from((1.0, 1.5, 4, 8.0)))
    if kind in ("yarn", "llama3"):
        scaling |= optional(draw, "original_max_position_embeddings", st.sampled_from((32, 64, 128)))
        outer |= optional(draw, "original_max_position_embeddings", st.sampled_from((48, 96)))
    if kind == "llama3":
        low = draw(st.sampled_from((1.0, 2.0)))
        scaling |= {"low_freq_factor": low, "high_freq_factor": low * draw(st.sampled_from((2.0, 4.0)))}
    if kind == "yarn":
        scaling["factor"] = draw(st.sampled_from((scaling["factor"], None)))
        scaling |= optional(draw, "attention_factor", st.sampled_from((0.8, 1.25)))
        scaling |= optional(draw, "mscale", st.sampled_from((0.7, 1.0)))
        scaling |= optional(draw, "mscale_all_dim", st.sampled_from((0.5, 1.0)))
        scaling |= optional(draw, "truncate", st.booleans())
        scaling |= optional(draw, "beta_fast", st.sampled_from((8, 32.0)))
        scaling |= optional(draw, "beta_slow", st.sampled_from((0.5, 1)))
    theta = optional(draw, "rope_theta", st.sampled_from((100.0, 10_000.0, 1_000_000)))
    if draw(st.booleans()):
        return outer | {"rope_parameters": scaling | theta}
    if draw(st.booleans()):
        scaling["type"] = scaling.pop("rope_type")
    return outer | theta | {"rope_scaling": None if kind == "default" else scaling}


@st.composite
def window_fields(draw, num_layers):
    """The window part of a Qwen3 config.json."""
    if draw(st.booleans()):
        return optional(draw, "sliding_window", st.just(4)) | optional(draw, "use_sliding_window", st.just(False))
    found = {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 9))}
    if draw(st.booleans()):
        kinds = st.lists(st.sampled_from(LAYER_KINDS), min_size=num_layers, max_size=num_layers)
        found["layer_types"] = draw(kinds)
    return found | optional(draw, "max_window_layers", st.integers(0, num_layers))


@st.composite
def configs(draw):
    """A config.json of a small Qwen3 or Llama model."""
    architecture = draw(st.sampled_from(("Qwen3ForCausalLM", "LlamaForCausalLM")))
    qwen3 = architecture.startswith("Qwen3")
    num_layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    raw = {
        "architectures": [architecture],
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": heads * draw(st.sampled_from((4, 8, 10))),
        "intermediate_size": draw(st.integers(3, 50)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": None if kv_heads == heads and draw(st.booleans()) else kv_heads,
        "vocab_size": draw(st.integers(20, 90)),
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
    }
    head_dim = st.sampled_from((8, 10, 16, 32))
    raw |= {"head_dim": draw(head_dim)} if qwen3 else optional(draw, "head_dim", head_dim)
    raw |= optional(draw, "tie_word_embeddings", st.booleans())
    raw |= optional(draw, "attention_bias", st.booleans())
    raw |= optional(draw, "mlp_bias", st.booleans())
    raw |= draw(rope_fields())
    return raw | (draw(window_fields(num_layers)) if qwen3 else optional(draw, "sliding_window", st.just(4)))


def build(folder, raw, seed, *, saved_by_transformers, sharded):
    """Write the model to a folder, by hand or with `save_pretrained`, and give the model of transformers."""
    if not saved_by_transformers:
        write_model(folder, raw, seed, dtype=torch.float32, sharded=sharded)
        return load_model(folder)
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, surplus = model.load_state_dict(random_weights(config, seed, torch.float32), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not surplus
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
    return model.eval()


@given(raw=configs(), seed=st.integers(0, 2**32 - 2), saved_by_transformers=st.booleans(), sharded=st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_target_equals_transformers(raw, seed, saved_by_transformers, sharded):
    event(f"{raw['model_type']}, {'saved by transformers' if saved_by_transformers else 'written by hand'}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(folder, raw, seed, saved_by_transformers=saved_by_transformers, sharded=sharded)
        input_ids = random_ids(raw["vocab_size"], seed, (2, 17))
        reference = {"input_ids": input_ids, **outputs(model, input_ids)}
        target = Target(folder)
        with torch.no_grad():
            theirs = model(torch.from_numpy(input_ids).long(), use_cache=False, output_hidden_states=True).hidden_states
    reference = target.captured(reference)
    for ours, hidden in zip(reference["hidden_states"], theirs[1:], strict=True):
        assert error(ours, hidden.numpy()) <= TOLERANCE
    assert np.isfinite(reference["logits"]).all()
    check(whole(target, input_ids), reference, f"in one call, {json.dumps(raw)}")
    check(chunked(target, input_ids), reference, f"through the cache, {json.dumps(raw)}")
