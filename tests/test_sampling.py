"""Sampling: each filter against its definition, and noise that depends on seed and position alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dflash_jax.engine.device.sampling import gumbel, keep_min_p, keep_top_k_top_p, logprobs_of, sample
from dflash_jax.engine.device.slots import Sampler


def sampler(rows=1, *, temperature=1.0, top_p=1.0, top_k=10**6, min_p=0.0, seeds=None):
    def column(value, dtype):
        return jnp.full((rows,), value, dtype)

    seeds = range(rows) if seeds is None else seeds
    return Sampler(
        temperature=column(temperature, jnp.float32),
        top_p=column(top_p, jnp.float32),
        top_k=column(top_k, jnp.int32),
        min_p=column(min_p, jnp.float32),
        key=jnp.array([[0, s] for s in seeds], jnp.uint32),
        presence_penalty=column(0.0, jnp.float32),
        frequency_penalty=column(0.0, jnp.float32),
        repetition_penalty=column(1.0, jnp.float32),
        min_tokens=column(0, jnp.int32),
        has_bias=column(False, bool),
    )


def kept(logits) -> list[int]:
    return np.flatnonzero(np.isfinite(np.asarray(logits).ravel())).tolist()


def top_k_then_top_p(logits: np.ndarray, k: int, p: float) -> list[int]:
    """The definition, token by token."""
    order = np.argsort(-logits)[:k]
    probabilities = np.exp(logits[order] - logits.max())
    probabilities /= probabilities.sum()
    chosen, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if chosen and mass >= p < 1:
            break
        chosen.append(int(token))
        mass += probability
    return sorted(chosen)


@example(seed=0, k=1, p=1.0)
@example(seed=0, k=5, p=1.0)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 12), p=st.floats(0.05, 1.0))
def test_top_k_top_p_against_definition(seed, k, p):
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32) * 2
    ordered = np.sort(np.exp(logits))[::-1][:k]
    assume(np.abs(np.cumsum(ordered) / ordered.sum() - p).min() > 1e-4 or p == 1.0)  # not a matter of rounding
    found = keep_top_k_top_p(jnp.asarray(logits)[None, None], jnp.array([k]), jnp.array([p], jnp.float32))
    assert kept(found) == top_k_then_top_p(logits, k, np.float32(p))


def test_top_p_of_one_keeps_everything():
    logits = jnp.array([[[0.0, -50.0, -90.0]]])
    assert kept(keep_top_k_top_p(logits, jnp.array([3]), jnp.array([1.0]))) == [0, 1, 2]
    assert kept(keep_top_k_top_p(logits, jnp.array([3]), jnp.array([1e-9]))) == [0]


def test_min_p():
    logits = jnp.log(jnp.array([[[0.6, 0.25, 0.1, 0.05]]]))
    assert kept(keep_min_p(logits, jnp.array([0.3]))) == [0, 1]
    assert kept(keep_min_p(logits, jnp.array([0.0]))) == [0, 1, 2, 3]


def test_samples_follow_the_softmax():
    rows = 4000
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = jnp.tile(jnp.log(jnp.asarray(probabilities, jnp.float32)), (rows, 1, 1))
    zeros = jnp.zeros((rows, 1), jnp.int32)
    drawn, _ = sample(logits, zeros, sampler(rows), is_filtered=False)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=4)
    assert chisquare(counts, probabilities * rows).pvalue > 1e-3
    sharper, _ = sample(logits, zeros, sampler(rows, temperature=0.5), is_filtered=False)
    squared = probabilities**2 / (probabilities**2).sum()
    assert chisquare(np.bincount(np.asarray(sharper).ravel(), minlength=4), squared * rows).pvalue > 1e-3


def test_noise_depends_on_seed_and_position_alone():
    keys = jnp.array([[0, 7], [0, 8], [1, 7]], jnp.uint32)
    noise = np.asarray(gumbel(keys, jnp.array([[3, 4], [3, 4], [3, 4]]), 5))
    alone = np.asarray(gumbel(keys[:1], jnp.array([[4]]), 5))
    np.testing.assert_array_equal(noise[0, 1], alone[0, 0])
    rows = noise.reshape(-1, 5)
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_greedy_and_sampled_rows_side_by_side():
    logits = jnp.tile(jnp.array([0.0, 1.0, 0.5]), (300, 1, 1))
    mixed = sampler(300)
    cold = jnp.arange(300) % 2 == 0
    mixed = Sampler(**{**vars(mixed), "temperature": jnp.where(cold, 0.0, 1.0)})
    positions = jnp.zeros((300, 1), jnp.int32)
    drawn = np.asarray(sample(logits, positions, mixed, is_filtered=True)[0])[:, 0]
    assert set(drawn[::2]) == {1}
    assert set(drawn[1::2]) == {0, 1, 2}


def test_logprobs_are_of_the_unprocessed_distribution():
    logits = jnp.array([[[2.0, 1.0, 0.0]]])
    found = logprobs_of(logits, jnp.array([[1]]))
    expected = np.log(np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum())
    assert found.chosen[0, 0] == pytest.approx(expected[1])
    assert (found.rank[0, 0], found.top_tokens[0, 0].tolist()) == (2, [0, 1, 2])
    np.testing.assert_allclose(found.top[0, 0], expected, rtol=1e-5)
