"""Sequences side by side, a token a step, get the tokens that the likeliest of whole sequences are."""

import batch_responses
import jax
import jax.numpy as jnp
import numpy as np
from embedded_architectures import HYBRID

from dflash_jax.models.target import TargetModel
from dflash_jax.spec import target_config
from dflash_jax.train.cache import SequenceCache


def test_responses_are_the_likeliest_tokens():
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 64, "hidden_size": 32}
    config = target_config(HYBRID | sizes)
    zeros, length = jnp.zeros((1, 2), jnp.int32), 24
    params = TargetModel(config).init(jax.random.key(0), zeros, zeros, SequenceCache())["params"]
    params = jax.tree.map(lambda p: p * 4 if p.ndim > 1 else p, params)  # makes the tokens differ
    prompts, lengths = jax.random.randint(jax.random.key(1), (3, 9), 1, 64), jnp.array([2, 5, 9])
    tokens = batch_responses.complete(params, prompts, lengths, config=config, length=length)
    model = TargetModel(config).bind({"params": params})
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    hidden, _, _ = model(tokens, positions, SequenceCache())
    likeliest = jnp.argmax(model.logits(hidden), axis=-1)
    for row, n in enumerate(lengths.tolist()):
        assert jnp.array_equal(tokens[row, :n], prompts[row, :n])
        assert jnp.array_equal(tokens[row, n:], likeliest[row, n - 1 : -1])
        assert len(set(tokens[row, n:].tolist())) > 4


def test_prompts_stay_within_a_file():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 64, 6000).astype(np.uint16)
    tokens[::500] = batch_responses.EOS
    is_newline = np.arange(64) == 7
    prompts, lengths = batch_responses.cut_prompts(tokens, is_newline, 50, seed=1)
    text = tokens.tobytes()
    for prompt, n in zip(prompts, lengths, strict=True):
        start = text.index(prompt[:n].tobytes()) // 2
        assert tokens[start - 1] in (batch_responses.EOS, 7)
        assert batch_responses.EOS not in prompt[:n]
    assert batch_responses.LENGTHS[0] <= lengths.min() < lengths.max() <= batch_responses.LENGTHS[1]
