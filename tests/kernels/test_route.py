"""The choice of experts by every implementation that this machine has, and the narrow product that gives its logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, product, route, split_product
from pallas_kernels.product import narrow
from tests.kernels.cases import BF16, F32, cuda_lowering, error, operands, shapes
from tests.kernels.conftest import ON_GPU

by_implementation = pytest.mark.parametrize("implementation", ["reference", "triton"])
CASES = {  # tokens, experts, of a token, parts of the logits
    "one token": ((1,), 256, 8, 8),
    "experts that are no power of two": ((2, 3), 6, 2, 1),
    "one of two": ((5,), 2, 1, 3),
    "all": ((3,), 4, 4, 1),
}


def run(implementation, **options):
    interpret = implementation == "triton" and not ON_GPU
    return jax.jit(
        functools.partial(route, implementation=implementation, interpret=interpret, **options), static_argnums=2
    )


def logits_of(tokens, X, S):
    rng = np.random.default_rng(0)
    return rng.permuted(np.broadcast_to(np.arange(X, dtype=np.float32) / 4, (S, *tokens, X)), axis=-1)


@by_implementation
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_largest_and_their_weights(implementation, case, renormalize):
    """Some are equal; the first of them comes first."""
    tokens, X, k, S = CASES[case]
    logits = logits_of(tokens, X, S)
    chosen, weights, opened = run(implementation, renormalize=renormalize)(logits, np.ones(tokens, bool), k)
    total = logits.astype(np.float64).sum(axis=0)
    order = np.argsort(-total, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(chosen, order)
    largest = np.exp(np.take_along_axis(total, order, axis=-1))
    whole = largest if renormalize else np.exp(total)
    np.testing.assert_allclose(weights, largest / whole.sum(axis=-1, keepdims=True), rtol=2e-6)
    assert (chosen.dtype, weights.dtype, opened) == (jnp.int32, F32, None)


@by_implementation
def test_padding_reaches_no_expert(implementation):
    _, X, k, S = CASES["one token"]
    is_token = np.asarray([[True, False, True]])
    chosen, weights, _ = run(implementation, renormalize=True)(logits_of((1, 3), X, S), is_token, k)
    np.testing.assert_array_equal((np.asarray(chosen) < X).all(axis=-1), is_token)
    np.testing.assert_array_equal((np.asarray(chosen) == X).all(axis=-1), ~is_token)
    assert np.isfinite(weights).all()


@by_implementation
def test_a_broken_token_breaks_no_other(implementation):
    tokens, X, k, S = CASES["experts that are no power of two"]
    logits = logits_of(tokens, X, S)
    broken = logits.copy()
    broken[:, 0, 1] = np.nan
    choose = run(implementation, renormalize=True)
    for clean, other in zip(
        choose(logits, np.ones(tokens, bool), k)[:2], choose(broken, np.ones(tokens, bool), k)[:2], strict=True
    ):
        np.testing.assert_array_equal(np.delete(clean.reshape(6, -1), 1, 0), np.delete(other.reshape(6, -1), 1, 0))


@by_implementation
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_gate_of_a_shared_expert(implementation, dtype):
    tokens, X, k, S = CASES["experts that are no power of two"]
    x, gate = operands(tokens, (1, 600), dtype)
    shared = x, gate[0]
    *_, opened = run(implementation, renormalize=True)(logits_of(tokens, X, S), np.ones(tokens, bool), k, shared=shared)
    logit = np.asarray(x, np.float64) @ np.asarray(gate[0], np.float64)
    assert (opened.dtype, opened.shape) == (F32, tokens)
    np.testing.assert_allclose(opened, 1 / (1 + np.exp(-logit)), rtol=3e-5)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"logits must be float32 \[S, \*T, X\] for tokens \[2\]; got float32\[2, 8\]"):
        route(jnp.zeros((2, 8)), jnp.ones(2, bool), 2, renormalize=True)
    with pytest.raises(ValueError, match="a token must have 1 to 8 experts; got 9"):
        route(jnp.zeros((1, 2, 8)), jnp.ones(2, bool), 9, renormalize=True)
    shared = jnp.zeros((2, 4)), jnp.zeros(8)
    with pytest.raises(ValueError, match=r"gate must be \[D\], and its input \[2, 'D'\]; got \[8\] and \[2, 4\]"):
        route(jnp.zeros((1, 2, 8)), jnp.ones(2, bool), 2, renormalize=True, shared=shared)


def test_no_tokens():
    chosen, weights, opened = run("triton", renormalize=True)(
        jnp.zeros((1, 2, 0, 8)), jnp.zeros((2, 0), bool), 3, shared=(jnp.zeros((2, 0, 16)), jnp.zeros(16))
    )
    assert (chosen.shape, weights.shape, opened.shape) == ((2, 0, 3), (2, 0, 3), (2, 0))
    assert narrow.product(*operands((2, 0), (32, 512), BF16)).shape == (2, 0, 32)


@pytest.mark.parametrize("tokens", [(1,), (2, 3), (16,), (70,)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_narrow_product(tokens, dtype):
    x, weight = operands(tokens, (48, 768), BF16)
    found = jax.jit(functools.partial(narrow.product, dtype=dtype, interpret=not ON_GPU))(x, weight)
    assert (found.dtype, found.shape) == (dtype, (*tokens, 48))
    assert error(found, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T) < (
        5e-3 if dtype == BF16 else 1e-5
    )


def test_a_token_of_a_narrow_product_is_what_it_is_alone():
    x, weight = operands((16,), (48, 768), BF16)
    run = jax.jit(functools.partial(narrow.product, dtype=F32, interpret=not ON_GPU))
    batched = np.asarray(run(x, weight))
    for rows in (slice(3, 4), slice(5, 16)):
        np.testing.assert_array_equal(batched[rows], run(x[rows], weight))


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "dtype", "is_narrow"),
    [
        ((1,), 256, 2048, F32, True),
        ((1,), 96, 5120, BF16, False),
        ((16,), 96, 5120, BF16, True),
        ((64,), 256, 3072, F32, True),
        ((65,), 256, 3072, F32, False),
        ((16,), 272, 2048, BF16, False),
        ((16,), 97, 2048, BF16, False),
        ((16,), 96, 2000, BF16, False),
    ],
)
def test_which_products_are_narrow(monkeypatch, tokens, rows, width, dtype, is_narrow):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    given = shapes(tokens, (rows, width))
    text = cuda_lowering(lambda *given: product(*given, dtype), *given)
    assert ("narrow_product" in text) == is_narrow
    parts = jax.eval_shape(functools.partial(split_product, dtype=dtype), *given)
    assert parts.shape == ((width // 256,) if is_narrow else ()) + (*tokens, rows)


def test_lowers(monkeypatch):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    given = jax.ShapeDtypeStruct((8, 1, 16, 256), F32), jax.ShapeDtypeStruct((1, 16), bool)
    shared = jax.ShapeDtypeStruct((1, 16, 2048), BF16), jax.ShapeDtypeStruct((2048,), BF16)
    text = cuda_lowering(lambda *given: route(*given[:2], 8, renormalize=True, shared=given[2:]), *given, *shared)
    assert "xla.gpu.triton" in text
