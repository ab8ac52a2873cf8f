"""Products of up to 64 tokens whose first operand is the weight, plain and of an MLP's first half."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import _compat, fp8_swiglu, product, product_beside, split_product, swiglu
from pallas_kernels.lib.weight_first import best_plan, blocks_of
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of, operands, shapes

F16 = jnp.float16
WEIGHTS = [(96, 512), (5120, 384), (9216, 320), (16384, 128), (17408, 256)]  # tiles of 8, 40, 72, 128 and 136 rows
WEIGHTS_OF_BYTES = [(96, 1024), (5120, 768), (9216, 640), (16384, 256), (17408, 512)]
GATES_AND_UPS = [(3, 2, 128, 256), (8, 2, 1088, 192), (16, 2, 1088, 128), (2, 2, 64, 1152)]
QWEN3_8B, QWEN3_6_27B = (16, 2, 768, 4096), (16, 2, 1088, 5120)
by_tokens = pytest.mark.parametrize("tokens", [(1,), (2, 3), (8,), (9,), (16,), (3, 11), (64,)], ids=str)
by_dtype = pytest.mark.parametrize(("dtype", "most"), [(BF16, 5e-3), (F16, 1e-3)], ids=["bf16", "f16"])
multiply = functools.partial(product, implementation="weight_first")
gate_up = functools.partial(swiglu, implementation="weight_first")


def wide(*arrays):
    return [np.asarray(array).astype(np.float64) for array in arrays]


@pytest.mark.gpu
@pytest.mark.in_turns(21)
@by_tokens
@by_dtype
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_product(weight, tokens, dtype, most):
    x, weight = operands(tokens, weight, dtype)
    found = multiply(x, weight, F32 if len(weight) == 96 else None)
    assert (found.dtype, found.shape) == (F32 if len(weight) == 96 else dtype, (*tokens, len(weight)))
    x, weight = wide(x, weight)
    assert error(found, x @ weight.T) < most


@pytest.mark.gpu
@pytest.mark.in_turns(7)
@by_tokens
@pytest.mark.parametrize("weight", WEIGHTS_OF_BYTES, ids=str)
def test_product_in_fp8(weight, tokens):
    """Hopper adds products of e4m3 up with 14 bits."""
    x, weight = operands(tokens, weight, E4M3)
    for dtype in (F32, BF16):
        found = multiply(x, weight, dtype)
        assert (found.dtype, found.shape) == (dtype, (*tokens, len(weight)))
        wide_x, wide_weight = wide(x, weight)
        assert error(found, wide_x @ wide_weight.T) < 5e-3


@pytest.mark.in_turns(7)
@by_tokens
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize(
    ("implementation", "weight"),
    [
        ("apart", (3, 2, 24, 96)),
        *(
            pytest.param("weight_first", weight, marks=pytest.mark.gpu, id=f"weight_first-{weight}")
            for weight in ((16, 2, 1088, 256), (128, 2, 64, 384))
        ),
    ],
)
def test_hidden_units_in_fp8(implementation, weight, dtype, tokens):
    x, weight = operands(tokens, weight, E4M3)
    of_tokens, of_units = (np.random.default_rng(7).uniform(0.5, 2, array.shape[:-1]) for array in (x, weight))
    scales = [jnp.asarray(numbers, F32) for numbers in (of_tokens, of_units)]
    numbers, factors = fp8_swiglu(x, scales[0], weight, scales[1], dtype, implementation=implementation)
    assert (numbers.dtype, numbers.shape, factors.shape) == (E4M3, (*tokens, of_units.size // 2), tokens)
    x, weight = wide(x, weight)
    gate, up = np.einsum("...d,ehid->h...ei", x * of_tokens[..., None], weight * of_units[..., None])
    hidden = (gate / (1 + np.exp(-gate)) * up).reshape(*tokens, -1)
    found = wide(numbers)[0] * np.asarray(factors)[..., None]
    assert error(found, hidden) < 0.04  # what rounding to e4m3 costs
    np.testing.assert_allclose(factors, np.abs(hidden).max(-1) / 448, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.in_turns(21)
@by_tokens
@by_dtype
@pytest.mark.parametrize("weight", GATES_AND_UPS, ids=str)
def test_gate_and_up(weight, tokens, dtype, most):
    x, weight = operands(tokens, weight, dtype)
    found = gate_up(x, weight)
    assert (found.dtype, found.shape) == (dtype, (*tokens, weight.shape[0] * weight.shape[2]))
    x, weight = wide(x, weight)
    gate, up = np.einsum("...d,ehid->h...ei", x, weight)
    assert error(found, (gate / (1 + np.exp(-gate)) * up).reshape(*tokens, -1)) < 2 * most


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "weight"), [(multiply, (5120, 384)), (gate_up, (16, 2, 1088, 128))])
def test_a_token_is_what_it_is_alone_and_breaks_no_other(run, weight):
    x, weight = operands((40,), weight)
    clean = np.asarray(run(x, weight), np.float32)
    np.testing.assert_array_equal(clean[3:4], np.asarray(run(x[3:4], weight), np.float32))
    broken = np.asarray(run(x.at[5].set(jnp.nan), weight), np.float32)
    assert np.isnan(broken[5]).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(clean, 5, 0))


@pytest.mark.gpu
@by_tokens
@pytest.mark.parametrize(("rows", "others"), [(16384, 96), (16384, 32), (9216, 64), (16384, 1000)])
def test_another_product_beside(rows, others, tokens):
    """The last one has too many rows for the multiprocessors that are left, and a kernel of its own."""
    (x, weight), (_, other) = operands(tokens, (rows, 384)), operands(tokens, (others, 384))
    found = jax.jit(lambda *given: product_beside(*given))(x, weight, other)
    assert [out.shape for out in found] == [(*tokens, rows), (*tokens, others)]
    for out, weight_of in zip(found, (weight, other), strict=True):
        wide_x, wide_weight = wide(x, weight_of)
        assert error(out, wide_x @ wide_weight.T) < 5e-3


@pytest.mark.parametrize(
    ("capability", "tokens", "rows", "others", "dtype", "is_one"),
    [
        ((9, 0), 1, 16384, 96, BF16, True),
        ((9, 0), 16, 16384, 96, BF16, True),
        ((9, 0), 64, 16384, 96, BF16, True),
        ((9, 0), 65, 16384, 96, BF16, False),
        ((9, 0), 16, 16384, 1000, BF16, False),  # more rows than the multiprocessors that are left have room for
        ((9, 0), 16, 16896, 96, BF16, False),  # none is left
        ((9, 0), 16, 16384, 96, F32, False),
        ((8, 9), 16, 16384, 96, BF16, False),
        (None, 16, 16384, 96, BF16, False),
    ],
)
def test_which_products_have_another_beside_them(monkeypatch, capability, tokens, rows, others, dtype, is_one):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    (x, weight), (_, other) = shapes((tokens,), (rows, 5120), dtype), shapes((tokens,), (others, 5120), dtype)
    text = cuda_lowering(lambda *given: product_beside(*given), x, weight, other)
    calls = [line for line in text.splitlines() if "custom_call" in line or "dot_general" in line]
    assert (len(calls) == 1) == is_one


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("rows", [8, 40, 64, 72, 112, 136, 256])
def test_blocks_keep_each_row_once_and_lie_within_shared_memory(rows, sets):
    plan = best_plan(8, 128 * rows, 128, sets=sets)
    assert (plan.rows, plan.tiles) == (rows, 128)
    kept = [block.start + row for block in blocks_of(rows) for row in range(*block.kept)]
    assert kept == list(range(rows))
    assert max(block.start + block.count for block in blocks_of(rows)) <= rows + plan.behind


@pytest.mark.parametrize("stages", range(1, 12))
@pytest.mark.parametrize("sets", [1, 2, 3])
def test_a_slot_for_tokens_is_free_once_the_first_slot_for_rows_is(stages, sets):
    """The producer waits for the slot of a step's first set alone, and then copies the step's tokens."""
    plan = best_plan(8, 128 * 64, 128, sets=sets)
    count = plan._token_stages(stages)
    for step in range(count, 40):
        read_last = (step - count + 1) * sets - 1  # the last use of the slot's tokens
        assert read_last <= step * sets - stages


@pytest.mark.parametrize(
    ("tokens", "weight"),
    [(1, QWEN3_6_27B), (16, QWEN3_6_27B), (64, QWEN3_6_27B), (64, QWEN3_8B), (16, (16, 2, 1600, 5120))],
)
def test_steps_in_flight_fill_shared_memory(tokens, weight):
    parts, sets, units, width = weight
    plan = best_plan(tokens, parts * units, width, sets=sets, part=units)
    assert plan.tiles == 128
    assert plan.depth == 128  # 256 bytes of a row: half as many are read at 0.95 of the speed
    in_flight = 2 * plan.depth * (plan.stages * plan.rows + plan.token_stages * plan.tokens)
    assert 190 << 10 < in_flight < 227 << 10


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("weight", [(5120, 17408), (16384, 5120), (96, 64), QWEN3_6_27B, QWEN3_8B], ids=str)
def test_lowers(weight, tokens):
    run = multiply if len(weight) == 2 else gate_up
    assert "mosaic_gpu" in cuda_lowering(lambda *given: run(*given), *shapes((tokens,), weight))


@pytest.mark.parametrize(
    ("capability", "tokens", "shape", "dtype", "is_picked"),
    [
        ((9, 0), 1, (5120, 17408), BF16, True),
        ((9, 0), 16, (5120, 6144), F16, True),
        ((9, 0), 64, (5120, 17408), BF16, True),
        ((9, 0), 16, QWEN3_6_27B, BF16, True),
        ((9, 0), 48, QWEN3_6_27B, BF16, True),
        ((9, 0), 16, (4096, 12288), BF16, False),  # tiles of 32 rows
        ((9, 0), 17, (4096, 12288), BF16, True),  # for which Triton has no kernel
        ((9, 0), 16, (2048, 4096), BF16, False),  # small
        ((9, 0), 16, (5120, 17408), F32, False),
        ((9, 0), 65, (5120, 17408), BF16, False),
        ((9, 0), 0, (5120, 17408), BF16, False),
        ((9, 0), 16, (10240, 5136), BF16, False),  # no steps of 64 inputs
        ((8, 9), 16, (5120, 17408), BF16, False),
        ((10, 0), 16, QWEN3_6_27B, BF16, False),
        (None, 16, (5120, 17408), BF16, False),
    ],
)
def test_the_public_functions_pick(monkeypatch, capability, tokens, shape, dtype, is_picked):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    run = split_product if len(shape) == 2 else swiglu
    text = cuda_lowering(lambda *given: run(*given), *shapes((tokens,), shape, dtype))  # traced anew
    assert ("weight_first" in text) == is_picked


@pytest.mark.parametrize(
    ("capability", "tokens", "weight", "is_picked"),
    [
        ((9, 0), 1, QWEN3_6_27B, True),
        ((9, 0), 64, QWEN3_8B, True),
        ((9, 0), 65, QWEN3_8B, False),
        ((9, 0), 16, (4, 2, 768, 1024), False),  # small, and tiles of 24 units
        ((8, 9), 16, QWEN3_8B, False),
        (None, 16, QWEN3_8B, False),
    ],
)
def test_which_product_finishes_hidden_units_in_fp8(monkeypatch, capability, tokens, weight, is_picked):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    x, weight = shapes((tokens,), weight, E4M3)
    scales = [jax.ShapeDtypeStruct(array.shape[:-1], F32) for array in (x, weight)]
    text = cuda_lowering(lambda *given: fp8_swiglu(given[0], given[2], given[1], given[3], BF16), x, weight, *scales)
    assert ("swiglu_weight_first" in text) == is_picked


def test_hidden_units_in_fp8_are_refused_in_a_sentence():
    x, weight = shapes((8,), (4, 2, 768, 1024), E4M3)
    of_tokens, of_units = (jax.ShapeDtypeStruct(array.shape[:-1], F32) for array in (x, weight))
    run = functools.partial(fp8_swiglu, dtype=BF16, implementation="weight_first")
    with pytest.raises(NotImplementedError, match="needs tiles of at least 64 units"):
        jax.eval_shape(run, x, of_tokens, weight, of_units)
    with pytest.raises(ValueError, match=r"must be \[8\] and of_units \[4, 2, 768\]; got \[4, 2, 768\] and \[8\]"):
        jax.eval_shape(run, x, of_units, weight, of_tokens)
    with pytest.raises(NotImplementedError, match="takes e4m3 with scales alone"):
        jax.eval_shape(gate_up, x, weight)
    with pytest.raises(NotImplementedError, match="gives bf16, f16 and f32; float8_e4m3fn is asked for"):
        jax.eval_shape(multiply, *shapes((8,), (5120, 256), E4M3))
    with pytest.raises(NotImplementedError, match=r"a width that 128 divides, .* the weight is \[96, 64\]"):
        jax.eval_shape(functools.partial(multiply, dtype=BF16), *shapes((8,), (96, 64), E4M3))


@pytest.mark.parametrize(
    ("tokens", "weight", "dtype", "message"),
    [
        (8, (96, 96), BF16, r"a width that 64 divides, .* the weight is \[96, 96\]"),
        (8, (100, 64), BF16, r"tiles of a multiple of 8 and at most 256 rows, .* the weight is \[100, 64\]"),
        (65, (96, 64), BF16, "up to 64 tokens; these are 65"),
        (8, (96, 64), F32, "takes bf16, f16 and e4m3; this is float32"),
    ],
)
def test_it_refuses_in_a_sentence(tokens, weight, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(multiply, *shapes((tokens,), weight, dtype))


@pytest.mark.parametrize(
    ("rows", "others", "dtype", "message"),
    [
        (16384, 1000, BF16, "tiles of at most 128 rows; it has 1000, and 4 are idle"),
        (16896, 96, BF16, "it has 96, and 0 are idle"),
        (16384, 96, F32, "takes bf16, f16 and e4m3; this is float32"),
    ],
)
def test_another_weight_beside_is_refused_in_a_sentence(rows, others, dtype, message):
    (x, weight), (_, other) = shapes((8,), (rows, 128), dtype), shapes((8,), (others, 128), dtype)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(product_beside, implementation="weight_first"), x, weight, other)


def test_products_apart_and_by_xla_are_the_same():
    (x, weight), (_, other) = operands((2, 3), (96, 512), F32), operands((2, 3), (32, 512), F32)
    for implementation in (None, "apart", "reference"):
        for found, by in zip(
            product_beside(x, weight, other, implementation=implementation), (weight, other), strict=True
        ):
            np.testing.assert_array_equal(found, product(x, by))


def test_sums_fit_into_registers():
    """Gate and up of Qwen3-32B would have four blocks of 64 rows each in a tile, and 256 registers of 64 tokens."""
    assert best_plan(48, 25600, 5120, sets=2, part=1600).sums == 192
    assert best_plan(64, 25600, 5120, sets=2, part=1600) is None
    assert best_plan(64, 17408, 5120, sets=2, part=1088).sums == 192


def test_no_tokens():
    assert multiply(*operands((2, 0), (96, 512), BF16)).shape == (2, 0, 96)
    assert gate_up(*operands((0,), (2, 2, 64, 128), BF16)).shape == (0, 128)


def test_sharded_lowering_knows_what_varies():
    """With check_vma on, as users run it: the hidden units vary over the mesh, and say so."""
    shard = functools.partial(jax.shard_map, gate_up, mesh=mesh_of(4), in_specs=(Spec(), Spec("tp")))

    def lower(out_specs):
        traced = jax.jit(shard(out_specs=out_specs)).trace(*shapes((16,), QWEN3_8B))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lower(Spec(None, "tp"))
    with pytest.raises(ValueError, match="out_specs"):
        lower(Spec())
