"""Every implementation of the argmax of a head's logits that this machine has, against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from dflash_jax.models.projections import likeliest_product
from dflash_jax.parallel.collectives import AUTOMATIC, Devices, likeliest
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.formats.fp8 import Quantized, to_e4m3
from dflash_jax.weights.formats.screened import ScreenedHead
from dflash_jax.weights.formats.transposed import Transposed
from dflash_jax.weights.formats.weight import logits_of
from pallas_kernels import _compat, largest_product, screen_of
from pallas_kernels.largest_product import mosaic
from pallas_kernels.largest_product.mosaic import FEW, TILES
from pallas_kernels.lib.products import STEP
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, mesh_of
from tests.kernels.conftest import ON_GPU

F16 = jnp.float16
BOTH = ["reference", pytest.param("mosaic", marks=pytest.mark.gpu)]


def operands(tokens, rows, width, dtype, seed=0):
    """Tokens, a head, and its scales where it is fp8."""
    rng = np.random.default_rng(seed)
    x, weight = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((*tokens, width), (rows, width))
    )
    return x, weight, jnp.asarray(rng.uniform(0.5, 2, rows), F32) if dtype == E4M3 else None


def products(x, weight, scales):
    """Products in float64 of the rounded inputs."""
    wide = [np.asarray(array.astype(F32)).astype(np.float64) for array in (x, weight)]
    found = np.einsum("...d,vd->...v", *wide)
    return found if scales is None else found * np.asarray(scales, np.float64)


def check(found, x, weight, scales):
    """The value is that of its row, and no other is larger by more than rounding."""
    index, value = map(np.asarray, found)
    wanted = products(x, weight, scales)
    assert (index.dtype, value.dtype) == (np.int32, np.float32)
    # Hopper adds up products of fp8 with 14 bits (arXiv 2412.19437, section 3.3.2), whoever asks for them.
    off = (2e-3 if ON_GPU and x.dtype == E4M3 else 2e-4) * np.abs(wanted).max()
    np.testing.assert_allclose(value, np.take_along_axis(wanted, index[..., None], -1)[..., 0], atol=off)
    np.testing.assert_allclose(value, wanted.max(axis=-1), atol=off)
    assert (index == wanted.argmax(axis=-1)).mean() > (0.9 if ON_GPU and x.dtype == E4M3 else 0.95)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize(("tokens", "rows"), [((7,), 264), ((2, 150), 1000), ((3, 5), 256)], ids=str)
def test_largest(implementation, tokens, rows, dtype):
    arguments = operands(tokens, rows, 1024, dtype)
    check(jax.jit(functools.partial(largest_product, implementation=implementation))(*arguments), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [FEW, *TILES], ids=lambda tile: f"{tile.rows}x{tile.columns}")
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: jnp.dtype(d).name)
def test_every_tile_of_the_kernel(tile, dtype):
    """So many tiles that each CTA has several, from several blocks of tokens, the last ones not full."""
    arguments = operands((300,), 70_008, 1024, dtype)
    check(mosaic.largest_product(*arguments, tile=tile), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 1, 256, 257, 700])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: jnp.dtype(d).name)
def test_only_the_first_tokens_are_looked_for(dtype, length):
    x, weight, scales = operands((4, 175), 70_008, 1024, dtype)
    index, value = jax.jit(mosaic.largest_product)(x, weight, scales, jnp.int32(length))
    first = [array.reshape(-1)[:length] for array in (index, value)]
    if length:
        check(first, x.reshape(700, -1)[:length], weight, scales)
    else:
        assert (index.shape, value.shape) == (x.shape[:2], x.shape[:2])


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: jnp.dtype(d).name)
def test_the_first_of_several_is_found_and_nothing_beyond_the_end(implementation, dtype):
    """All products negative: zeros from behind the last one would win."""
    weight = -jnp.ones((264, 1024), dtype)
    scales = jnp.ones(264, F32) if dtype == E4M3 else None
    weight = weight.at[jnp.array([37, 40, 263])].set(-0.5)
    index, value = largest_product(jnp.ones((9, 1024), dtype), weight, scales, implementation=implementation)
    np.testing.assert_array_equal(index, 37)
    np.testing.assert_array_equal(value, -512)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("limit", [1, 100, 997, 1000])
def test_padding_behind_the_limit_is_never_found(implementation, dtype, limit):
    """Also where it is the largest, or not a number; all that counts is negative, as zeros are not."""
    x, weight, scales = operands((2, 40), 1000, 1024, dtype)
    x, weight = abs(x), -abs(weight)
    loud = weight.at[limit:].set(8.0).at[limit + 1 :: 3].set(jnp.nan)
    found = largest_product(x, loud, scales, None, limit, implementation=implementation)
    check(found, x, weight[:limit], scales if scales is None else scales[:limit])


@pytest.mark.parametrize("implementation", BOTH)
def test_nothing_counts_on_a_device_that_has_only_padding(implementation):
    x, weight, _ = operands((9,), 264, 1024, BF16)
    for limit in (0, -5):
        _, value = largest_product(x, weight, None, None, jnp.int32(limit), implementation=implementation)
        np.testing.assert_array_equal(value, -np.inf)


@pytest.mark.parametrize("implementation", BOTH)
def test_nan_is_the_largest_and_breaks_no_other_row(implementation):
    x, weight, _ = operands((9,), 264, 1024, BF16)
    run = functools.partial(largest_product, implementation=implementation)
    clean = run(x, weight)
    index, value = run(x.at[3, 17].set(jnp.nan), weight)
    assert np.isnan(value[3])
    assert 0 <= index[3] < 264
    for found, before in zip((index, value), clean, strict=True):
        np.testing.assert_array_equal(np.delete(found, 3), np.delete(before, 3))
    index, value = run(x, weight.at[150].set(jnp.nan))
    assert np.isnan(value).all()
    assert ((index >= 0) & (index < 264)).all()


def shapes(tokens, rows, width, dtype):
    struct = jax.ShapeDtypeStruct
    scales = struct((rows,), F32) if dtype == E4M3 else None
    return struct((*tokens, width), dtype), struct((rows, width), dtype), scales


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("tile", [FEW, *TILES], ids=lambda tile: f"{tile.rows}x{tile.columns}")
def test_lowers(tile, dtype):
    f = functools.partial(mosaic.largest_product, tile=tile)
    given = shapes((64, 15), 151_936, 4096, dtype)
    assert "mosaic_gpu" in cuda_lowering(f, *given)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    assert "mosaic_gpu" in cuda_lowering(f, *given, number)
    assert "mosaic_gpu" in cuda_lowering(f, *given, None, number)
    assert tile.stages * tile.step < mosaic.MIN_STEPS * STEP


def test_no_tokens():
    index, value = mosaic.largest_product(*operands((2, 0), 256, 1024, BF16))
    assert (index.shape, value.shape) == ((2, 0), (2, 0))


@pytest.mark.parametrize(
    ("capability", "tokens", "dtype", "kernel"),
    [
        ((9, 0), (16, 16), BF16, True),
        ((9, 0), (4, 15), E4M3, True),
        ((9, 0), (1, 15), E4M3, True),
        ((9, 0), (4, 16), BF16, True),
        ((9, 0), (6, 16), BF16, False),
        ((9, 0), (16, 16), F32, False),
        ((9, 0), (1, 16), BF16, False),
        ((10, 0), (16, 16), BF16, False),
        (None, (16, 16), BF16, False),
    ],
)
def test_the_public_function_picks(monkeypatch, capability, tokens, dtype, kernel):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    text = cuda_lowering(lambda *arguments: largest_product(*arguments), *shapes(tokens, 151_936, 4096, dtype))
    assert ("mosaic_gpu" in text) == kernel


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "message"),
    [
        (256, 1056, BF16, "a width that 64 divides, of at least 512; this is 1056"),
        (256, 512, E4M3, "a width that 128 divides, of at least 1024; this is 512"),
        (260, 1024, BF16, "a number of rows that 8 divides, of at least 256; this is 260"),
        (248, 1024, BF16, "of at least 256; this is 248"),
        (256, 1024, F32, "takes bf16, f16, e4m3 and int8; this is float32"),
    ],
)
def test_mosaic_refuses_in_a_sentence(rows, width, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(largest_product, implementation="mosaic"), *shapes((8,), rows, width, dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": jnp.zeros((8, 32))}, r"x must be \[\*T, D\] and weight \[V, D\]; got \[4, 64\] and \[8, 32\]"),
        ({"weight": jnp.zeros((8, 64), BF16)}, "of one dtype; got float32 and bfloat16"),
        ({"scales": jnp.zeros(7)}, r"scales must be float32 and \[V\], V = 8; got float32 and \[7\]"),
        ({"scales": jnp.zeros(8, BF16)}, "got bfloat16 and"),
        ({"implementation": "triton"}, "implementation must be 'mosaic', 'reference' or None; got 'triton'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        largest_product(**({"x": jnp.zeros((4, 64)), "weight": jnp.zeros((8, 64))} | change))


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=lambda d: jnp.dtype(d).name)
def test_sharded_lowering_knows_what_varies(dtype):
    """With check_vma on, as users run it: what is found varies over the mesh, and says so."""
    call = functools.partial(largest_product, implementation="mosaic")
    given = [argument for argument in shapes((32,), 8192, 1024, dtype) if argument is not None]
    specs = (Spec(), *[Spec("tp")] * (len(given) - 1))
    shard = functools.partial(jax.shard_map, call, mesh=mesh_of(4), in_specs=specs)

    def lower(out_specs):
        return jax.jit(shard(out_specs=out_specs)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lower(Spec("tp"))
    with pytest.raises(ValueError, match="out_specs"):
        lower(Spec())


@pytest.mark.in_turns(36)
@pytest.mark.parametrize("rows", [64, 63], ids=["split", "whole"])
@pytest.mark.parametrize("kind", ["array", "quantized", "transposed", "screened"])
@pytest.mark.parametrize("limit", [None, 50, 7])
@pytest.mark.parametrize("devices", [None, 1, 4])
def test_heads_of_all_kinds_give_the_token_of_their_logits(devices, kind, rows, limit):
    if devices == 4 and ON_GPU:
        pytest.skip("the CPU suite has four devices")
    x, weight, _ = operands((2, 5), rows, 16, F32)
    head = {
        "array": weight,
        "quantized": Quantized(*to_e4m3(weight, 1)),
        "transposed": Transposed(weight.T, weight.shape),
        "screened": ScreenedHead(weight, screen_of(weight)),
    }[kind]
    wanted, values = likeliest(logits_of(x, head)[..., :limit])
    over = AUTOMATIC if devices is None else Devices(Mesh(mesh_of(devices)))
    found, scores = jax.jit(lambda x, head: likeliest_product(x, head, over, limit=limit))(x, head)
    np.testing.assert_array_equal(found, wanted)
    if kind != "quantized":
        np.testing.assert_allclose(scores, values, rtol=1e-5)
