"""Targets against transformers' own models, live, over random small configurations (`make parity`)."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from scripts.make_parity_vectors import outputs, random_ids
from tests.parity.models import build, optional, rope_fields
from tests.parity_check import TOLERANCE, Target, check, chunked, error, whole

pytestmark = pytest.mark.parity

LAYER_KINDS = ("full_attention", "sliding_attention")
MAX_POSITIONS = 256


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
