"""Every implementation of activations in fp8 that this machine has, against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.weights.formats.fp8 import Quantized, to_e4m3
from pallas_kernels import _compat, quantize_gated, quantize_rows
from pallas_kernels.quantize import triton
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering
from tests.kernels.conftest import ON_GPU

F16 = jnp.float16
MANY = 300 if ON_GPU else 20  # rows: a program each, which the interpreter runs one after another
by_implementation = pytest.mark.parametrize("implementation", ["reference", "triton"])


def run(function, implementation, *arguments):
    interpret = implementation == "triton" and not ON_GPU
    return jax.jit(functools.partial(function, implementation=implementation, interpret=interpret))(*arguments)


def numbers(shape, seed=0):
    """Rows of very different magnitude."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    return (sizes * rng.standard_normal(shape)).astype(np.float32)


def quantized(wide):
    scales = np.maximum(np.abs(wide).max(-1), 1e-30) / 448
    return (wide / scales[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn), scales.astype(np.float32)


def assert_same(found, wanted):
    """Equal, except for numbers halfway between two of e4m3, which another order of operations rounds otherwise."""
    (values, scales), (wanted_values, wanted_scales) = (list(map(np.asarray, pair)) for pair in (found, wanted))
    assert (values.dtype, scales.dtype) == (wanted_values.dtype, np.float32)
    np.testing.assert_allclose(scales, wanted_scales, rtol=2e-6)
    assert values.shape == wanted_values.shape
    assert np.mean(values.view(np.uint8) != wanted_values.view(np.uint8)) < 0.002
    np.testing.assert_allclose(values.astype(np.float32), wanted_values.astype(np.float32), rtol=0.13, atol=2**-9)


@by_implementation
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 96), (2, 3, 64), (MANY, 12288)], ids=str)
def test_rows(implementation, shape, dtype):
    x = jnp.asarray(numbers(shape), dtype)
    assert_same(run(quantize_rows, implementation, x), quantized(np.asarray(x, np.float32)))


@pytest.mark.in_turns(8)
@by_implementation
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize(
    ("tokens", "parts", "units"), [((3,), 1, 96), ((2, 5), 4, 48), ((40,), 4, 3072), ((3,), 3, 384)], ids=str
)
def test_hidden_units(implementation, tokens, parts, units, dtype):
    rng = np.random.default_rng(1)
    products = jnp.asarray(1000 * rng.standard_normal((*tokens, parts, 2, units)), dtype)
    of_tokens = rng.uniform(1e-3, 2e-3, tokens).astype(np.float32)
    of_units = rng.uniform(0.5, 2, (parts, 2, units)).astype(np.float32)
    real = np.asarray(products, np.float64) * of_tokens[..., None, None, None] * of_units
    gate, up = real[..., 0, :], real[..., 1, :]
    hidden = (gate / (1 + np.exp(-gate)) * up).reshape(*tokens, -1)
    found = run(quantize_gated, implementation, products, jnp.asarray(of_tokens), jnp.asarray(of_units))
    assert_same(found, quantized(hidden))


@by_implementation
def test_a_row_of_zeros_has_a_scale(implementation):
    values, scales = run(quantize_rows, implementation, jnp.zeros((2, 96), BF16))
    assert (np.asarray(values, np.float32) == 0).all()
    assert (np.asarray(scales) > 0).all()


@by_implementation
def test_no_tokens(implementation):
    values, scales = run(quantize_rows, implementation, jnp.zeros((2, 0, 64), BF16))
    assert (values.shape, values.dtype, scales.shape) == ((2, 0, 64), E4M3, (2, 0))
    parts = jnp.zeros((0, 1, 2, 64)), jnp.zeros(0), jnp.ones((1, 2, 64))
    assert run(quantize_gated, implementation, *parts)[0].shape == (0, 64)


@pytest.mark.parametrize(("capability", "kernel"), [((9, 0), True), ((8, 9), True), ((8, 0), False), (None, False)])
def test_the_public_functions_pick(monkeypatch, capability, kernel):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    struct = jax.ShapeDtypeStruct
    text = cuda_lowering(lambda x: quantize_rows(x), struct((4, 256), BF16))  # traced anew
    assert ("xla.gpu.triton" in text) == kernel
    given = struct((4, 1, 2, 256), BF16), struct((4,), F32), struct((1, 2, 256), F32)
    assert ("xla.gpu.triton" in cuda_lowering(lambda *parts: quantize_gated(*parts), *given)) == kernel
    wide = struct((2, 70000), BF16)
    assert "xla.gpu.triton" not in cuda_lowering(lambda x: quantize_rows(x), wide)


@pytest.mark.parametrize("width", [64, 4096, 12288, 25600])
def test_lowers(width):
    struct = jax.ShapeDtypeStruct
    assert "xla.gpu.triton" in cuda_lowering(triton.quantize_rows, struct((64, 16, width), BF16))
    given = struct((64, 16, 4, 2, width // 4), BF16), struct((64, 16), F32), struct((4, 2, width // 4), F32)
    assert "xla.gpu.triton" in cuda_lowering(triton.quantize_gated, *given)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"x must be floating, \[\*T, D\]; got int32 and \[2, 3\]"):
        quantize_rows(jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="'triton', 'reference' or None; got 'mosaic'"):
        quantize_rows(jnp.zeros((2, 3)), implementation="mosaic")
    with pytest.raises(ValueError, match=r"got \[5, 1, 2, 8\], \[4\] and \[1, 2, 8\]"):
        quantize_gated(jnp.zeros((5, 1, 2, 8)), jnp.zeros(4), jnp.zeros((1, 2, 8)))
    with pytest.raises(NotImplementedError, match="must be at most 65536; this is 70000"):
        jax.eval_shape(triton.quantize_rows, jax.ShapeDtypeStruct((2, 70000), BF16))


def test_an_mlp_hands_on_quantised_units():
    """An fp8 MLP, as a drafter on one device has it, is no less exact than one with hidden units in bfloat16."""
    rng = np.random.default_rng(2)
    weight = jnp.asarray(rng.standard_normal((1, 2, 48, 64)), F32)
    x = jnp.asarray(rng.standard_normal((2, 3, 64)), BF16)
    hidden = Quantized(*to_e4m3(weight, 3), is_whole=True).gated(x, kernels=True)
    gate, up = np.einsum("btd,kfd->kbtf", np.asarray(x, np.float64), np.asarray(weight[0], np.float64))
    wanted = gate / (1 + np.exp(-gate)) * up
    found = np.asarray(hidden.values, np.float64) * np.asarray(hidden.scales)[..., None]
    assert (hidden.shape, hidden.scales.shape) == ((2, 3, 48), (2, 3))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.06
