"""Hybrids against transformers' own models, live, over random small configurations (`make parity`)."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from scripts.make_parity_vectors import outputs, random_ids
from scripts.parity_cases import conditional
from tests.hybrid_replay import EVENTS, Replay
from tests.parity.models import build, optional, rope_fields
from tests.parity_check import TOLERANCE, Target, check, error, whole

pytestmark = pytest.mark.parity

LAYER_KINDS = ("linear_attention", "linear_attention", "full_attention")
LENGTHS = (1, 2, 3, 21, 63, 64, 65, 127, 128, 129)  # shorter than a convolution; around chunks of 64 tokens
MAX_POSITIONS = 256


@st.composite
def layer_fields(draw):
    """Kinds of layers, listed or by their interval."""
    count = draw(st.integers(1, 5))
    fields = {"num_hidden_layers": count}
    if draw(st.booleans()):
        return fields | optional(draw, "full_attention_interval", st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(LAYER_KINDS), min_size=count, max_size=count))
    return fields | {"layer_types": kinds} | optional(draw, "full_attention_interval", st.integers(1, 5))


@st.composite
def partial_rope_fields(draw):
    """The rope part of a hybrid's config.json; the share of rotated dimensions inside of it, beside it, or both."""
    fields, shares = draw(rope_fields()), st.sampled_from((0.25, 0.5, 0.75, 1.0))
    fields |= optional(draw, "partial_rotary_factor", shares)
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    if fields[name]:
        fields[name] |= optional(draw, "partial_rotary_factor", shares)
        if draw(st.booleans()):
            section = draw(st.sampled_from(([2, 1, 1], [11, 11, 10])))
            fields[name] |= {"mrope_section": section, "mrope_interleaved": True}
    return fields


@st.composite
def configs(draw):
    """A config.json of a small Qwen3.5, as published or of its language model alone."""
    kv_heads, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": draw(st.sampled_from((9, 16, 24))),
        "intermediate_size": draw(st.integers(3, 50)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from((8, 16, 32))),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 4)),
        # Heads of fewer channels are often close to zero, where norms of them magnify the last bits.
        "linear_key_head_dim": draw(st.sampled_from((7, 8, 16))),
        "linear_value_head_dim": draw(st.sampled_from((6, 8, 16))),
        "vocab_size": draw(st.integers(20, 90)),
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
    }
    text |= optional(draw, "linear_conv_kernel_dim", st.sampled_from((1, 2, 3, 6)))
    text |= optional(draw, "attention_bias", st.booleans())
    text |= optional(draw, "attn_output_gate", st.just(True))
    text |= optional(draw, "output_gate_type", st.sampled_from(("swish", "silu", "sigmoid")))
    text |= optional(draw, "tie_word_embeddings", st.booleans())
    text |= draw(layer_fields()) | draw(partial_rope_fields())
    if draw(st.booleans()):
        return {"architectures": ["Qwen3_5ForCausalLM"]} | text
    return conditional(text, **optional(draw, "tie_word_embeddings", st.booleans()))


@given(
    raw=configs(),
    lengths=st.sets(st.sampled_from(LENGTHS), min_size=2, max_size=3),
    seed=st.integers(0, 2**32 - 2),
    saved_by_transformers=st.booleans(),
    sharded=st.booleans(),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_hybrid_equals_transformers(raw, lengths, seed, saved_by_transformers, sharded):
    event(f"{raw['architectures'][0]}, {'saved by transformers' if saved_by_transformers else 'written by hand'}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(folder, raw, seed, saved_by_transformers=saved_by_transformers, sharded=sharded)
        target = Target(folder)
    for length in sorted(lengths):
        event(f"{length} tokens")
        input_ids = random_ids(raw.get("text_config", raw)["vocab_size"], seed, (2, length))
        compare(model, target, input_ids, Replay(target, input_ids, seed), json.dumps(raw))


def compare(model, target, input_ids, replay, what):
    """Compare logits and hidden states of all layers, in one call and replayed through the caches of the engine."""
    reference = target.captured({"input_ids": input_ids, **outputs(model, input_ids)})
    with torch.no_grad():
        theirs = model(torch.from_numpy(input_ids).long(), use_cache=False, output_hidden_states=True).hidden_states
    for ours, hidden in zip(reference["hidden_states"], theirs[1:], strict=True):
        assert error(ours, hidden.numpy()) <= TOLERANCE
    assert np.isfinite(reference["logits"]).all()
    check(whole(target, input_ids), reference, f"{input_ids.shape[1]} tokens in one call, {what}")
    check(replay.run(), reference, f"{input_ids.shape[1]} tokens through the caches of the engine, {what}")
    for name in EVENTS:
        if replay.events[name]:
            event(name)
