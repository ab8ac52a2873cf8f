"""Mixtures of experts against transformers' own models, live, over random small configurations (`make parity`)."""

import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from scripts.make_parity_vectors import random_ids
from tests.hybrid_replay import Replay
from tests.parity.models import build, optional, rope_fields
from tests.parity.test_live_hybrid import compare, layer_fields, partial_rope_fields
from tests.parity.test_live_hybrid import pytestmark as pytestmark
from tests.parity_check import Target

LENGTHS = (1, 3, 17, 65)
HYBRIDS = {"Qwen3NextForCausalLM": "qwen3_next", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"}


@st.composite
def expert_fields(draw, architecture, num_layers):
    """4 to 64 experts, 1 to 8 a token; a shared one and layers without any where the architecture has such."""
    count = draw(st.sampled_from((4, 7, 16, 64)))
    fields = {
        "num_experts": count,
        "num_experts_per_tok": draw(st.integers(1, min(count, 8))),
        "moe_intermediate_size": draw(st.integers(3, 20)),
    }
    if architecture != "Qwen3MoeForCausalLM":
        fields["shared_expert_intermediate_size"] = draw(st.integers(3, 20))
    if architecture != "Qwen3_5MoeForCausalLM":
        fields |= {"intermediate_size": draw(st.integers(3, 50))} | optional(draw, "norm_topk_prob", st.booleans())
        layers = st.lists(st.integers(0, num_layers - 1), max_size=2, unique=True)
        fields |= optional(draw, "mlp_only_layers", layers)
        fields |= optional(draw, "decoder_sparse_step", st.integers(1, 3))
    return fields


@st.composite
def configs(draw):
    """A config.json of a small model with experts."""
    architecture = draw(st.sampled_from(("Qwen3MoeForCausalLM", *HYBRIDS)))
    kv_heads, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    raw = {
        "architectures": [architecture],
        "hidden_size": draw(st.sampled_from((9, 16, 24))),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from((8, 16, 32))),
        "vocab_size": draw(st.integers(20, 90)),
        "max_position_embeddings": 256,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
    } | optional(draw, "tie_word_embeddings", st.booleans())
    if architecture in HYBRIDS:
        raw |= {
            "model_type": HYBRIDS[architecture],
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draw(st.integers(1, 4)),
            "linear_key_head_dim": draw(st.sampled_from((7, 8, 16))),
            "linear_value_head_dim": draw(st.sampled_from((6, 8, 16))),
        }
        raw |= draw(layer_fields()) | draw(partial_rope_fields())
    else:
        raw |= {"model_type": "qwen3_moe", "num_hidden_layers": draw(st.integers(1, 4))} | draw(rope_fields())
        raw |= draw(st.sampled_from(({}, {"sliding_window": 4}, {"sliding_window": 4, "use_sliding_window": True})))
    return raw | draw(expert_fields(architecture, raw["num_hidden_layers"]))


@given(
    raw=configs(),
    length=st.sampled_from(LENGTHS),
    seed=st.integers(0, 2**32 - 2),
    saved_by_transformers=st.booleans(),
    sharded=st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_experts_equal_transformers(raw, length, seed, saved_by_transformers, sharded):
    event(f"{raw['architectures'][0]}, {'saved by transformers' if saved_by_transformers else 'written by hand'}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(folder, raw, seed, saved_by_transformers=saved_by_transformers, sharded=sharded)
        target = Target(folder)
    input_ids = random_ids(raw["vocab_size"], seed, (2, length))
    compare(model, target, input_ids, Replay(target, input_ids, seed), json.dumps(raw))
