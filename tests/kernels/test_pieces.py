"""Activations as sums of two numbers in e4m3."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_product.pieces import LONGEST, split
from tests.kernels.cases import BF16, E4M3, F32
from tests.kernels.conftest import ON_GPU


def summed(x, tokens=16):
    """The sums of pieces, in float64 [tokens, G, 128]."""
    first, second, factors = split(x, tokens, interpret=not ON_GPU)
    assert (first.dtype, second.dtype, factors.dtype) == (E4M3, E4M3, F32)
    assert first.shape == second.shape == (tokens, x.shape[1])
    both = np.asarray(first, np.float64) + np.asarray(second, np.float64)
    return both.reshape(tokens, -1, LONGEST) * np.asarray(factors, np.float64).T[:, :, None]


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("largest", [2.0**-100, 1.0, 2.0**120])
def test_pieces_add_up(groups, largest):
    """Exactly, down to a 512th of a group's largest number; the others to a part of it."""
    rng = np.random.default_rng(groups)
    shape = (11, groups * LONGEST)
    x = jnp.asarray(rng.uniform(-1, 1, shape) * 2.0 ** rng.integers(-24, 1, shape) * largest, BF16)
    exact, sums = np.asarray(x, np.float64).reshape(11, groups, LONGEST), summed(x)
    peak = np.abs(exact).max(axis=-1, keepdims=True)
    is_large = np.abs(exact) >= peak / 512
    assert 0.2 < is_large.mean() < 0.8
    np.testing.assert_array_equal(sums[:11][is_large], exact[is_large])
    assert (np.abs(sums[:11] - exact) <= peak * 2.0**-17).all()
    assert not sums[11:].any()  # rows behind the last token


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_number_breaks_its_group_alone(broken):
    x = jnp.ones((3, 2 * LONGEST), BF16).at[1, LONGEST + 5].set(broken)
    sums = summed(x)
    assert np.isnan(sums[1, 1]).all()
    sums[1, 1] = 1
    assert (sums[:3] == 1).all()


def test_zeros_are_zeros():
    assert not summed(jnp.zeros((2, LONGEST), BF16)).any()
