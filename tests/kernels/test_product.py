"""Products of few tokens, plain and of an MLP's first half, by every implementation that this machine has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from dflash_jax.parallel.platform import compiler_options
from dflash_jax.weights.formats.weight import logits_of, project
from pallas_kernels import _compat, largest_product, product, split_product, swiglu
from pallas_kernels.lib.streams import Config
from pallas_kernels.product import reference, triton
from pallas_kernels.swiglu import triton as swiglu_triton
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of, operands, shapes
from tests.kernels.conftest import ON_GPU

F16 = jnp.float16
SMALL = Config(rows=32, depth=64, num_stages=2)
by_implementation = pytest.mark.parametrize("implementation", ["reference", "triton"])
by_dtype = pytest.mark.parametrize(("dtype", "most"), [(BF16, 5e-3), (F16, 1e-3)], ids=["bf16", "f16"])


def wide(*arrays):
    return [np.asarray(array).astype(np.float64) for array in arrays]


@by_implementation
@by_dtype
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (16,)], ids=str)
def test_product(implementation, tokens, dtype, most):
    x, weight = operands(tokens, (96, 512), dtype)
    interpret = implementation == "triton" and not ON_GPU
    found = jax.jit(functools.partial(product, implementation=implementation, interpret=interpret))(x, weight)
    assert (found.dtype, found.shape) == (dtype, (*tokens, 96))
    x, weight = wide(x, weight)
    assert error(found, x @ weight.T) < most


def _logits(x, weight):
    return logits_of(x[None], weight)[0]


def _likeliest(x, weight):
    return largest_product(x, weight, implementation="reference")[1][:, None]


@pytest.mark.parametrize("head", [_logits, _likeliest])
def test_one_row_does_not_have_the_weight_widened_in_memory(head):
    """XLA would: neither its CPUs' products nor cuBLAS have one of a matrix and a vector that widens."""
    x, weight = operands((1,), (4096, 512), BF16)
    compiled = jax.jit(head, compiler_options=compiler_options(jax.default_backend())).lower(x, weight).compile()
    assert "f32[4096,512]" not in compiled.as_text()
    wide_x, wide_weight = wide(x, weight)
    expected = wide_x @ wide_weight.T
    assert error(compiled(x, weight), expected if head is _logits else expected.max(-1, keepdims=True)) < 1e-5


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 5e-3), (F32, 2e-3 if ON_GPU else 1e-5)], ids=["bf16", "f32"])
def test_product_of_fp8(dtype, most):
    """Hopper adds up with 14 bits (arXiv 2412.19437, section 3.3.2)."""
    x, weight = operands((2, 3), (128, 1024), E4M3)
    found = jax.jit(functools.partial(product, dtype=dtype, implementation="reference"))(x, weight)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 128))
    x, weight = wide(x, weight)
    assert error(found, x @ weight.T) < most


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 1e-6), (E4M3, 1e-6 if not ON_GPU else 2e-3)], ids=["bf16", "e4m3"])
def test_parts_sum_up_to_the_product(dtype, most):
    x, weight = operands((2, 3), (128, 1024), dtype)
    parts = jax.jit(functools.partial(reference.split_product, splits=2))(x, weight)
    assert (parts.dtype, parts.shape) == (F32, (2, 2, 3, 128))
    x, weight = wide(x, weight)
    for part, half in zip(parts, (slice(512), slice(512, None)), strict=True):
        assert error(part, x[..., half] @ weight[:, half].T) < most


@pytest.mark.parametrize(
    ("capability", "tokens", "rows", "width", "dtype", "parts"),
    [
        ((9, 0), 256, 4096, 12288, BF16, 2),
        ((9, 0), 256, 4096, 12288, E4M3, 2),
        ((9, 0), 254, 4096, 12288, BF16, 1),
        ((9, 0), 256, 4096, 12288, F32, 1),
        ((9, 0), 256, 4096, 4096, BF16, 1),  # has a kernel
        ((9, 0), 128, 4096, 12288, BF16, 1),
        ((9, 0), 384, 4096, 12288, BF16, 1),
        ((9, 0), 256, 2048, 12288, BF16, 1),  # XLA may make more parts
        ((9, 0), 256, 4096, 2048, BF16, 1),  # small
        ((8, 9), 256, 4096, 12288, BF16, 1),
        (None, 256, 4096, 12288, BF16, 1),
    ],
)
def test_what_is_left_in_parts(monkeypatch, capability, tokens, rows, width, dtype, parts):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    given = shapes((2, tokens // 2), (rows, width), dtype)
    found = jax.eval_shape(functools.partial(split_product, dtype=F32 if dtype == E4M3 else None), *given)
    assert found.shape == (parts,) * (parts > 1) + (2, tokens // 2, rows)


@by_dtype
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_parts_of_a_small_weight(splits, dtype, most):
    x, weight = operands((2, 3), (96, 512), dtype)
    run = functools.partial(triton.parts, splits=splits, config=SMALL, interpret=not ON_GPU)
    parts = jax.jit(run)(x, weight)
    assert (parts.dtype, parts.shape) == (F32, (splits, 2, 3, 96))
    x, weight = (array.reshape(*array.shape[:-1], splits, -1) for array in wide(x, weight))
    assert error(parts, np.einsum("...si,osi->s...o", x, weight)) < most


@pytest.mark.parametrize(
    ("capability", "tokens", "rows", "width", "parts"),
    [
        ((9, 0), 16, 2048, 4096, 4),
        ((9, 0), 4, 2560, 4096, 4),
        ((9, 0), 1, 2048, 4096, 1),  # XLA's, in one kernel
        ((9, 0), 17, 2048, 4096, 1),
        ((9, 0), 16, 1024, 2048, 1),  # small
        ((9, 0), 16, 4096, 4096, 1),  # has a kernel without parts
        ((8, 9), 16, 2048, 4096, 1),
        (None, 16, 2048, 4096, 1),
    ],
)
def test_which_products_of_few_tokens_are_left_in_parts(monkeypatch, capability, tokens, rows, width, parts):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    found = jax.eval_shape(functools.partial(split_product), *shapes((tokens,), (rows, width), BF16))  # traced anew
    assert found.shape == (parts,) * (parts > 1) + (tokens, rows)


@by_dtype
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (16,)], ids=str)
def test_gate_and_up(tokens, dtype, most):
    x, weight = operands(tokens, (3, 2, 128, 256), dtype)
    found = jax.jit(functools.partial(swiglu, implementation="triton", interpret=not ON_GPU))(x, weight)
    assert (found.dtype, found.shape) == (dtype, (*tokens, 384))
    x, weight = wide(x, weight)
    gate, up = np.einsum("...d,ehid->h...ei", x, weight)
    assert error(found, (gate / (1 + np.exp(-gate)) * up).reshape(*tokens, -1)) < 2 * most


def test_a_token_is_what_it_is_alone_and_breaks_no_other():
    x, weight = operands((16,), (96, 512), BF16)
    run = jax.jit(functools.partial(triton.product, config=SMALL, interpret=not ON_GPU))
    clean = np.asarray(run(x, weight))
    np.testing.assert_array_equal(clean[3:4], run(x[3:4], weight))
    broken = np.asarray(run(x.at[5].set(jnp.nan), weight))
    assert np.isnan(broken[5].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(clean, 5, 0))


def test_no_tokens():
    assert triton.product(*operands((2, 0), (96, 512), BF16)).shape == (2, 0, 96)
    assert swiglu_triton.swiglu(*operands((0,), (2, 2, 64, 128), BF16)).shape == (0, 128)


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (6144, 4096), (4096, 12288), (16, 2, 768, 4096), (4, 2, 768, 4096)], ids=str
)
def test_lowers(shape):
    function = triton.product if len(shape) == 2 else swiglu_triton.swiglu
    assert "xla.gpu.triton" in cuda_lowering(lambda *given: function(*given), *shapes((1, 16), shape))


@pytest.mark.parametrize(
    ("capability", "tokens", "shape", "dtype", "kernel"),
    [
        ((9, 0), (1, 16), (4096, 4096), BF16, "triton"),
        ((9, 0), (1, 16), (4096, 4096), F16, "triton"),
        ((9, 0), (16, 1), (16, 2, 768, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (4, 16), (4096, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (8, 16), (6144, 4096), F16, "mosaic_gpu"),
        ((9, 0), (4, 16), (16, 2, 768, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (16, 16), (4096, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (4, 16), (4096, 4096), E4M3, "mosaic_gpu"),
        ((9, 0), (4, 16), (24576, 4096), E4M3, "mosaic_gpu"),
        ((9, 0), (0, 16), (4096, 4096), BF16, None),
        ((9, 0), (2, 16), (4096, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (4, 15), (4096, 4096), BF16, "mosaic_gpu"),
        ((9, 0), (17, 16), (4096, 4096), BF16, None),
        ((9, 0), (16, 16), (4096, 12288), BF16, None),
        ((9, 0), (16, 16), (24576, 4096), E4M3, None),  # two rounds of tiles
        ((9, 0), (4, 16), (28672, 4096), E4M3, "mosaic_gpu"),  # with the weight first: else a ring has two steps
        ((9, 0), (4, 16), (5120, 5120), BF16, "mosaic_gpu"),
        ((9, 0), (4, 16), (5120, 5136), BF16, None),
        ((9, 0), (1, 16), (2048, 4096), BF16, None),
        ((9, 0), (4, 16), (2048, 4096), BF16, None),
        ((9, 0), (4, 16), (2048, 4096), E4M3, None),
        ((9, 0), (4, 16), (4, 2, 768, 1024), BF16, None),
        ((9, 0), (1, 16), (4096, 4096), E4M3, "mosaic_gpu"),
        ((9, 0), (1, 16), (4096, 4160), BF16, None),
        ((8, 9), (1, 16), (4096, 4096), BF16, None),
        ((8, 9), (4, 16), (4096, 4096), BF16, None),
        ((10, 0), (1, 16), (16, 2, 768, 4096), BF16, None),
        (None, (1, 16), (4096, 4096), BF16, None),
    ],
)
def test_the_public_functions_pick(monkeypatch, capability, tokens, shape, dtype, kernel):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    function = functools.partial(product, dtype=BF16 if dtype == E4M3 else None) if len(shape) == 2 else swiglu
    text = cuda_lowering(lambda *given: function(*given), *shapes(tokens, shape, dtype))  # traced anew
    assert {name for name in ("triton", "mosaic_gpu") if name in text} == ({kernel} if kernel else set())


def test_results_in_fp8_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    assert "mosaic_gpu" not in cuda_lowering(lambda *given: product(*given), *shapes((64,), (6144, 4096), E4M3))


@pytest.mark.parametrize("kernels", [False, True])
def test_projections_of_one_device_may_pick(monkeypatch, kernels):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    given = jax.ShapeDtypeStruct((1, 16, 32, 128), BF16), jax.ShapeDtypeStruct((4096, 32, 128), BF16)
    text = cuda_lowering(lambda x, weight: project(x, weight, kernels=kernels), *given)
    assert ("xla.gpu.triton" in text) == kernels


@pytest.mark.parametrize(
    ("tokens", "shape", "dtype", "message"),
    [
        ((17,), (4096, 4096), BF16, "is for up to 16 tokens; these are 17"),
        ((1,), (4096, 4096), F32, "takes bf16 and f16; this is float32"),
        ((1,), (6144, 4224), BF16, "a width that 256 divides, and rows that 64 divides; these are 4224 and 6144"),
    ],
)
def test_triton_refuses_in_a_sentence(tokens, shape, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(product, implementation="triton"), *shapes(tokens, shape, dtype))


def test_wrong_arguments_are_named():
    x = jnp.zeros((4, 64))
    with pytest.raises(ValueError, match=r"x must be \[\*T, D\] and weight \[O, D\]; got \[4, 64\] and \[8, 32\]"):
        product(x, jnp.zeros((8, 32)))
    with pytest.raises(ValueError, match="of one dtype; got float32 and bfloat16"):
        product(x, jnp.zeros((8, 64), BF16))
    with pytest.raises(
        ValueError,
        match="implementation must be 'mosaic', 'narrow', 'weight_first', 'triton', 'reference' or None; got 'cuda'",
    ):
        product(x, jnp.zeros((8, 64)), implementation="cuda")


@pytest.mark.parametrize(("implementation", "name"), [("triton", "xla.gpu.triton"), ("mosaic", "mosaic_gpu")])
def test_sharded_lowering_knows_what_varies(implementation, name):
    """With check_vma on, as users run it: what varies over the mesh in any operand varies in the output."""
    call = functools.partial(product, implementation=implementation)
    shard = functools.partial(jax.shard_map, call, mesh=mesh_of(4), in_specs=(Spec(), Spec("tp")))

    def lower(out_specs):
        traced = jax.jit(shard(out_specs=out_specs)).trace(*shapes((8,), (1024, 512)))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert name in lower(Spec(None, "tp"))
    with pytest.raises(ValueError, match="out_specs"):
        lower(Spec())
