"""The gated norm by every implementation that this machine has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, gated_norm
from tests.kernels.cases import BF16, F32, cuda_lowering, error
from tests.kernels.conftest import ON_GPU

by_implementation = pytest.mark.parametrize("implementation", ["reference", "triton"])
EPS = 1e-6


def run(implementation, activation="silu"):
    interpret = implementation == "triton" and not ON_GPU
    options = {"eps": EPS, "activation": activation, "implementation": implementation, "interpret": interpret}
    return jax.jit(functools.partial(gated_norm, **options))


def operands(tokens, HK, group, dv, dtype):
    """Channels that are no gates are NaN."""
    rng = np.random.default_rng(0)
    x, channels, weight = (
        rng.standard_normal(shape, np.float32)
        for shape in ((*tokens, HK * group, dv), (*tokens, HK, 24 + group * dv), dv)
    )
    channels[..., :24] = np.nan
    return tuple(jnp.asarray(array, dtype) for array in (x, channels, weight))


def expected(x, channels, weight, activation):
    x, channels, weight = (np.asarray(array, np.float64) for array in (x, channels, weight))
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight
    gates = channels[..., 24:].reshape(x.shape)
    opened = 1 / (1 + np.exp(-gates))
    return (normed * opened * (gates if activation == "silu" else 1)).reshape(*channels.shape[:-1], -1)


@by_implementation
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("sizes", [(2, 3, 32), (4, 2, 16), (3, 1, 16)], ids=str)
def test_formula(implementation, activation, dtype, sizes):
    arrays = operands((2, 3), *sizes, dtype)
    found = run(implementation, activation)(*arrays)
    HK, group, dv = sizes
    assert (found.dtype, found.shape) == (dtype, (2, 3, HK, group * dv))
    assert error(found, expected(*arrays, activation)) < (1e-2 if dtype == BF16 else 1e-6)


def test_no_tokens():
    assert run("triton")(*operands((2, 0), 2, 3, 16, BF16)).shape == (2, 0, 2, 48)


def test_refusals():
    x, channels, weight = operands((2,), 2, 3, 24, BF16)
    with pytest.raises(NotImplementedError, match="needs heads of a power of two; these are 24"):
        jax.eval_shape(run("triton"), x, channels, weight)
    with pytest.raises(ValueError, match=r"weight \[dv\] for x \[2, 6, 24\]; got \[2, 2, 96\] and \[12\]"):
        gated_norm(x, channels, weight[:12], eps=EPS, activation="silu")


def test_lowers(monkeypatch):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    given = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((1, 16, 48, 128), (1, 16, 16, 1024), (128,)))
    assert "xla.gpu.triton" in cuda_lowering(lambda *given: gated_norm(*given, eps=EPS, activation="silu"), *given)
