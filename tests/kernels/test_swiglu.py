"""Every implementation of the first half of an MLP that this machine has, against numpy; and layers that call it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from dflash_jax.models.projections import project_swiglu
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.formats import array
from pallas_kernels import _compat, swiglu
from pallas_kernels.lib.products import Plan
from pallas_kernels.swiglu import mosaic
from pallas_kernels.swiglu.mosaic import TILES, TILES_OF_64, best_plan
from tests.kernels.cases import BF16, F32, cuda_lowering, error, mesh_of, operands, shapes

F16 = jnp.float16
QWEN3_8B = (16, 2, 768, 4096)


def expected(x, weight):
    """Hidden units in float64, with products rounded to the dtype."""
    wide = [np.asarray(array).astype(np.float64) for array in (x, weight)]
    products = np.einsum("...d,ehid->...ehi", *wide).astype(x.dtype).astype(np.float64)
    gate, up = products[..., 0, :], products[..., 1, :]
    return (gate / (1 + np.exp(-gate)) * up).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 1e-2), (F16, 2e-3), (F32, 1e-5)], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (5,)], ids=str)
def test_reference(tokens, dtype, most):
    x, weight = operands(tokens, (3, 2, 8, 64), dtype)
    found = jax.jit(functools.partial(swiglu, implementation="reference"))(x, weight)
    assert (found.dtype, found.shape) == (dtype, (*tokens, 24))
    assert error(found, expected(x, weight)) < most


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES + TILES_OF_64, ids=lambda tile: f"{tile.rows}x{tile.columns}x{tile.step}")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("tokens", "parts", "units", "steps"),
    [
        ((256,), 2, 192, 8),  # whole tiles
        ((3, 100), 3, 160, 2),  # neither tokens nor units fill theirs
        ((7,), 1, 32, 1),  # one step, padded
        ((2, 1040), 16, 96, 3),  # more tiles than multiprocessors, and two bands of them
    ],
    ids=str,
)
def test_kernel(tile, tokens, parts, units, steps, dtype):
    shape = (parts, 2, units, steps * tile.depth(dtype))
    x, weight = operands(tokens, shape, dtype)
    found = mosaic.swiglu(x, weight, tile=tile)
    assert (found.dtype, found.shape) == (dtype, (*tokens, shape[0] * shape[2]))
    assert error(found, expected(x, weight)) < 1e-2


@pytest.mark.gpu
def test_kernel_reads_and_writes_nothing_else():
    """A token that is NaN breaks itself alone, and nothing that lies behind the last token is written."""
    x, weight = operands((300,), (2, 2, 96, 256))
    clean = np.asarray(mosaic.swiglu(x, weight), np.float32)
    found = np.asarray(mosaic.swiglu(x.at[17].set(jnp.nan), weight), np.float32)
    assert np.isnan(found[17]).all()
    np.testing.assert_array_equal(np.delete(found, 17, axis=0), np.delete(clean, 17, axis=0))


@pytest.mark.parametrize(("tokens", "rows"), [(20, 64), (64, 64), (128, 128), (256, 128), (1024, 256), (8192, 256)])
def test_tiles_of_qwen3_8b_fill_the_card(tokens, rows):
    plan = best_plan(*shapes((tokens,), QWEN3_8B))
    assert (plan.tile.rows, plan.tile.columns) == (rows, 2 * 96)
    assert plan.fill(plan.blocks * rows, 24576) > 0.96


def test_every_tile_has_its_place():
    plan = Plan(TILES[0], blocks=19, pieces=6, steps=1)  # three bands, the last of three blocks
    found = {tuple(int(n) for n in plan.place(i, plan.blocks)) for i in range(plan.count)}
    assert found == {(block, piece) for block in range(19) for piece in range(6)}


@pytest.mark.parametrize("tile", TILES + TILES_OF_64, ids=lambda tile: f"{tile.rows}x{tile.columns}x{tile.step}")
def test_lowers(tile):
    for tokens, weight in (((16, 16), QWEN3_8B), ((3, 5), (3, 2, 160, 64))):
        f = functools.partial(mosaic.swiglu, tile=tile)
        assert "mosaic_gpu" in cuda_lowering(f, *shapes(tokens, weight))


@pytest.mark.parametrize(
    ("capability", "tokens", "dtype", "kernel"),
    [
        ((9, 0), (64, 16), BF16, True),
        ((9, 0), (4, 16), BF16, True),
        ((9, 0), (8, 16), BF16, True),
        ((9, 0), (7, 9), BF16, False),  # a row of a tile would be copied from beyond the end
        ((9, 0), (0, 16), BF16, False),
        ((9, 0), (64, 16), F32, False),
        ((9, 0), (16, 16), BF16, True),
        ((9, 0), (24, 16), BF16, False),  # between what was measured
        ((9, 0), (66, 16), BF16, False),  # a fifth block of tokens, nearly empty
        ((10, 0), (64, 16), BF16, False),
        (None, (64, 16), BF16, False),
    ],
)
def test_the_public_function_picks(monkeypatch, capability, tokens, dtype, kernel):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    text = cuda_lowering(lambda *arguments: swiglu(*arguments), *shapes(tokens, QWEN3_8B, dtype))  # traced anew
    assert ("swiglu_kernel" in text) == kernel


@pytest.mark.parametrize(
    ("tokens", "weight", "dtype", "message"),
    [
        ((8,), (1, 2, 32, 96), BF16, "a width that 64 divides, .*; these are 96 and 32"),
        ((8,), (1, 2, 40, 64), BF16, "parts of the hidden units that 32 divides; these are 64 and 40"),
        ((8,), (1, 2, 32, 64), F32, "takes bf16 and f16; this is float32"),
    ],
)
def test_mosaic_refuses_in_a_sentence(tokens, weight, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(swiglu, implementation="mosaic"), *shapes(tokens, weight, dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": jnp.zeros((2, 8, 64))}, r"x must be \[\*T, D\] and weight \[E, 2, I, D\]; got \[4, 64\] and"),
        ({"weight": jnp.zeros((1, 2, 8, 32))}, r"got \[4, 64\] and \[1, 2, 8, 32\]"),
        ({"weight": jnp.zeros((1, 2, 8, 64), BF16)}, "of one dtype; got float32 and bfloat16"),
        (
            {"implementation": "cuda"},
            "implementation must be 'mosaic', 'weight_first', 'triton', 'reference' or None; got 'cuda'",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        swiglu(**({"x": jnp.zeros((4, 64)), "weight": jnp.zeros((1, 2, 8, 64))} | change))


def test_no_tokens():
    x, weight = operands((2, 0), (1, 2, 32, 64))
    assert mosaic.swiglu(x, weight).shape == (2, 0, 32)
    assert swiglu(x, weight).shape == (2, 0, 32)


def test_sharded_lowering_knows_what_varies():
    """With check_vma on, as users run it: the hidden units vary over the mesh, and say so."""
    call = functools.partial(swiglu, implementation="mosaic")
    shard = functools.partial(jax.shard_map, call, mesh=mesh_of(4), in_specs=(Spec(), Spec("tp")))

    def lower(out_specs):
        traced = jax.jit(shard(out_specs=out_specs)).trace(*shapes((32,), QWEN3_8B))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lower(Spec(None, "tp"))
    with pytest.raises(ValueError, match="out_specs"):
        lower(Spec())


@pytest.mark.parametrize("parts", [8, 3])
@pytest.mark.parametrize("devices", [1, 4])
def test_layers_on_a_mesh_say_what_they_say_without_one(devices, parts):
    x, weight = operands((2, 5), (parts, 2, 16, 64), F32)
    wanted = project_swiglu(x, weight, None, AUTOMATIC)
    found = jax.jit(lambda x, w: project_swiglu(x, w, None, Devices(Mesh(mesh_of(devices)))))(x, weight)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("devices", "called"), [(None, 0), (1, 1), (4, 1)])
def test_layers_call_it_on_a_mesh_alone(monkeypatch, devices, called):
    """Training needs operations that can be differentiated, and kernels add no bias."""
    calls = []
    monkeypatch.setattr(array, "swiglu", lambda x, w: calls.append(1) or swiglu(x, w))
    x, weight = operands((2, 5), (8, 2, 16, 64), F32)
    over = AUTOMATIC if devices is None else Devices(Mesh(mesh_of(devices)))
    project_swiglu(x, weight, None, over)
    assert len(calls) == called
    bias = jnp.ones((8, 2, 16))
    biased = project_swiglu(x, weight, bias, over)
    assert len(calls) == called
    assert float(jnp.abs(biased - project_swiglu(x, weight, 0 * bias, over)).max()) > 0.1
