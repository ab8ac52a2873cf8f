"""Products in few bits with another beside them, on multiprocessors that the first leaves idle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, product, quantized_product, quantized_product_beside
from pallas_kernels.quantized_product import QUANTIZED_PRODUCT_BESIDE
from pallas_kernels.quantized_product.mosaic_plan import default_config, plan_of
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error
from tests.kernels.test_quantized_product import operands

KINDS = ["int4", "zeros", "fp8"]
on_idle = functools.partial(quantized_product_beside, implementation="mosaic")


def call_of(kind, tokens, rows, others, width=5120, dtype=BF16):
    struct = jax.ShapeDtypeStruct
    values = struct((rows, width), E4M3) if kind == "fp8" else struct((rows, width // 4), jnp.uint16)
    scales = struct((rows, width // 128), BF16)
    zeros = struct(scales.shape, jnp.uint8) if kind == "zeros" else None
    return struct((tokens, width), dtype), values, scales, zeros, struct((others, width), dtype)


@pytest.fixture
def of_132(monkeypatch):
    """A Hopper's multiprocessors, on whatever machine this is."""
    monkeypatch.setattr(_compat, "sm_count", lambda: 132)


def other_weight(others, width):
    return jnp.asarray(np.random.default_rng(1).standard_normal((others, width)), BF16)


@pytest.mark.gpu
@pytest.mark.in_turns(7)
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (9,), (16,), (24,), (33,), (64,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "others"), [((16384, 512), 96), ((16384, 1536), 96), ((8192, 512), 8)], ids=str)
def test_both_products(shape, others, kind, tokens):
    (x, *weight), wide = operands(kind, 128, tokens, *shape)
    other = other_weight(others, shape[1])
    first, beside = on_idle(x, *weight, other)
    assert (first.shape, beside.shape) == ((*tokens, shape[0]), (*tokens, others))
    np.testing.assert_array_equal(first, quantized_product(x, *weight, implementation="mosaic"))
    exact = np.asarray(x, np.float64)
    assert error(first, exact @ wide.T) < 5e-3
    assert error(beside, exact @ np.asarray(other, np.float64).T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_token_breaks_no_other(kind):
    (x, *weight), _ = operands(kind, 128, (16,), 16384, 512)
    other = other_weight(96, 512)
    clean, broken = (on_idle(x, *weight, other)[1] for x in (x, x.at[5].set(jnp.nan)))
    assert np.isnan(np.asarray(broken[5], np.float32)).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(clean, 5, 0))
    np.testing.assert_array_equal(clean[3], on_idle(x[3:4], *weight, other)[1][0])


@pytest.mark.usefixtures("of_132")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("capability", "tokens", "rows", "others", "name"),
    [
        ((9, 0), 1, 16384, 96, "mosaic"),
        ((9, 0), 64, 16384, 96, "mosaic"),
        ((9, 0), 65, 16384, 96, "apart"),
        ((9, 0), 16, 16384, 192, "apart"),  # more rows on a multiprocessor than were measured
        ((9, 0), 16, 2048, 96, "apart"),  # a smaller weight than was measured
        ((9, 0), 16, 16384, 97, "apart"),  # no tiles of 8 rows
        ((9, 0), 16, 16384, 0, "apart"),
        ((8, 9), 16, 16384, 96, "apart"),
        (None, 16, 16384, 96, "apart"),
    ],
)
def test_which_products_have_another_beside_them(monkeypatch, capability, tokens, rows, others, name, kind):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    call = call_of(kind, tokens, rows, others)
    device = Device("cpu") if capability is None else Device("cuda", capability)
    assert QUANTIZED_PRODUCT_BESIDE.choose(call, device).name == name
    if name == "mosaic":
        x, values, scales, zeros, other = call
        text = cuda_lowering(lambda *given: quantized_product_beside(*given), x, values, scales, zeros, other)
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "dot_general" not in text


@pytest.mark.usefixtures("of_132")
@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beside_fits_on_idle_multiprocessors_and_into_the_ring(kind, tokens):
    """Sums of 8 warps meet in the ring: 4 steps of 16 KiB in 4 bits, of 32 KiB in 8 bits (3 of them with 64 tokens)."""
    x, values, scales, _, other = call_of(kind, tokens, 16384, 96)
    plan = plan_of(default_config(x, values, scales), x, values, scales)
    assert plan.ctas == 128
    assert plan.tiles_beside(other) == 4
    ring = 65536 if kind != "fp8" else 98304 if tokens > 40 else 131072
    most = max(rows for rows in range(8, 4096, 8) if plan.tiles_beside(jax.ShapeDtypeStruct((4 * rows, 5120), BF16)))
    padded = -(-tokens // 8) * 8
    assert 8 * padded * (most + 4) * 4 <= ring < 8 * padded * (most + 8 + 4) * 4


@pytest.mark.usefixtures("of_132")
@pytest.mark.parametrize(
    ("rows", "others", "width", "dtype", "message"),
    [
        (16384, 97, 5120, BF16, "in tiles of a multiple of 8 rows .*; it has 97 rows, and 4 are idle"),
        (16384, 2048, 5120, BF16, "whose sums shared memory holds; it has 2048 rows, and 4 are idle"),
        (16896, 96, 5120, BF16, "it has 96 rows, and 0 are idle"),
        (16384, 96, 5120 + 128, BF16, "a width that 256 divides; these are 5248 of bfloat16"),
        (16384, 96, 5120, jnp.float16, "takes bf16; this is float16"),
    ],
)
def test_another_weight_beside_is_refused_in_a_sentence(rows, others, width, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(on_idle, *call_of("int4", 16, rows, others, width, dtype))


@pytest.mark.parametrize(("others", "dtype"), [((96, 256), BF16), ((96,), BF16), ((96, 512), F32)])
def test_another_weight_that_does_not_belong_is_refused(others, dtype):
    (x, *weight), _ = operands("int4", 128)
    with pytest.raises(ValueError, match=r"must be \[P, 512\] in bfloat16; got"):
        quantized_product_beside(x, *weight, jnp.zeros(others, dtype))


@pytest.mark.parametrize("implementation", [None, "apart", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_apart_and_by_xla_are_the_same(kind, implementation):
    (x, *weight), _ = operands(kind, 128, (2, 3))
    other = other_weight(16, 512)
    first, second = quantized_product_beside(x, *weight, other, implementation=implementation)
    by_itself = "reference" if implementation == "reference" else None
    np.testing.assert_array_equal(first, quantized_product(x, *weight, implementation=by_itself))
    np.testing.assert_array_equal(second, product(x, other, implementation=by_itself))
