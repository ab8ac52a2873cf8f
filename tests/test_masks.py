"""The one mask function, against the definition spelled out pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.lib.masks import visible


def sees(i: int, j: int, mask: str, window: int | None) -> bool:
    """DESIGN of DFlash, point 4, in words: full layers see everything, causal ones the past, windows W keys."""
    if mask == "causal" and window is None:
        return j <= i
    if mask == "causal":
        return i - window < j <= i
    if window is None:
        return True
    return i - window < j < i + window


@settings(deadline=None, max_examples=60)
@given(
    queries=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    keys=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    mask=st.sampled_from(["causal", "block"]),
    window=st.none() | st.integers(1, 12),
)
def test_against_brute_force(queries, keys, mask, window):
    found = np.asarray(visible(jnp.array(queries), jnp.array(keys), mask=mask, window=window))
    expected = [[sees(i, j, mask, window) for j in keys] for i in queries]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("mask", "window", "keys_seen"), [("causal", 3, [5, 6, 7]), ("block", 3, [5, 6, 7, 8, 9])])
def test_window_counts_the_query_itself(mask, window, keys_seen):
    seen = np.asarray(visible(jnp.array([7]), jnp.arange(20), mask=mask, window=window))[0]
    assert list(np.flatnonzero(seen)) == keys_seen


def test_batches_broadcast():
    positions = jnp.array([[3, 4], [9, 10]])
    seen = np.asarray(visible(positions, jnp.arange(12)[None], mask="causal"))
    assert seen.shape == (2, 2, 12)
    assert seen.sum(axis=-1).tolist() == [[4, 5], [10, 11]]
