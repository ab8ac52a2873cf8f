"""The expert that every token sees, beside routed ones, by every implementation that this machine has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.experts import FewBits, Shared, experts
from tests.kernels import test_quantized_product
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_experts import expected, routed
from tests.kernels.test_experts_few_bits import narrow

WIDTHS = {"parts of 16": (4, 16), "one part": (1, 64), "no whole tiles": (3, 16)}  # E, I
PLACES = {"one token": (1,), "few tokens": (2, 3), "sixteen": (16,), "sorted": (3, 7), "apart": (5, 13)}


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


@pytest.mark.in_turns(12)
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


def few_bits(kind, shape, seed):
    """A shared expert's matrix in few bits as a dense weight has them, e4m3 numbers one by one; and its numbers."""
    outputs = int(np.prod(shape[:-1]))
    (_, *parts), wide = test_quantized_product.operands(
        kind, 32, outputs=outputs, inputs=shape[-1], tokens=(1,), seed=seed
    )
    values, scales, zeros = (None if part is None else part.reshape(*shape[:-1], -1) for part in parts)
    return FewBits(values, scales, zeros), np.asarray(wide).reshape(shape)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("place", ["one token", "few tokens", "sorted"])
@pytest.mark.parametrize(
    ("kind", "routed_kind"), [("fp8", "fp8"), ("int4", "int4"), ("zeros", "bf16"), ("bf16", "int4")]
)
def test_in_few_bits(kind, routed_kind, place):
    tokens = PLACES[place]
    small, wide = narrow(tokens, 3, 5, 32, 64, kinds=(routed_kind, routed_kind))
    shared = shared_of(tokens, 4, 16, 64)
    gate_up, down = shared.gate_up, shared.down
    wide_gate_up, wide_down = gate_up, down
    if kind != "bf16":
        (gate_up, wide_gate_up), (down, wide_down) = (few_bits(kind, w.shape, i) for i, w in enumerate((gate_up, down)))
    found = run("triton")(*small, Shared(gate_up, down, shared.weights))
    dense = of_shared(small[0], Shared(wide_gate_up, wide_down, shared.weights))
    assert error(found, expected(*wide) + dense) < 6e-3


@pytest.mark.parametrize(("bits", "dtype"), [(8, E4M3), (4, jnp.uint16)])
def test_lowers_in_few_bits(monkeypatch, bits, dtype):
    """The 122B's sizes on two devices: routed experts in words, a shared one as dense weights are."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))

    def few(*shape, words=True):
        *outputs, inputs = shape
        values = (*outputs, inputs * bits // 16) if words or bits == 4 else shape
        kind = jnp.int16 if words and bits == 8 else dtype
        return FewBits(jax.ShapeDtypeStruct(values, kind), jax.ShapeDtypeStruct((*outputs, inputs // 128), BF16))

    x, chosen = jax.ShapeDtypeStruct((16, 3072), BF16), jax.ShapeDtypeStruct((16, 8), jnp.int32)
    weights, opened = jax.ShapeDtypeStruct((16, 8), F32), jax.ShapeDtypeStruct((16,), F32)
    shared = Shared(few(8, 2, 64, 3072, words=False), few(3072, 512, words=False), opened)
    arrays = x, few(256, 2, 512, 3072), few(256, 3072, 512), chosen, weights, shared
    assert "mosaic_gpu" in cuda_lowering(lambda *given: experts(*given), *arrays)
    assert "xla.gpu.triton" in cuda_lowering(lambda *given: experts(*given, implementation="triton"), *arrays)


def test_a_token_is_what_it_is_alone():
    arrays, shared = routed((16,), 3, 5, 48, 64), shared_of((16,), 4, 16, 64)
    whole = np.asarray(run("triton")(*arrays, shared))
    x, gate_up, down, chosen, weights = arrays
    alone = run("triton")(
        x[3:4], gate_up, down, chosen[3:4], weights[3:4], shared._replace(weights=shared.weights[3:4])
    )
    np.testing.assert_array_equal(whole[3:4], alone)


@pytest.mark.parametrize(("tokens", "kernels"), [(1, 2), (16, 2), (17, 3), (64, 3)])
def test_few_tokens_take_two_kernels(monkeypatch, tokens, kernels):
    """From 17 tokens on there is a third, which sorts; up to 64 the shared expert is part of the others."""
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
