"""The Mosaic product of some tokens: on a GPU against numpy, anywhere its plans and its lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import product
from pallas_kernels.product import mosaic
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, operands, shapes

F16 = jnp.float16


def expected(x, weight):
    x, weight = (np.asarray(array).astype(np.float64) for array in (x, weight))
    return x @ weight.T


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "out", "most"),
    [(BF16, None, 5e-3), (F16, None, 1e-3), (BF16, F32, 1e-5), (E4M3, BF16, 5e-3), (E4M3, F32, 2e-3)],
    ids=["bf16", "f16", "bf16-f32", "e4m3-bf16", "e4m3-f32"],
)
@pytest.mark.parametrize("tokens", [(1,), (3, 16), (64,), (5, 13), (128,), (200,)], ids=str)
@pytest.mark.parametrize("shape", [(4096, 1024), (112, 512), (5040, 2176)], ids=str)
def test_product(tokens, shape, dtype, out, most):
    """One consumer, two with half of the inputs each, two with all; whole tiles, one step of a ring, rows left over."""
    x, weight = operands(tokens, shape, dtype)
    wanted = expected(x, weight)
    for _ in range(3):  # whoever reads what is not there yet may be lucky once
        found = mosaic.product(x, weight, out)
        assert (found.dtype, found.shape) == (out or dtype, (*tokens, shape[0]))
        assert error(found, wanted) < most


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [50, 100])
def test_a_token_breaks_no_other(tokens):
    x, weight = operands((tokens,), (4096, 1024), BF16)
    clean = np.asarray(mosaic.product(x, weight), np.float32)
    broken = np.asarray(mosaic.product(x.at[17].set(jnp.nan), weight), np.float32)
    assert np.isnan(broken[17]).all()
    np.testing.assert_array_equal(np.delete(broken, 17, 0), np.delete(clean, 17, 0))


@pytest.mark.gpu
def test_programs_go_on_to_other_tiles(monkeypatch):
    """A device with five multiprocessors gives each CTA several tiles, and splits no inputs."""
    monkeypatch.setattr(mosaic._compat, "sm_count", lambda: 5)
    for tokens in (40, 90):  # other calls than those that are compiled for the whole device
        x, weight = operands((tokens,), (4096, 1024), BF16)
        assert not mosaic.best_plan(x, weight, BF16).is_one_round
        assert error(mosaic.product(x, weight), expected(x, weight)) < 5e-3


@pytest.mark.parametrize("tokens", [20, 64, 100, 128])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 12288)], ids=str)
def test_every_program_of_qwen3_8b_has_one_tile(tokens, shape):
    plan = mosaic.best_plan(*shapes((tokens,), shape), BF16)
    assert plan.is_one_round
    assert plan.clusters * plan.tile.splits == 128
    assert plan.tile.stages >= 6
    assert plan.tile.splits == (1 if tokens <= 64 else 2)


@pytest.mark.in_turns(12)
@pytest.mark.parametrize(
    ("dtype", "out"), [(BF16, BF16), (E4M3, BF16), (E4M3, F32)], ids=["bf16", "e4m3-bf16", "e4m3-f32"]
)
@pytest.mark.parametrize("tokens", [(4, 16), (8, 16), (13,), (200,)], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (5040, 2176), (10240, 1024), (33792, 512)], ids=str)
def test_lowers(tokens, shape, dtype, out):
    """Lowering refuses what a multiprocessor has no room for; a ring of one step would wait for itself."""
    given = shapes(tokens, shape, dtype)
    assert mosaic.best_plan(*given, out).tile.stages > 1
    assert "mosaic_gpu" in cuda_lowering(functools.partial(mosaic.product, dtype=out), *given)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4096, 4096), F32, "takes bf16, f16 and e4m3; this is float32"),
        ((4096, 4128), BF16, "a width that 64 divides, and rows that 16 divides; these are 4128 and 4096"),
        ((4104, 4096), E4M3, "a width that 128 divides, and rows that 16 divides; these are 4096 and 4104"),
    ],
)
def test_refuses_in_a_sentence(shape, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(product, dtype=BF16, implementation="mosaic"), *shapes((32,), shape, dtype))


def test_refuses_results_in_fp8():
    with pytest.raises(NotImplementedError, match="gives bf16, f16 and f32; float8_e4m3fn is asked for"):
        jax.eval_shape(functools.partial(product, implementation="mosaic"), *shapes((64,), (6144, 4096), E4M3))


def test_no_tokens():
    assert mosaic.product(*operands((2, 0), (96, 512), BF16)).shape == (2, 0, 96)
