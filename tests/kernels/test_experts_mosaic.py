"""The Mosaic kernels of the routed experts: on a GPU the dense formula, anywhere their grouping and lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels.experts import experts, mosaic, mosaic_rows
from pallas_kernels.experts.reference import _hidden, _product
from pallas_kernels.lib import products
from tests.kernels.cases import BF16, F32, cuda_lowering, error, mesh_of
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_experts import QWEN35_35B, QWEN35_122B, SHARDED, expected, routed, shapes

F16 = jnp.float16


def by_rows(x, grouped, gate_up, down):
    """What the two products give, from plain JAX: a loop over the blocks."""
    blocks = len(grouped.expert)
    rows = len(grouped.token) // blocks
    parts = np.full((blocks * rows, down.shape[1]), np.nan, np.float32)
    for block in range(int(grouped.used[0])):
        mine = slice(block * rows, (block + 1) * rows)
        expert = grouped.expert[block]
        is_pair = np.arange(rows) < grouped.rows[block]
        tokens = jnp.where(is_pair[:, None], x[jnp.where(is_pair, grouped.token[mine], 0)], jnp.nan)
        parts[mine] = _product(_hidden(tokens, gate_up[expert]), down[expert])
    return jnp.asarray(parts)


def test_grouping():
    """Rows by expert, the products by plain JAX, and the sum: the dense formula; NaN where nobody should look."""
    x, gate_up, down, chosen, weights = routed((290,), 2, 3, 64, 128)
    grouped = jax.jit(functools.partial(mosaic_rows.group, experts=3, interpret=not ON_GPU))(chosen)
    touched = {int(e) for e in np.unique(chosen) if 0 <= e < 3}
    assert {*grouped.expert[: int(grouped.used[0])].tolist()} == touched
    assert int(grouped.rows[: int(grouped.used[0])].sum()) == np.isin(chosen, range(3)).sum()
    out = mosaic_rows.summed(by_rows(x, grouped, gate_up, down), grouped.place, chosen, weights, 3)
    assert error(out, expected(x, gate_up, down, chosen, weights)) < 2e-3


def test_bands():
    """An expert of 1,500 pairs has a band of 8 blocks and one of 4; every tile of every block comes once, by bands."""
    ids = np.random.default_rng(0).permutation(np.repeat([0, 2, 3, 9], [1500, 1, 128, 129]))  # 9 is none of 4
    cut = functools.partial(mosaic_rows.group, experts=4, interpret=not ON_GPU)
    grouped = jax.jit(cut)(jnp.asarray(ids[:, None], jnp.int32))
    used, pieces = int(grouped.used[0]), 3
    assert used == 14
    np.testing.assert_array_equal(grouped.band[:used], [0] * 8 + [8] * 4 + [12, 13])
    np.testing.assert_array_equal(grouped.length[:used], [8] * 8 + [4] * 4 + [1, 1])
    plan = products.Plan(mosaic.gate_up_tile(64), len(grouped.expert), pieces, 1)
    tiles = jnp.arange(used * pieces, dtype=jnp.int32)
    place = jax.vmap(functools.partial(mosaic._place, plan, grouped.band, grouped.length), (0, None))
    block, piece = place(tiles, used)
    assert len({*zip(block.tolist(), piece.tolist(), strict=True)}) == len(tiles)
    assert block[:9].tolist() == [*range(8), 0]
    assert piece[:9].tolist() == [0] * 8 + [1]
    assert set(block[:24].tolist()) == set(range(8))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "most"), [(BF16, 6e-3), (F16, 1e-3)], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "case",
    [
        ((3, 9), 8, 64, 64, 192),
        ((700,), 4, 8, 192, 320),
        ((2048,), 8, 64, 128, 256),
    ],
    ids=str,
)
def test_kernels(case, dtype, most):
    operands = routed(*case, dtype=dtype)
    wanted = expected(*operands)
    for _ in range(3):  # whoever reads what is not there yet may be lucky once
        assert error(mosaic.experts(*operands), wanted) < most


@pytest.mark.gpu
def test_a_token_breaks_no_other():
    x, gate_up, down, chosen, weights = routed((400,), 4, 8, 64, 128)
    clean = np.asarray(mosaic.experts(x, gate_up, down, chosen, weights), np.float32)
    broken = np.asarray(mosaic.experts(x.at[5].set(jnp.nan), gate_up, down, chosen, weights), np.float32)
    assert np.isnan(broken[5]).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(clean, 5, 0))


@pytest.mark.gpu
def test_all_pairs_skipped():
    x, gate_up, down, chosen, weights = routed((16,), 2, 4, 64, 64)
    assert not np.asarray(mosaic.experts(x, gate_up, down, jnp.full_like(chosen, -1), weights)).any()


@pytest.mark.parametrize("sizes", [QWEN35_35B, QWEN35_122B, (256, 64, 3072), (16, 192, 2048)], ids=str)
def test_lowers(sizes):
    """Also shards of a width, and widths that only narrow tiles divide."""
    text = cuda_lowering(lambda *operands: mosaic.experts(*operands), *shapes(8192, *sizes))
    assert text.count("@mosaic_gpu_v2") == 2


def test_sharded_lowering_knows_what_varies():
    def share(*operands):
        return jax.lax.psum(experts(*operands, implementation="mosaic"), "tp")

    shard = jax.shard_map(share, mesh=mesh_of(4), in_specs=SHARDED, out_specs=Spec())
    traced = jax.jit(shard).trace(*shapes(8192, *QWEN35_35B))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype", "message"),
    [
        (16, (64, 96, 64), BF16, "widths that 64 divides; these are 64 .* and 96"),
        (16, (64, 64, 64), F32, "take bf16 and f16; these are float32"),
    ],
)
def test_mosaic_refuses_in_a_sentence(tokens, sizes, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(experts, implementation="mosaic"), *shapes(tokens, *sizes, dtype=dtype))


@pytest.mark.parametrize("sizes", [QWEN35_35B, QWEN35_122B], ids=str)
def test_rings_are_deep(sizes):
    """The ring holds weights that are on their way: 48 KiB a multiprocessor and more keep the memory busy."""
    _, M, D = sizes
    for tile in mosaic.default_config(M, D):
        assert tile.stages * tile.columns * tile.step >= 48 << 10
        assert tile.stages >= 3
