"""Every implementation of the addition and norm that this machine has, against numpy; and the layers that call it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from dflash_jax.models import projections
from dflash_jax.models.target import TargetModel
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import target_config
from dflash_jax.weights.parameters import build, parameters_of
from dflash_jax.weights.tables import checkpoint_table
from pallas_kernels import _compat, add_norm
from pallas_kernels.add_norm import triton
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, mesh_of
from tests.kernels.conftest import ON_GPU
from tests.pairs import TARGET, empty_cache

F16 = jnp.float16
EPS = 0.02  # of rows whose squares are 0.05 in the mean: felt
AS_WRITTEN = {"xla_allow_excess_precision": False}  # every rounding
TAPS = (0, 3)
by_dtype = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: jnp.dtype(d).name)


@pytest.fixture(params=["reference", "triton"])
def run(request):
    """One implementation, jitted, XLA held to the roundings as written."""
    interpret = request.param == "triton" and not ON_GPU
    f = functools.partial(add_norm, eps=EPS, implementation=request.param, interpret=interpret)
    options = {"static_argnames": "quantize", "compiler_options": AS_WRITTEN}
    return lambda *arguments, **more: jax.jit(f, **options)(*arguments, **more)


def operands(shape, *dtypes, seed=0):
    """x and y of one shape, and a weight."""
    rng = np.random.default_rng(seed)
    shapes = (shape, shape, shape[-1:])
    return [np.asarray(0.15 * rng.standard_normal(s), d) for s, d in zip(shapes, dtypes, strict=True)]


def expected(x, y, weight):
    """All roundings by ml_dtypes, the mean of the squares in float64."""
    total = (x.astype(np.float32) + y.astype(np.float32)).astype(np.promote_types(x.dtype, y.dtype))
    wide = total.astype(np.float64)
    unit = (wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + EPS)).astype(np.float32)
    if np.promote_types(total.dtype, weight.dtype) == total.dtype:  # else only the product is rounded
        unit = unit.astype(total.dtype).astype(np.float32)
    return total, (weight.astype(np.float32) * unit).astype(total.dtype)


def assert_same(found, wanted):
    """Sums must match bit for bit, norms except for the order in which squares were summed."""
    (total, normed), (wanted_total, wanted_normed) = map(np.asarray, found), wanted
    assert (total.dtype, normed.dtype) == (wanted_total.dtype, wanted_normed.dtype)
    np.testing.assert_array_equal(total, wanted_total)
    if normed.dtype == np.float32 and total.dtype == np.float32:
        np.testing.assert_allclose(normed, wanted_normed, rtol=1e-6)
    else:  # a rounding that is missed or added moves every third number
        assert np.mean(normed != wanted_normed) < 0.01
    np.testing.assert_allclose(normed.astype(np.float32), wanted_normed.astype(np.float32), rtol=0.01)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 4096), (5, 96), (2, 3, 64), (3, 1, 2, 160), (1000,)], ids=str)
def test_sum_and_norm(run, shape, dtype):
    arguments = operands(shape, dtype, dtype, dtype)
    assert_same(run(*arguments), expected(*arguments))


@pytest.mark.parametrize("dtypes", [(BF16, BF16, F32), (F32, F32, BF16), (BF16, F32, F32)], ids=str)
def test_sums_promote_and_wider_weights_round_once(run, dtypes):
    arguments = operands((5, 96), *dtypes)
    assert_same(run(*arguments), expected(*arguments))


def test_what_is_added_may_come_with_scales(run):
    x, y, weight = operands((2, 3, 96), BF16, BF16, BF16)
    rng = np.random.default_rng(1)
    of_tokens, of_columns = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((2, 3), (96,)))
    scaled = (y.astype(np.float32) * of_tokens[..., None] * of_columns).astype(y.dtype)
    assert_same(run(x, y, weight, y_scales=(of_tokens, of_columns)), expected(x, scaled, weight))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_parts_are_summed_and_rounded_first(run, parts, scaled):
    x, _, weight = operands((2, 3, 96), BF16, BF16, BF16)
    rng = np.random.default_rng(2)
    y = rng.standard_normal((parts, 2, 3, 96)).astype(np.float32)
    scales = tuple(rng.uniform(0.5, 2, shape).astype(np.float32) for shape in ((2, 3), (96,))) if scaled else None
    added = y.sum(axis=0)
    if scales is not None:
        added = added * scales[0][..., None] * scales[1]
    assert_same(run(x, y, weight, y_scales=scales), expected(x, added.astype(BF16), weight))


@pytest.mark.parametrize("shape", [(2, 3, 96), (5, 4096)], ids=str)
@by_dtype
def test_norms_in_fp8(run, shape, dtype):
    x, y, weight = operands(shape, dtype, dtype, dtype)
    weight[7] = 1e-3  # as small as e4m3 knows
    total, (numbers, scales) = run(x, y, weight, quantize=True)
    wanted_total, wanted = expected(x, y, weight)
    np.testing.assert_array_equal(total, wanted_total)
    assert (numbers.dtype, numbers.shape, scales.dtype, scales.shape) == (E4M3, shape, F32, shape[:-1])
    largest = np.abs(wanted.astype(np.float32)).max(axis=-1)
    np.testing.assert_allclose(scales, largest / 448, rtol=0.01)
    found = np.asarray(numbers, np.float32) * np.asarray(scales)[..., None]
    off = np.abs(found - wanted.astype(np.float32))
    assert (off <= 2**-4 * 1.1 * np.abs(wanted.astype(np.float32)) + 2**-10 * np.asarray(scales)[..., None]).all()
    assert (np.abs(np.asarray(numbers, np.float32)).max(axis=-1) == 448).all()


def test_a_broken_row_breaks_no_other(run):
    x, y, weight = operands((2, 3, 96), BF16, BF16, BF16)
    clean = run(x, y, weight)
    x[0, 1, 7], y[1, 2, 95] = np.nan, np.inf
    broken = np.array([[False, True, False], [False, False, True]])
    for found, before in zip(run(x, y, weight), clean, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[~broken], np.asarray(before)[~broken])
        assert not np.isfinite(np.asarray(found, np.float32)[broken]).all(axis=-1).any()


def test_zeros_stay_zeros(run):
    x, _, weight = operands((4, 96), BF16, BF16, BF16)
    for found in run(x, -x, weight):
        assert (np.asarray(found) == 0).all()


def test_nothing_is_written_behind_the_end_of_a_row():
    """Into wider rows: the interpreter drops what leaves the array, and a GPU would write it into the next row."""
    x, y, weight = operands((2, 96), F32, F32, F32)
    found = _compat.triton_call(
        functools.partial(triton._add_norm, eps=EPS),
        grid=(2,),
        out_shape=[jax.ShapeDtypeStruct((2, 128), F32)] * 2,
        num_warps=1,
        num_stages=1,
        interpret=True,
        name="add_norm",
    )(x, y[None], weight)
    for array, wanted in zip(found, expected(x, y, weight), strict=True):
        np.testing.assert_allclose(array[:, :96], wanted, rtol=1e-6)
        assert np.isnan(array[:, 96:]).all()  # as the interpreter makes them


def test_no_tokens(run):
    total, normed = run(*operands((2, 0, 64), BF16, BF16, F32))
    assert (total.shape, total.dtype, normed.shape, normed.dtype) == ((2, 0, 64), BF16, (2, 0, 64), BF16)
    _, (numbers, scales) = run(*operands((2, 0, 64), BF16, BF16, F32), quantize=True)
    assert (numbers.shape, numbers.dtype, scales.shape, scales.dtype) == ((2, 0, 64), E4M3, (2, 0), F32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros((1, 64), np.float32)}, r"x and y must be alike, .*; got \[2, 64\], \[1, 64\] and \[64\]"),
        ({"y": np.zeros((3, 1, 64), np.float32)}, r"x and y must be alike, .*; got \[2, 64\], \[1, 64\] and \[64\]"),
        ({"weight": np.zeros(1, np.float32)}, r"and weight \[D\]; got \[2, 64\], \[2, 64\] and \[1\]"),
        ({"y": np.zeros((2, 64), np.int32)}, "must be floating; got float32, int32 and float32"),
        ({"y_scales": (np.ones(3), np.ones(64))}, r"y_scales must be \[\*T\] and \[D\]; got \[3\] and \[64\]"),
        ({"implementation": "mosaic"}, "implementation must be 'triton', 'reference' or None; got 'mosaic'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, y, weight = operands((2, 64), F32, F32, F32)
    with pytest.raises(ValueError, match=message):
        add_norm(**({"x": x, "y": y, "weight": weight, "eps": EPS} | change))


def shapes_of(shape, dtype=BF16):
    return [jax.ShapeDtypeStruct(s, dtype) for s in (shape, shape, shape[-1:])]


def test_triton_refuses_in_a_sentence(monkeypatch):
    wide = shapes_of((2, 70000))
    with pytest.raises(NotImplementedError, match="must be at most 65536; this is 70000"):
        jax.eval_shape(functools.partial(add_norm, eps=EPS, implementation="triton"), *wide)
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    assert "triton" not in cuda_lowering(functools.partial(add_norm, eps=EPS), *wide)  # and is not picked then


@by_dtype
@pytest.mark.parametrize("shape", [(1, 1, 4096), (64, 16, 5120), (1, 8192, 2560), (3, 64)], ids=str)
def test_lowers(shape, dtype):
    f = functools.partial(add_norm, eps=EPS, implementation="triton")
    assert "xla.gpu.triton" in cuda_lowering(f, *shapes_of(shape, dtype))
    of_tokens, of_columns = (jax.ShapeDtypeStruct(s, F32) for s in (shape[:-1], shape[-1:]))

    def with_scales(x, y, weight, *scales):
        return f(x, y, weight, y_scales=scales, quantize=True)

    x, y, weight = shapes_of(shape, dtype)
    for given in (y, jax.ShapeDtypeStruct((2, *shape), F32)):
        assert "xla.gpu.triton" in cuda_lowering(with_scales, x, given, weight, of_tokens, of_columns)


@pytest.mark.parametrize(("capability", "kernel"), [((9, 0), True), ((8, 9), True), ((8, 0), False), (None, False)])
def test_the_public_function_picks(monkeypatch, capability, kernel):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    text = cuda_lowering(lambda *arguments: add_norm(*arguments, EPS), *shapes_of((4, 256)))  # traced anew
    assert ("xla.gpu.triton" in text) == kernel


@pytest.mark.parametrize("split", ["x", "y", "xy", ""])
def test_sharded_lowering_knows_what_varies(split):
    """With check_vma on, as users run it: what varies over the mesh in any operand varies in the outputs."""
    rows = [Spec("tp") if name in split else Spec() for name in "xy"]
    shapes = [jax.ShapeDtypeStruct((32 if spec == Spec("tp") else 8, 256), BF16) for spec in rows]
    f = functools.partial(add_norm, eps=EPS, implementation="triton")
    shard = functools.partial(jax.shard_map, f, mesh=mesh_of(4), in_specs=(*rows, Spec()))

    def lower(out_specs):
        traced = jax.jit(shard(out_specs=out_specs)).trace(*shapes, jax.ShapeDtypeStruct((256,), BF16))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "xla.gpu.triton" in lower(Spec("tp") if split else Spec())
    if split:
        with pytest.raises(ValueError, match="out_specs"):
            lower(Spec())


@pytest.fixture(scope="module")
def model():
    """A target and its parameters."""
    config = target_config(TARGET)
    params = build(parameters_of(checkpoint_table(config), config), random_parameter)
    return config, params


def random_parameter(parameter):
    return jnp.asarray(0.2 * np.random.default_rng(math.prod(parameter.shape)).standard_normal(parameter.shape), F32)


def forward(config, mesh, params):
    """Last hidden states and taps of some tokens."""
    tokens = jnp.array([[3, 1, 4, 1, 5, 9]], jnp.int32)
    bound = TargetModel(config, AUTOMATIC if mesh is None else Devices(Mesh(mesh))).bind({"params": params})
    return bound(tokens, jnp.arange(tokens.size)[None], empty_cache(config, tokens.size), TAPS)[:2]


@pytest.mark.parametrize("devices", [1, 4])
def test_layers_on_a_mesh_say_what_they_say_without_one(monkeypatch, model, devices):
    config, params = model
    wanted = jax.jit(functools.partial(forward, config, None))(params)
    monkeypatch.setattr(projections, "add_norm", functools.partial(add_norm, interpret=not ON_GPU))
    found = jax.jit(functools.partial(forward, config, mesh_of(devices)))(params)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def kernels_of(jaxpr, sharded=False):
    """For each kernel of a program, whether it is inside a shard_map."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield sharded
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from kernels_of(inner, sharded or equation.primitive.name == "shard_map")


@pytest.mark.parametrize("devices", [None, 1, 4])
def test_layers_run_two_kernels_each_on_a_mesh_alone(monkeypatch, model, devices):
    """Training (no mesh) needs plain operations; over several GPUs XLA could not split a kernel outside a shard_map."""
    config, params = model
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    traced = jax.jit(functools.partial(forward, config, devices and mesh_of(devices))).trace(params)
    kernels = 2 * config.num_hidden_layers if devices else 0
    assert list(kernels_of(traced.jaxpr.jaxpr)) == [devices == 4] * kernels
    if devices:
        assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
