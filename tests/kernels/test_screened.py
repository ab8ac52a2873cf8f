"""Heads with an 8-bit copy: its bounds hold, few rows reach them, and the argmax is the head's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import _compat, approximate_largest, screen_of, screened_largest
from pallas_kernels.largest_product import APPROXIMATE_LARGEST, SCREENED_LARGEST, Screen, screened
from pallas_kernels.largest_product.pieces import largest_of_pieces
from pallas_kernels.largest_product.screen import NORM, REST, SCALE
from pallas_kernels.largest_product.terms import ROWS, TERM, terms_of
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, F32, cuda_lowering, mesh_of, operands
from tests.kernels.conftest import ON_GPU

F16 = jnp.float16
HOPPER = Device("cuda", (9, 0))
SPLIT = functools.partial(terms_of, interpret=not ON_GPU)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.gpu)


def wide(*arrays):
    return [np.asarray(array).astype(np.float64) for array in arrays]


def heads():
    """Tokens and heads by name: usual ones, outliers, and numbers at the ends of their dtypes."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, 1024)), rng.standard_normal((608, 1024))
    cases = {"normal": (x, weight, BF16), "float16": (x, weight, F16)}
    loud = x.copy()
    loud[:, 7] = 300
    cases["an outlier in tokens"] = loud, weight, BF16
    loud = weight.copy()
    loud[::3, 11] = -90
    cases["outliers in rows"] = x, loud, BF16
    cases["tiny"] = x * 1e-30, weight * 1e-3, BF16
    cases["huge"] = x * 1e9, weight * 1e9, BF16
    cases["zeros"] = x * (np.arange(5) % 2)[:, None], weight * (np.arange(608) % 2)[:, None], BF16
    cases["alike"] = np.ones_like(x), -np.ones_like(weight), BF16
    return {name: (jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for name, (a, b, dtype) in cases.items()}


HEADS = heads()


def bounds_of(x, weight):
    """Approximate products, and upper bounds of how far they are off, as the kernel computes them."""
    screen, terms = screen_of(weight), SPLIT(x)
    values, of_rows, of_tokens = wide(terms.values, screen.factors, terms.factors[:, : len(x)])
    numbers = (TERM * values[0] + values[1])[: len(x)]
    products = numbers @ wide(screen.values)[0].T * np.outer(of_tokens[SCALE], of_rows[SCALE])
    return products, np.outer(of_tokens[NORM], of_rows[REST]) + np.outer(of_tokens[REST], of_rows[NORM])


@pytest.mark.parametrize("name", HEADS)
def test_bounds_hold(name):
    x, weight = HEADS[name]
    products, bounds = bounds_of(x, weight)
    exact = np.einsum("td,vd->tv", *wide(x, weight))
    assert (np.abs(exact - products) <= bounds).all()


@pytest.mark.parametrize("factor", [REST, NORM])
def test_each_part_of_a_bound_is_needed(factor):
    """Products that rounding of rows, or of tokens, moves as far as it can: against what it left of them."""
    x, weight = HEADS["normal"] if factor == REST else HEADS["an outlier in tokens"]
    screen, terms = screen_of(weight), SPLIT(x)
    if factor == REST:
        left = wide(weight)[0] - wide(screen.values)[0] * wide(screen.factors)[0][SCALE][:, None]
        x = jnp.asarray(left[:5] / np.abs(left).max(), BF16)
    else:
        values, of_tokens = wide(terms.values, terms.factors)
        left = wide(x)[0] - (TERM * values[0] + values[1])[:5] * of_tokens[SCALE][:5, None]
        weight = jnp.asarray(np.rint(left / np.abs(left).max() * 127), BF16)
    products, bounds = bounds_of(x, weight)
    off = np.abs(np.einsum("td,vd->tv", *wide(x, weight)) - products)
    of_rows, of_tokens = screen_of(weight).factors, SPLIT(x).factors[:, :5]
    without = np.outer(of_tokens[factor], of_rows[REST + NORM - factor])
    assert (off <= bounds).all()
    assert (off > without).any()


def test_few_rows_reach_the_best_product():
    x, weight, _ = (*HEADS["normal"], None)
    products, bounds = bounds_of(x, weight)
    exact = np.einsum("td,vd->tv", *wide(x, weight))
    candidates = (products + bounds >= exact.max(axis=1, keepdims=True)).sum(axis=1)
    assert candidates.min() >= 1
    assert candidates.max() < 8


def test_rows_that_are_no_numbers_are_always_candidates():
    _, weight = HEADS["normal"]
    screen = screen_of(weight.at[3, 5].set(jnp.nan).at[4, 5].set(jnp.inf))
    assert np.isinf(screen.factors[REST][3:5]).all()
    assert np.isfinite(np.delete(screen.factors, [3, 4], axis=1)).all()


def test_rounding_a_head_takes_little_memory():
    """Beside what it returns: numbers in float32 are of a part of its rows. CPUs would widen all of bfloat16 before."""
    weight = jax.ShapeDtypeStruct((4096, 1024), F16)
    assert screen_of.lower(weight).compile().memory_analysis().temp_size_in_bytes < weight.size / 2


@pytest.mark.parametrize("rows", [600, 77])
def test_any_number_of_rows_is_rounded(rows):
    _, weight = operands((1,), (rows, 256), BF16)
    apart = [screen_of(weight[i : i + 1]) for i in range(rows)]
    for found, expected in zip(screen_of(weight), zip(*apart, strict=True), strict=True):
        axis = 0 if found.dtype == jnp.int8 else 1
        np.testing.assert_allclose(found, np.concatenate(expected, axis=axis), rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 8, 70])
def test_terms_of_tokens(tokens):
    x, _ = operands((tokens,), (8, 1000), BF16)
    terms = SPLIT(x)
    values, factors = wide(terms.values, terms.factors)
    assert (terms.values.dtype, terms.values.shape) == (jnp.int8, (2, -(-tokens // 8) * 8, 1000))
    assert factors.shape == (3, max(ROWS, terms.values.shape[1]))
    numbers = TERM * values[0] + values[1]
    off = np.abs(wide(x)[0] - numbers[:tokens] * factors[SCALE][:tokens, None])
    assert (off <= 0.5001 * factors[SCALE][:tokens, None]).all()
    assert not numbers[tokens:].any()


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_largest_of_pieces(tokens):
    """The lowest row of equals, wherever its piece is; NaN wins; pieces are no power of two."""
    rng = np.random.default_rng(1)
    values, indices = rng.standard_normal((300, 24)).astype(np.float32), rng.permutation(300 * 24).reshape(300, 24)
    values[[7, 200], 0] = 9.0
    values[:, 3], values[5, 4], values[6, 5] = -np.inf, np.nan, np.inf
    found = largest_of_pieces(jnp.asarray(values), jnp.asarray(indices, jnp.int32), tokens=tokens, interpret=not ON_GPU)
    index, value = map(np.asarray, found)
    assert index[0] == indices[[7, 200], 0].min()
    for t in range(tokens):
        np.testing.assert_equal(value[t], values[:, t].max())
        if t not in (0, 3, 4):
            assert index[t] == indices[values[:, t].argmax(), t]


def check(found, x, weight, limit=None, atol=2e-4):
    index, value = map(np.asarray, found)
    exact = np.einsum("td,vd->tv", *wide(x, weight))[:, :limit]
    off = atol * np.abs(exact).max()
    np.testing.assert_allclose(value, exact.max(axis=1), atol=off)
    np.testing.assert_allclose(np.take_along_axis(exact, index[:, None], 1)[:, 0], exact.max(axis=1), atol=off)


@pytest.mark.parametrize("implementation", ["whole", MOSAIC])
@pytest.mark.parametrize("name", HEADS)
def test_the_argmax_is_the_heads(implementation, name):
    x, weight = HEADS[name]
    check(screened_largest(x, weight, screen_of(weight), implementation=implementation), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 16, 33, 64])
@pytest.mark.parametrize(("rows", "width"), [(70_016, 1024), (224, 1152), (40_000, 2560)])
@pytest.mark.parametrize("limit", [None, 150])
def test_every_plan_of_the_kernel(tokens, rows, width, limit):
    x, weight = operands((tokens,), (rows, width), BF16)
    loud = weight if limit is None else weight.at[limit:].set(7.0).at[limit + 1 :: 3].set(jnp.nan)
    screen = screen_of(loud)
    check(screened_largest(x, loud, screen, None, limit, implementation="mosaic"), x, weight, limit)
    index, value = approximate_largest(x, screen, limit, implementation="mosaic")
    expected, values = approximate_largest(x, screen, limit, implementation="reference")
    np.testing.assert_allclose(value, values, rtol=1e-3)
    assert (np.asarray(index) == np.asarray(expected)).mean() > 0.9


@pytest.mark.gpu
def test_a_bound_that_is_too_low_loses_the_best_row():
    """It shows that the bounds decide which rows are multiplied: all but one, whose products are positive, claim 0."""
    x, weight = operands((16,), (70_016, 1024), BF16)
    x, weight = jnp.abs(x), weight.at[5].set(1e-3)
    screen = screen_of(weight)
    values = jnp.zeros_like(screen.values).at[5].set(screen.values[5])
    blind = Screen(values, screen.factors.at[REST].set(0).at[NORM].set(0))
    best = np.asarray(screened_largest(x, weight, screen, implementation="mosaic")[0])
    assert not (best == 5).any()
    np.testing.assert_array_equal(screened_largest(x, weight, blind, implementation="mosaic")[0], 5)


@pytest.mark.gpu
def test_nan_is_the_largest_and_breaks_no_other_row():
    x, weight = operands((9,), (4096, 1024), BF16)
    screen = screen_of(weight)
    clean = screened_largest(x, weight, screen, implementation="mosaic")
    found = screened_largest(x.at[3, 17].set(jnp.nan), weight, screen, implementation="mosaic")
    assert np.isnan(found[1][3])
    for one, other in zip(found, clean, strict=True):
        np.testing.assert_array_equal(np.delete(one, 3), np.delete(other, 3))
    broken = weight.at[150, 3].set(jnp.nan)
    _, value = screened_largest(x, broken, screen_of(broken), implementation="mosaic")
    assert np.isnan(value).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 64, 100])
def test_drafts_are_the_copys(tokens):
    x, weight = operands((tokens,), (70_016, 1024), BF16)
    screen = screen_of(weight)
    index, value = approximate_largest(x, screen, implementation="mosaic")
    _, values = approximate_largest(x, screen, implementation="reference")
    np.testing.assert_allclose(value, values, rtol=1e-3 if tokens <= ROWS else 0.03)
    exact, _ = screened_largest(x, weight, screen, implementation="whole")
    assert (np.asarray(index) == np.asarray(exact)).mean() > 0.85


def shapes(tokens, rows, width, dtype=BF16):
    struct = jax.ShapeDtypeStruct
    copy = Screen(struct((rows, width), jnp.int8), struct((3, rows), F32))
    return struct((tokens, width), dtype), struct((rows, width), dtype), copy


@pytest.mark.parametrize(("tokens", "size"), [(1, (248_320, 5120)), (16, (151_936, 4096)), (64, (248_320, 5120))])
def test_lowers(monkeypatch, tokens, size):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    x, weight, copy = shapes(tokens, *size)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    assert "mosaic_gpu" in cuda_lowering(lambda *a: screened_largest(*a), x, weight, copy, None, number)
    assert "mosaic_gpu" in cuda_lowering(lambda *a: approximate_largest(*a), x, copy)


def test_sharded_lowering_knows_what_varies():
    x, weight, copy = shapes(16, 8192, 1024)
    specs = Spec(), Spec("tp"), Screen(Spec("tp"), Spec(None, "tp"))
    run = functools.partial(screened_largest, implementation="mosaic")
    shard = jax.shard_map(run, mesh=mesh_of(4), in_specs=specs, out_specs=Spec("tp"))
    assert "mosaic_gpu" in jax.jit(shard).trace(x, weight, copy).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "size", "dtype", "message"),
    [
        (8, (1024, 1024), F32, "takes bf16 and f16; this is float32"),
        (65, (1024, 1024), BF16, "is for up to 64 tokens; these are 65"),
        (8, (1024, 1056), BF16, r"a width that 128 divides, of at least 1024, .* the head is \[1024, 1056\]"),
        (8, (184, 1024), BF16, r"rows that 32 divides, of at least 192; the head is \[184, 1024\]"),
        (8, (616, 1024), BF16, r"the head is \[616, 1024\]"),
    ],
)
def test_mosaic_refuses_in_a_sentence(tokens, size, dtype, message):
    run = functools.partial(screened_largest, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(run, *shapes(tokens, *size, dtype))


def test_it_is_picked_for_large_heads_and_few_tokens():
    def names(tokens, rows):
        x, weight, copy = shapes(tokens, rows, 4096)
        calls = (SCREENED_LARGEST, (x, weight, copy)), (APPROXIMATE_LARGEST, (x, copy))
        return [operation.choose(call, HOPPER).name for operation, call in calls]

    assert names(64, 151_936) == ["mosaic", "mosaic"]
    assert names(65, 151_936) == ["whole", "mosaic"]
    assert names(16, 32_736) == ["whole", "mosaic"]


def test_a_screen_of_another_head_is_refused():
    x, weight = HEADS["normal"]
    with pytest.raises(ValueError, match=r"of this weight, \[608, 1024\]; it is \[592, 1024\]"):
        screened_largest(x, weight, screen_of(weight[:592]))


def test_a_tile_has_more_steps_than_the_ring():
    """What brings the factors of its rows relies on that."""
    for tokens in range(8, ROWS + 1, 8):
        for width in (1024, 1152, 5120):
            plan = screened._plan(tokens, 248_320, width, None, bounds=True)
            assert 2 <= plan.stages < plan.steps
