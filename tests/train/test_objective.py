"""Packed blocks against each block alone, features against serving, and weights of positions."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import draft_config, target_config
from dflash_jax.train import objective
from dflash_jax.train.cache import SequenceCache
from dflash_jax.train.objective import (
    Batch,
    block_loss,
    block_tokens,
    dpace_weights,
    draft_hidden,
    target_features,
    token_losses,
)
from dflash_jax.train.state import _random_params
from dflash_jax.weights.formats.weight import logits_of
from tests.dense_kv import DenseKVCache

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "dtype": "float32",
}
T, G, W = 40, 6, 9
LAYER_TYPES = {
    "full": ["full_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
    "mixed": ["sliding_attention", "full_attention"],
}


def draft_of(layers: str, **extra):
    return draft_config(
        {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 2,
            "layer_types": LAYER_TYPES[layers],
            "use_sliding_window": True,
            "sliding_window": W,
            "block_size": G,
            "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 1},
            **DECODER,
            **extra,
        }
    )


@pytest.fixture(scope="module")
def target():
    config = target_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            **DECODER,
        }
    )
    ids = jnp.zeros((1, 4), jnp.int32)
    params = TargetModel(config).init(jax.random.key(0), ids, ids, SequenceCache())["params"]
    return config, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def params_of(config, seed=1):
    params = _random_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, 64, (2, T), dtype=np.int32)
    # Neighbours, one inside another's block, the first position, one that runs over the end, and none.
    anchors = np.array([[0, 3, 4, 20, 37], [5, 11, 30, 31, -1]], np.int32)
    return Batch(jnp.asarray(tokens), jnp.array([T, 34], jnp.int32), jnp.asarray(anchors))


@partial(jax.jit, static_argnums=(1, 2))
def _features(params, config, taps, tokens):
    return target_features(params, config, taps, tokens)


def features_of(target, config, tokens):
    return _features(target[1], target[0], config.target_layer_ids, tokens)


def empty(config, rows, slots):
    shape = (rows, slots, config.num_key_value_heads, config.head_dim)
    return DenseKVCache.zeros(config.num_hidden_layers, shape, jnp.float32)


@partial(jax.jit, static_argnums=1)
def alone(params, config, features, block, anchor):
    """Hidden states of one block of one sequence, drafted as in serving: with a cache cut at the anchor."""
    model = DraftModel(config).bind({"params": params})
    positions = jnp.arange(features.shape[0])[None]
    context = jnp.where(positions < anchor, positions, -1)
    cache = model.write_context(features[None], context, empty(config, 1, T + G))
    hidden, _ = model(block[None], anchor + jnp.arange(G)[None], cache)
    return hidden[0]


USUAL = (("mixed", {}), ("mixed", {"sliding_window_non_causal": True}))


@pytest.mark.parametrize(
    ("layers", "extra"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case in USUAL else pytest.mark.long)
        for case in itertools.product(LAYER_TYPES, ({}, {"sliding_window_non_causal": True}, {"is_causal": True}))
    ],
)
def test_packed_blocks_are_what_each_is_alone(target, layers, extra):
    config = draft_of(layers, **extra)
    params, batch = params_of(config), batch_of()
    features = features_of(target, config, batch.tokens)
    anchors = jnp.maximum(batch.anchors, 0)
    block = jax.random.normal(jax.random.key(2), (*anchors.shape, G, config.hidden_size))
    cotangent = jax.random.normal(jax.random.key(3), block.shape)

    def packed(params, features, block):
        return draft_hidden(params, config, features, block, anchors)

    def one_by_one(params, features, block):
        def of_sequence(sequence):
            features, block, anchors = sequence
            return jax.lax.map(lambda of_block: alone(params, config, features, *of_block), (block, anchors))

        return jax.lax.map(of_sequence, (features, block, anchors))

    @partial(jax.jit, static_argnums=0)
    def with_gradients(function, *args):
        computed, pull = jax.vjp(function, *args)
        return computed, pull(cotangent)

    computed, gradients = with_gradients(packed, params, features, block)
    expected, true_gradients = with_gradients(one_by_one, params, features, block)
    np.testing.assert_allclose(computed, expected, rtol=2e-4, atol=2e-5)
    for mine, true in zip(jax.tree.leaves(gradients), jax.tree.leaves(true_gradients), strict=True):
        np.testing.assert_allclose(mine, true, rtol=2e-3, atol=2e-4 * float(jnp.abs(true).max()))


def test_features_of_the_last_layer_are_the_final_hidden_states(target):
    config, params = target
    tokens, positions = batch_of().tokens, jnp.broadcast_to(jnp.arange(T), (2, T))
    hidden, _, _ = TargetModel(config).bind({"params": params})(tokens, positions, empty(config, 2, T))
    features = _features(params, config, (2, 0), tokens)
    np.testing.assert_allclose(features[..., : config.hidden_size], hidden, rtol=1e-4, atol=1e-5)


def test_features_are_those_of_serving(target):
    config, params = target
    tokens = batch_of().tokens
    computed = _features(params, config, (0, 2), tokens)
    model, cache = TargetModel(config).bind({"params": params}), empty(config, 2, T)
    pieces = []
    for start in range(0, T, 8):  # in chunks, as prompts are processed
        positions = jnp.broadcast_to(jnp.arange(start, start + 8), (2, 8))
        _, features, cache = model(tokens[:, start : start + 8], positions, cache, (0, 2))
        pieces.append(features)
    np.testing.assert_allclose(computed, jnp.concatenate(pieces, axis=1), rtol=1e-4, atol=1e-5)


def loss_of(params, batch, target, config, loss="decay"):
    @jax.jit
    def jitted(params, batch, embedding, target_params):
        features = target_features(target_params, target[0], config.target_layer_ids, batch.tokens)
        options = {"config": config, "loss": loss, "gamma": 7.0, "alpha": 0.5}
        return block_loss(params, batch, features, embedding, embedding, **options)

    return jitted(params, batch, target[1]["embed_tokens"], target[1])


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_loss_and_measures_are_those_of_a_plain_loop(target, loss, monkeypatch):
    monkeypatch.setattr(objective, "LOGITS_AT_ONCE", 64 * (G - 1) * 2)  # one block of each sequence at a time
    config = draft_of("mixed")
    params, batch = params_of(config), batch_of()
    value, measured = loss_of(params, batch, target, config, loss=loss)
    features = features_of(target, config, batch.tokens)
    embedding = target[1]["embed_tokens"]
    total = weight_sum = 0.0
    right_at, seen_at, accepted = np.zeros(G - 1), np.zeros(G - 1), []
    for b, a in ((b, a) for b in range(2) for a in range(5) if batch.anchors[b, a] >= 0):
        anchor = int(batch.anchors[b, a])
        ids = np.full(G, 1)
        ids[0] = batch.tokens[b, anchor]
        hidden = alone(params, config, features[b], embedding[ids], anchor)
        logits = logits_of(hidden[None, 1:], embedding)[0]
        labels = batch.tokens[b, anchor + 1 : min(anchor + G, int(batch.lengths[b]))]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[: len(labels)], labels)
        confidence = np.cumprod(0.5 * np.exp(-np.asarray(losses)) + 0.5)
        decay, dpace = np.exp(-np.arange(len(labels)) / 7), [confidence[j:].sum() for j in range(len(labels))]
        weights = decay if loss == "decay" else dpace
        total, weight_sum = total + float(losses @ np.asarray(weights)), weight_sum + float(np.sum(weights))
        right = np.asarray(logits.argmax(-1))[: len(labels)] == labels
        right_at[: len(labels)] += right
        seen_at[: len(labels)] += 1
        accepted.append(np.cumprod(right).sum())
    np.testing.assert_allclose(value, total / weight_sum, rtol=1e-4)
    np.testing.assert_allclose(measured.accuracy, right_at / seen_at, rtol=1e-6)
    np.testing.assert_allclose(measured.acceptance_length, 1 + np.mean(accepted), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-7)])
def test_losses_and_their_gradients_are_those_of_all_logits(dtype, tolerance):
    hidden, head = (jax.random.normal(jax.random.key(n), (2, n, 32)) for n in (5, 64))
    hidden, head = hidden.astype(dtype), head[0].astype(dtype)
    labels = jnp.array([[3, 0, 63, 9, 9], [1, 2, 4, 8, 16]]).at[0, 1].set(logits_of(hidden, head)[0, 1].argmax())
    weights = jax.random.uniform(jax.random.key(1), labels.shape)

    def all_logits(hidden, head):
        logits = logits_of(hidden, head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits.argmax(-1) == labels

    def total(losses_of, hidden, head):
        return (losses_of(hidden, head)[0] * weights).sum()

    losses, right = token_losses(hidden, labels, head)
    np.testing.assert_allclose(losses, all_logits(hidden, head)[0], rtol=1e-5)
    np.testing.assert_array_equal(right, all_logits(hidden, head)[1])
    slopes, of_head = jax.grad(partial(total, lambda h, w: token_losses(h, labels, w)), (0, 1))(hidden, head)
    expected = jax.grad(partial(total, all_logits))(hidden, head).astype(jnp.float32)
    np.testing.assert_allclose(slopes.astype(jnp.float32), expected, atol=tolerance * float(jnp.abs(expected).max()))
    assert slopes.dtype == hidden.dtype
    assert not of_head.any()


def test_nothing_beyond_an_anchor_tells_what_comes(target):
    """Tokens behind the anchor are labels only: if they changed hidden states, training would look ahead."""
    config = draft_of("mixed")
    params, batch = params_of(config), batch_of()
    anchors = jnp.array([[12], [12]], jnp.int32)
    other = batch.tokens.at[:, 13:].set((batch.tokens[:, 13:] + 7) % 62 + 2)

    @jax.jit
    def hidden(tokens):
        labels, _ = block_tokens(Batch(tokens, batch.lengths, anchors), G)
        block = target[1]["embed_tokens"][jnp.where(jnp.arange(G) == 0, labels, 1)]
        features = target_features(target[1], target[0], config.target_layer_ids, tokens)
        return draft_hidden(params, config, features, block, anchors)

    np.testing.assert_array_equal(hidden(batch.tokens), hidden(other))


def test_confidence_weighs_what_limits_acceptance():
    inside = jnp.array([[True, True, True, False]])
    weights = dpace_weights(jnp.log(jnp.array([[0.8, 0.4, 0.2, 0.9]])), inside, 0.5)
    reached = np.cumprod([0.9, 0.7, 0.6])
    np.testing.assert_allclose(weights[0], [reached.sum(), reached[1:].sum(), reached[2], 0.0], rtol=1e-6)
    gradient = jax.grad(lambda x: dpace_weights(x, inside, 0.5).sum())(jnp.zeros((1, 4)))
    assert not gradient.any()


def test_frozen_parts_get_no_gradient_and_empty_blocks_no_weight(target):
    config = draft_of("full")
    params, batch = params_of(config), batch_of()
    value, _ = loss_of(params, batch, target, config)
    longer = batch._replace(anchors=jnp.concatenate([batch.anchors, jnp.full((2, 3), -1, jnp.int32)], axis=1))
    np.testing.assert_allclose(loss_of(params, longer, target, config)[0], value, rtol=1e-6)
    frozen = jax.grad(partial(lambda p: loss_of(params, batch, (target[0], p), config)[0]))(target[1])
    assert not any(jnp.any(x) for x in jax.tree.leaves(frozen["layers_0"]))
