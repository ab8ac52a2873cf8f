"""What the live comparisons have in common: fields of random configurations, and models of transformers."""

import torch
from hypothesis import strategies as st
from transformers import AutoConfig

from scripts.make_parity_vectors import auto_class, load_model, random_weights, ready, write_model


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


def build(folder, raw, seed, *, saved_by_transformers, sharded):
    """Write the model to a folder, by hand or with `save_pretrained`, and give the model of transformers."""
    if not saved_by_transformers:
        write_model(folder, raw, seed, dtype=torch.float32, sharded=sharded)
        return load_model(folder)
    config = AutoConfig.for_model(**raw)
    model = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, surplus = model.load_state_dict(random_weights(config, seed, torch.float32), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not surplus
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
    return ready(model)
