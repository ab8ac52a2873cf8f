"""Gated DeltaNet in training: outputs and gradients are those of the recurrence, token by token."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.spec import GatedDelta
from dflash_jax.train.gated_delta import recur_sequences, unit_inverse
from pallas_kernels.gated_delta import CHUNK, Weights, reference

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=32, conv_width=4)
B, T, SHORTER = 2, 2 * CHUNK + 9, CHUNK + 1


def operands():
    """Inputs, gates and weights, with decays from a hundredth to a large share."""
    keys = jax.random.split(jax.random.key(0), 5)
    channels, heads = DELTA.channels_per_key, DELTA.value_heads
    weights = Weights(
        jax.random.normal(keys[0], (DELTA.key_heads, channels, DELTA.conv_width)) / 2,
        jnp.log(jax.random.uniform(keys[1], (heads,), minval=0.01, maxval=8)),
        jax.random.normal(keys[2], (heads,)) - 3,
    )
    inputs = jax.random.normal(keys[3], (B, T, DELTA.key_heads, channels))
    return inputs, jax.random.normal(keys[4], (B, T, heads, 2)) * 2, weights


def positions():
    """The second sequence is shorter, and padding follows it."""
    return jnp.where(jnp.arange(T) < jnp.array([T, SHORTER])[:, None], jnp.arange(T), -1)


def token_by_token(inputs, gates, weights):
    """The recurrence of `reference.advance` in a loop that can be differentiated."""
    is_token = positions() >= 0
    window = jnp.pad(inputs, ((0, 0), (DELTA.conv_width - 1, 0), (0, 0), (0, 0)))
    heads = reference.split_heads(reference.convolve(window, weights.conv), DELTA.key_dim, DELTA.value_dim)
    rows = (*heads, *reference.decay_and_strength(gates, weights, is_token[..., None]))

    def step(state, row):
        output, state = reference.advance(state, *(x[:, None] for x in row))
        return state, output[:, 0]

    state = jnp.zeros((B, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim))
    _, outputs = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in rows))
    return jnp.moveaxis(outputs, 0, 1)


def test_outputs_and_gradients_are_those_of_the_recurrence():
    cotangent = jnp.where((positions() >= 0)[..., None, None], jnp.cos(jnp.arange(DELTA.value_dim)), 0.0)

    def value(run):
        def loss(arguments):
            outputs = run(*arguments)
            return (outputs * cotangent).sum(), outputs

        return jax.jit(jax.grad(loss, has_aux=True))(operands())

    gradients, outputs = value(lambda *arguments: recur_sequences(*arguments, positions(), DELTA))
    wanted, expected = value(token_by_token)
    seen = (positions() >= 0)[..., None, None]
    assert jnp.abs(jnp.where(seen, outputs - expected, 0)).max() < 1e-5 * jnp.abs(expected).max()
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert jnp.abs(got - want).max() < 1e-4 * jnp.abs(want).max()


def test_padding_changes_neither_outputs_nor_gradients():
    inputs, gates, weights = operands()
    poison = jnp.where((positions() >= 0)[..., None, None], 0, jnp.nan)

    def loss(arguments):
        outputs = recur_sequences(*arguments, positions(), DELTA)
        return jnp.square(outputs[1, :SHORTER]).sum()

    run = jax.jit(jax.value_and_grad(loss))
    clean, spoilt = run((inputs, gates, weights)), run((inputs + poison, gates + poison, weights))
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(spoilt), strict=True):
        assert jnp.array_equal(one, other)


@pytest.mark.parametrize("rows", [16, CHUNK])
def test_the_inverse_of_repeated_keys(rows):
    """All keys alike: powers of the whole triangle would have terms of 1e18."""
    strict = jnp.tril(jnp.ones((rows, rows)), -1)
    assert jnp.abs(unit_inverse(strict) @ (strict + jnp.eye(rows)) - jnp.eye(rows)).max() < 1e-5
