"""The expert that every token sees, beside routed ones, by every implementation that this machine has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.experts import Shared, experts
from tests.kernels.cases import BF16, F32, cuda_lowering, error
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_experts import expected, routed

WIDTHS = {"parts of 16": (4, 16), "one part": (1, 64), "no whole tiles": (3, 16)}  # E, I
PLACES = {"one token": (1,), "few tokens": (2, 3), "sixteen": (16,), "sorted": (3, 7)}


def shared_of(tokens, parts, units, D, dtype=BF16):
    rng = np.random.default_rng(1)
    gate_up, down = (rng.standard_normal(shape, np.float32) for shape in ((parts, 2, units, D), (D, parts * units)))
    gate_up, down = jnp.asarray(gate_up / D**0.5, dtype), jnp.asarray(down / (parts * units) ** 0.5, dtype)
    return Shared(gate_up, down, jnp.asarray(rng.random(tokens), F32))


def of_shared(x, shared):
    """Its output in float64, with gate, up and hidden units rounded to the dtype."""
    wide_x, gate_up, down, weights = (np.asarray(array, np.float64) for array in (x, *shared))

    def rounded(values):
        return values.astype(x.dtype).astype(np.float64)

    gate, up = (rounded(np.einsum("...d,eid->...ei", wide_x, gate_up[:, i])) for i in range(2))
    hidden = rounded(gate / (1 + np.exp(-gate)) * up).reshape(*x.shape[:-1], -1)
    return weights[..., None] * (hidden @ down.T)


def run(implementation):
    interpret = implementation == "triton" and not ON_GPU
    return jax.jit(functools.partial(experts, implementation=implementation, interpret=interpret))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("implementation", "dtype", "most"), [("reference", F32, 1e-6), ("triton", BF16, 6e-3)])
def test_its_output_is_added(implementation, dtype, most, width, place):
    tokens = PLACES[place]
    arrays = routed(tokens, 3, 5, 48, 64, dtype=dtype)
    shared = shared_of(tokens, *WIDTHS[width], 64, dtype)
    found = run(implementation)(*arrays, shared)
    assert (found.dtype, found.shape) == (dtype, arrays[0].shape)
    assert error(found, expected(*arrays) + of_shared(arrays[0], shared)) < most


def test_a_token_is_what_it_is_alone():
    arrays, shared = routed((16,), 3, 5, 48, 64), shared_of((16,), 4, 16, 64)
    whole = np.asarray(run("triton")(*arrays, shared))
    x, gate_up, down, chosen, weights = arrays
    alone = run("triton")(
        x[3:4], gate_up, down, chosen[3:4], weights[3:4], shared._replace(weights=shared.weights[3:4])
    )
    np.testing.assert_array_equal(whole[3:4], alone)


@pytest.mark.parametrize(("tokens", "kernels"), [(1, 2), (16, 2), (17, 3)])
def test_few_tokens_take_two_kernels(monkeypatch, tokens, kernels):
    """From 17 tokens on there is a third, which sorts, and the shared expert is XLA's here."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    arrays = jax.eval_shape(lambda: (*routed((tokens,), 8, 16, 512, 2048), shared_of((tokens,), 16, 32, 2048)))
    text = cuda_lowering(lambda *given: experts(*given), *arrays)
    assert (
        text.count('call_target_name = "__gpu$xla.gpu.triton"') == kernels
        or text.count("@__gpu$xla.gpu.triton") == kernels
    )


def test_wrong_shapes_are_named():
    arrays, shared = routed((2,), 3, 5, 48, 64), shared_of((2,), 4, 16, 64)
    with pytest.raises(ValueError, match=r"must be \[E, 2, I, D\], \[D, E I\] and \[\*T\] for x \[2, 64\]; got"):
        experts(*arrays, shared._replace(weights=jnp.zeros(3)))
