"""Penalties, biases, allowed tokens and min_tokens against their definitions, row by row of a block."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.device.controls import bits_of, count_emitted, process, unpack_bits
from dflash_jax.engine.device.slots import Controls
from dflash_jax.engine.host.inputs import SamplerRows
from tests.test_sampling import sampler
from tests.test_scheduler import sequence_of

VOCABULARY = 40  # more than a word of bits


def by_definition(logits, prompt, output, *, presence, frequency, repetition, bias, allowed, stops, min_tokens):
    """vLLM's formulas, token by token."""
    logits = logits + bias
    for token in range(len(logits)):
        if token not in allowed or (len(output) < min_tokens and token in stops):
            logits[token] = -np.inf
            continue
        if token in prompt or token in output:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * output.count(token)
        logits[token] -= presence * (token in output)
    return logits


def marked(tokens):
    row = np.zeros(VOCABULARY, bool)
    row[list(tokens)] = True
    return row


def bits(tokens):
    return bits_of(tokens, -(-VOCABULARY // 32))


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    prompt=tokens,
    output=tokens,
    drafts=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=2),
    presence=st.sampled_from([0.0, 0.7, -1.5]),
    frequency=st.sampled_from([0.0, 0.3, -0.9]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    min_tokens=st.integers(0, 9),
    has_bias=st.booleans(),
)
def test_rows_of_a_block_against_the_definition(
    seed, prompt, output, drafts, presence, frequency, repetition, min_tokens, has_bias
):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, 3, VOCABULARY)).astype(np.float32) * 3
    bias = rng.normal(size=VOCABULARY).astype(np.float32)
    stops = {1, 5}
    allowed = [set(rng.choice(VOCABULARY, 30, replace=False).tolist()) | {7} for _ in range(3)]
    params = sampler()
    params = type(params)(
        **vars(params)
        | {
            "presence_penalty": jnp.array([presence]),
            "frequency_penalty": jnp.array([frequency]),
            "repetition_penalty": jnp.array([repetition]),
            "min_tokens": jnp.array([min_tokens]),
            "has_bias": jnp.array([has_bias]),
        }
    )
    controls = Controls(
        counts=jnp.array([np.bincount(output, minlength=VOCABULARY)], jnp.int32),
        prompted=jnp.array([marked(prompt)]),
        stops=jnp.array([marked(stops)]),
        bias=jnp.array([bias]),
    )
    found = process(
        jnp.array(logits),
        jnp.array([drafts]),
        jnp.array([len(output)]),
        params,
        controls,
        jnp.array([[bits(a) for a in allowed]]),
    )
    for row in range(3):
        wanted = by_definition(
            logits[0, row].copy(),
            prompt,
            output + drafts[:row],
            presence=presence,
            frequency=frequency,
            repetition=repetition,
            bias=bias if has_bias else 0,
            allowed=allowed[row],
            stops=stops,
            min_tokens=min_tokens,
        )
        np.testing.assert_allclose(found[0, row], wanted, rtol=1e-5, atol=1e-5)


def test_min_tokens_yields_where_nothing_else_is_allowed():
    """A grammar that has come to its end must be able to end."""
    params = type(sampler())(**vars(sampler()) | {"min_tokens": jnp.array([9])})
    controls = Controls(
        counts=jnp.zeros((1, VOCABULARY), jnp.int32),
        prompted=jnp.zeros((1, VOCABULARY), bool),
        stops=jnp.array([marked({5})]),
        bias=jnp.zeros((1, VOCABULARY)),
    )
    arguments = (jnp.zeros((1, 1, VOCABULARY)), jnp.zeros((1, 0), jnp.int32), jnp.array([0]), params, controls)
    only_stop = process(*arguments, jnp.array([[bits({5})]]))
    assert np.flatnonzero(np.isfinite(only_stop[0, 0])).tolist() == [5]
    also_another = process(*arguments, jnp.array([[bits({5, 6})]]))
    assert np.flatnonzero(np.isfinite(also_another[0, 0])).tolist() == [6]


def test_emitted_tokens_are_counted_where_they_belong():
    controls = Controls(
        counts=jnp.zeros((3, VOCABULARY), jnp.int32),
        prompted=jnp.zeros((3, VOCABULARY), bool),
        stops=jnp.zeros((3, VOCABULARY), bool),
        bias=jnp.zeros((3, VOCABULARY)),
    )
    taken = jnp.array([[True, True, True, False], [True, False, False, False], [True, True, True, True]])
    emitted = jnp.array([[4, 4, 9, 9], [2, 3, 3, 3], [1, 1, 1, 1]])
    counts = np.asarray(count_emitted(controls, jnp.array([2, 0, 3]), emitted, taken).counts)  # slot 3 does not exist
    assert {(int(s), int(t)): int(counts[s, t]) for s, t in np.argwhere(counts)} == {(2, 4): 2, (2, 9): 1, (0, 2): 1}


@pytest.mark.parametrize("size", [1, 32, 33, 64, 70])
def test_bits(size):
    chosen = np.random.default_rng(size).random(size) < 0.5
    words = bits_of(np.flatnonzero(chosen).tolist(), -(-size // 32))
    assert [bool(words[v // 32] >> np.uint32(v % 32) & 1) for v in range(size)] == chosen.tolist()
    np.testing.assert_array_equal(unpack_bits(jnp.array([words]), size)[0], chosen)


@pytest.mark.parametrize(("asked", "used"), [(1e-46, 1e-6), (1.3, 1.3), (1e39, 1e6)])
def test_penalties_stay_within_float32(asked, used):
    """As float32 1e-46 is 0, and a token that is not allowed, at minus infinity, times 0 is no number."""
    rows = SamplerRows(1, VOCABULARY)
    rows.put(0, sequence_of(1, repetition_penalty=asked))
    assert rows.rows.repetition_penalty[0] == np.float32(used)
