"""A prefill leaves out what nobody asks of the last layer; what it gives is what the whole model gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.device.shapes import Load
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import target_config
from tests.pairs import TARGET, TWO_LAYERS, empty_cache, prompt, write_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (1, 9)))
PADDED = jnp.array([[3, 4, 5, 6, 7, 8, -1, -1, -1]])  # of a prompt whose first three tokens came before


def model_and_cache(layers: int):
    """A random target, and its cache after three tokens."""
    config = dataclasses.replace(target_config(TARGET | {"num_hidden_layers": layers}), dtype="float32")
    before, positions = TOKENS[:, :3], jnp.arange(3)[None]
    module = TargetModel(config)
    params = module.init(jax.random.key(1), before, positions, empty_cache(config, 16))["params"]
    model = module.bind({"params": jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)})
    return model, model(before, positions, empty_cache(config, 16))[2]


@pytest.mark.parametrize(("layers", "taps"), [(5, (1, 3)), (5, (1, 4)), (5, ()), (1, ()), (1, (0,)), (2, (0,))])
def test_a_prefill_gives_what_the_whole_model_gives(layers, taps):
    model, cache = model_and_cache(layers)
    hidden, features, after = model(TOKENS, PADDED, cache, taps)
    last, tapped, before, stored = model.prefill(TOKENS, PADDED, cache, taps)
    real = np.asarray(PADDED >= 0)[0]
    for found, expected in ((last, hidden[:, 5:6]), (tapped[:, real], features[:, real])):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(jax.tree.leaves(stored), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    finished = model.finish(before, PADDED, stored)
    np.testing.assert_allclose(finished[:, real], hidden[:, real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("chunk", "devices"), [(64, 1), (7, 1), (70, 2)])  # 70: more than are scored at a time
def test_logprobs_of_a_prompt_are_the_whole_model_s(tmp_path, chunk, devices):
    folder = write_model(tmp_path, TWO_LAYERS, seed=0)
    sizes = {"max_num_batched_tokens": chunk, "max_num_seqs": 4, "tensor_parallel_size": devices}
    llm = LLM(folder, dtype="float32", **sizes)
    ids = TOKENS[0].tolist() * 5
    load = Load(1, frozenset({len(ids)}), len(ids) + 1, frozenset({"greedy"}), speculates=False, is_scored=True)
    llm.engine.compile(load)  # else a chunk whose program cannot be compiled is avoided
    output = llm.generate(prompt(*ids), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    target = llm.engine.target
    model = TargetModel(target.config).bind({"params": target.params})
    tokens = jnp.array([ids])
    hidden, _, _ = model(tokens, jnp.arange(len(ids))[None], empty_cache(target.config, len(ids)))
    logprobs = jax.nn.log_softmax(model.logits(hidden)[0], axis=-1)
    found = [entries[token].logprob for entries, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    np.testing.assert_allclose(found, logprobs[np.arange(len(ids) - 1), ids[1:]], rtol=1e-4, atol=1e-4)
