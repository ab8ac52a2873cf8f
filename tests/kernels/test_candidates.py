"""The exact argmax of a head from bounds of its products, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.largest_product import candidates
from pallas_kernels.largest_product.candidates import CHUNK, FEW, exact_largest
from tests.kernels.cases import BF16, F32, cuda_lowering, operands
from tests.kernels.conftest import ON_GPU

PIECE = 96  # rows of which there is one guess
LARGE = 3e38
run = functools.partial(exact_largest, interpret=not ON_GPU)


class Head:
    """A call with close bounds and good guesses, which tests change before they run it."""

    def __init__(self, T, V, D, dtype=BF16, seed=0):
        self.rng = np.random.default_rng(seed)
        self.x, self.weight = (np.array(a) for a in operands((T,), (V, D), dtype, seed))
        self.refresh()

    def refresh(self, extra=3):
        """Bounds, and guesses by approximate products; there are more of them than tokens, and those are NaN."""
        (T, V), R = (len(self.x), len(self.weight)), len(self.x) + extra
        self.products = self.x.astype(np.float64) @ self.weight.astype(np.float64).T
        self.upper = np.full((R, V), np.nan, BF16)
        self.upper[:T] = (self.products + 0.02 + np.abs(self.products) / 64).astype(BF16)
        about = self.products + self.rng.normal(size=(T, V)) * 0.02
        about = np.pad(about, ((0, 0), (0, -V % PIECE)), constant_values=-np.inf).reshape(T, -1, PIECE)
        guesses = about.shape[1], R + 5
        self.values, self.indices = np.full(guesses, np.nan, np.float32), np.zeros(guesses, int)
        self.values[:, :T] = about.max(-1).T
        self.indices[:, :T] = about.argmax(-1).T + np.arange(about.shape[1])[:, None] * PIECE
        self.indices = self.indices.astype(np.int32)

    def run(self, limit=None):
        index, value = run(self.x, self.weight, self.upper, self.values, self.indices, limit)
        assert (index.dtype, value.dtype, index.shape, value.shape) == (jnp.int32, F32, *[(len(self.x),)] * 2)
        return np.asarray(index), np.asarray(value)

    def check(self, limit=None, but=()):
        """Run, and compare all tokens but some with float64; return the result."""
        found = self.run(limit)
        products = np.delete(self.products[:, :limit], but, axis=0)
        index, value = (np.delete(a, but) for a in found)
        np.testing.assert_array_equal(index, products.argmax(axis=-1))
        np.testing.assert_allclose(value, products.max(axis=-1), rtol=1e-5)
        return found

    def candidates(self):
        """Of each token, the number of rows that must be multiplied, however good the guess."""
        return (self.upper[: len(self.x)].astype(np.float64) >= self.products.max(axis=-1)[:, None]).sum(axis=-1)


SHAPES = {  # T, V, D, dtype
    "one token": (1, 1600, 192, BF16),
    "five tokens, f16": (5, 1000, 320, jnp.float16),
    "a full block": (16, 1536, 256, BF16),
    "two blocks": (20, 1032, 200, BF16),
    "three blocks": (33, 1024, 192, BF16),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_close_bounds(shape):
    head = Head(*SHAPES[shape])
    assert 1 <= head.candidates().mean() < 4
    head.check()


def test_inputs_of_several_reads():
    head = Head(3, 520, 2 * candidates.WIDTH + 72)
    head.check()
    head.upper[:] = LARGE
    head.check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bound", [LARGE, np.inf, np.nan])
def test_bounds_that_tell_nothing(shape, bound):
    head = Head(*SHAPES[shape])
    head.upper[:] = bound
    head.check()


def test_chunks_of_few_and_of_many_candidates():
    head = Head(20, 1600, 192)
    head.upper[:, CHUNK : 2 * CHUNK] = LARGE
    head.check()


def test_bounds_that_are_unknown():
    head = Head(20, 1600, 192)
    head.upper[:, 700] = np.nan
    head.upper[7, 40:45] = np.nan
    best = head.products.argmax(axis=-1)
    head.upper[np.arange(20), best] = np.nan
    head.check()


def test_a_bound_that_is_too_low_hides_its_row():
    """It is wrong to give such a bound; this shows that rows are skipped."""
    head = Head(5, 1600, 192)
    best = head.products.argmax(axis=-1)
    head.upper[np.arange(5), best] = -LARGE
    head.values[best // PIECE, np.arange(5)] = -np.inf  # its row is no guess, either
    index, value = head.run()
    head.products[np.arange(5), best] = -np.inf
    np.testing.assert_array_equal(index, head.products.argmax(axis=-1))
    np.testing.assert_allclose(value, head.products.max(axis=-1), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("many", [False, True])
def test_all_rows_are_multiplied_where_candidates_are_many(tokens, many):
    """A row that is hidden by a bound that is too low is found with more than ``FEW`` candidates in its chunk."""
    head = Head(tokens, 1600, 192)
    best = head.products.argmax(axis=-1)
    chunk = best[0] // CHUNK * CHUNK
    rows = [v for v in range(chunk, min(chunk + CHUNK, 1600)) if v not in best]
    of_tokens = np.array_split(head.rng.choice(rows, FEW + many, replace=False), tokens)
    head.upper[:] = -LARGE
    for t, shown in enumerate(of_tokens):
        head.upper[t, shown] = LARGE
        head.values[:, t], head.indices[:, t] = -1, shown[0]
    index, value = head.run()
    if many:
        assert index[0] == best[0]
    else:
        expected = [shown[head.products[t, shown].argmax()] for t, shown in enumerate(of_tokens)]
        np.testing.assert_array_equal(index, expected)
        np.testing.assert_allclose(value, head.products[np.arange(tokens), expected], rtol=1e-5)


@pytest.mark.parametrize("bound", ["close", "none"])
@pytest.mark.parametrize("rows", [(100, 101), (3, 500), (70, 130), (40, 600), (511, 512), (20, 530, 1599)], ids=str)
def test_the_first_of_equals(bound, rows):
    head = Head(5, 1600, 192)
    for row in rows:
        head.weight[row] = head.x.astype(np.float32).sum(axis=0) / 8
    head.refresh()
    assert {*head.products.argmax(axis=-1)} == {rows[0]}
    for guess in (rows[0], rows[-1]):
        head.values[guess // PIECE], head.indices[guess // PIECE] = LARGE, guess
        if bound == "none":
            head.upper[:] = LARGE
        head.check()
        head.values[guess // PIECE] = -np.inf


@pytest.mark.parametrize("bound", ["close", "none"])
@pytest.mark.parametrize("limit", [1, 100, CHUNK, 1000, 1599, 1600, 5000])
@pytest.mark.parametrize("behind", ["loud", "nan"])
def test_limits(bound, limit, behind):
    """Rows behind the limit are never found, not even where they are the guess."""
    head = Head(5, 1600, 192)
    if behind == "loud":
        head.weight[limit:] = np.resize(head.x * 8, head.weight[limit:].shape)
    else:
        head.weight[limit:] = np.nan
    head.refresh()
    if behind == "nan":
        head.values[limit // PIECE + 1 :], head.indices[limit // PIECE + 1 :] = LARGE, 1599
    if bound == "none":
        head.upper[:] = LARGE
    head.check(limit)
    head.check(jnp.int32(limit))


@pytest.mark.parametrize("limit", [0, -5, -(2**31)])
@pytest.mark.parametrize("bound", [LARGE, np.nan])
def test_no_row_counts(limit, bound):
    head = Head(5, 1000, 192)
    head.upper[:] = bound
    index, value = head.run(jnp.int32(limit))
    np.testing.assert_array_equal(value, -np.inf)
    assert ((index >= 0) & (index < 1000)).all()


@pytest.mark.parametrize("bound", ["close", "none"])
def test_a_token_that_is_nan(bound):
    head = Head(20, 1600, 192)
    head.x[6, 17] = head.x[18] = np.nan
    if bound == "none":
        head.upper[:] = LARGE
    _, value = head.check(but=(6, 18))
    assert np.isnan(value[[6, 18]]).all()


def test_a_token_that_is_nan_is_not_searched():
    """Such are rows of padding. If it had candidates, all rows would be multiplied, and the hidden ones found."""
    head = Head(5, 1600, 192)
    best = head.products.argmax(axis=-1)
    head.upper[np.arange(5), best] = -LARGE
    head.values[best // PIECE, np.arange(5)] = -np.inf
    head.x[2], head.upper[2], head.values[:, 2] = np.nan, np.nan, np.nan
    index, value = head.run()
    head.products[np.arange(5), best] = -np.inf
    assert np.isnan(value[2])
    np.testing.assert_array_equal(np.delete(index, 2), np.delete(head.products.argmax(axis=-1), 2))


@pytest.mark.parametrize("bound", ["close", "none"])
@pytest.mark.parametrize("row", [0, 300, 1590])
def test_a_row_that_is_nan(bound, row):
    """It is a candidate of three tokens, whose product is NaN; with others it is not multiplied."""
    head = Head(20, 1600, 192)
    head.weight[row, 3] = np.nan
    head.upper[[2, 9, 19], row] = np.nan, LARGE, np.inf
    head.products[:, row] = -np.inf
    if bound == "none":
        head.upper[:] = LARGE
        assert np.isnan(head.run()[1]).all()
    else:
        head.upper[np.delete(np.arange(20), [2, 9, 19]), row] = -LARGE
        head.values[row // PIECE] = -np.inf
        _, value = head.check(but=(2, 9, 19))
        assert np.isnan(value[[2, 9, 19]]).all()


def test_a_guess_whose_product_is_nan():
    head = Head(5, 1000, 192)
    head.weight[7] = np.nan
    head.values[0], head.indices[0] = LARGE, 7
    assert np.isnan(head.run()[1]).all()


def test_a_product_that_is_infinite():
    head = Head(5, 1000, 192)
    head.x[:, 0], head.weight[400, 0] = 1, np.inf
    head.products[:, 400] = np.inf
    head.upper[:, 400] = np.inf
    head.check()


@pytest.mark.parametrize("guess", ["wrong", "wild", "nan", "none"])
def test_guesses_that_are_wrong(guess):
    head = Head(20, 1600, 192)
    if guess == "wrong":
        head.indices[:, :20] = head.rng.integers(1600, size=head.indices[:, :20].shape)
    elif guess == "wild":  # rows that do not count, and a number that is no row
        head.values[::2], head.indices[::2] = -np.inf, 2**31 - 1
        head.values[1::4], head.indices[1::4] = np.nan, -(2**31)
    elif guess == "nan":
        head.values[:], head.indices[:] = np.nan, -1
    else:
        head.values[:], head.indices[:] = -np.inf, 2**30
    head.check()


def test_a_guess_that_is_nan_is_not_chosen():
    """Its row has a small product. A row that is NaN and has a small bound would become a candidate by it."""
    head = Head(5, 1600, 192)
    head.weight[0] = -head.x.astype(np.float32).sum(axis=0) / 8
    head.refresh()
    head.values[0], head.indices[0] = np.nan, 0
    head.weight[1000], head.upper[:, 1000], head.products[:, 1000] = np.nan, -1, -np.inf
    assert (head.products[:, 0] < -2).all()
    head.check()


def test_all_products_are_minus_infinity():
    head = Head(5, 1000, 192)
    head.x[:, 0], head.weight[:, 0] = 1, -np.inf
    head.upper[:] = -np.inf
    index, value = head.run()
    np.testing.assert_array_equal(value, -np.inf)
    np.testing.assert_array_equal(index, 0)


def test_no_tokens():
    index, value = run(
        *(jnp.zeros(shape, BF16) for shape in ((0, 192), (1000, 192), (16, 1000))),
        jnp.zeros((8, 16)),
        jnp.zeros((8, 16), jnp.int32),
        None,
    )
    assert (index.shape, index.dtype, value.shape, value.dtype) == ((0,), jnp.int32, (0,), F32)


@pytest.mark.parametrize(
    ("T", "V", "D", "P", "dtype"),
    [
        (16, 248320, 5120, 1940, BF16),
        (64, 248320, 5120, 1940, BF16),
        (1, 151936, 1032, 1187, jnp.float16),
        (33, 262144, 8192, 2048, BF16),
        (17, 50001, 5376, 1, BF16),
    ],
)
@pytest.mark.parametrize("limited", [False, True])
def test_lowers(T, V, D, P, dtype, limited):
    R, struct = -(-T // 16) * 16, jax.ShapeDtypeStruct
    given = struct((T, D), dtype), struct((V, D), dtype), struct((R, V), BF16), struct((P, R), F32)
    rest = struct((P, R), jnp.int32), *[struct((), jnp.int32)] * limited
    text = cuda_lowering(lambda *a: exact_largest(*a[:5], a[5] if limited else None), *given, *rest)
    assert text.count("xla.gpu.triton") == 2
