"""Products with weights in few bits: by every implementation that this machine has, and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import _compat, quantized_product, split_quantized_product
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.quantized_product import mosaic, mosaic_plan, operation_of, tiles, triton, wide, wide_plan
from pallas_kernels.quantized_product.layout import span_of_group
from pallas_kernels.quantized_product.triton import Config
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of
from tests.kernels.conftest import ON_GPU

OUTPUTS, INPUTS = 72, 512  # rows that no tile divides
INTERPRET = not ON_GPU


def operands(kind, group, tokens=(3,), outputs=OUTPUTS, inputs=INPUTS, seed=0):
    """x, values, scales and zeros, and the weight that they stand for in float64, number by number."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((*tokens, inputs)), BF16)
    scales = jnp.asarray(rng.uniform(0.5, 2, (outputs, inputs // group)) * inputs**-0.5 / 5, jnp.float16)
    each = np.repeat(np.asarray(scales, np.float64), group, axis=1)
    if kind == "fp8":
        values = jnp.asarray(rng.standard_normal((outputs, inputs)) * 3, E4M3)
        return (x, values, scales.astype(BF16), None), np.asarray(values, np.float64) * np.repeat(
            np.asarray(scales.astype(BF16), np.float64), group, axis=1
        )
    numbers = rng.integers(0, 16, (outputs, inputs), np.uint8)
    zeros = rng.integers(0, 17, scales.shape, np.uint8) if kind == "zeros" else None
    quarter = span_of_group(group) // 4
    values = np.zeros((outputs, inputs // 4), np.uint16)
    for column in range(inputs):
        span, place = divmod(column, 4 * quarter)
        values[:, span * quarter + place % quarter] |= numbers[:, column].astype(np.uint16) << (4 * (place // quarter))
    middle = 8 if zeros is None else np.repeat(zeros, group, axis=1).astype(np.float64)
    device = None if zeros is None else jnp.asarray(zeros)
    return (x, jnp.asarray(values), scales, device), (numbers.astype(np.float64) - middle) * each


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "group", "tokens"),
    [("int4", 128, (1,)), ("zeros", 32, (2, 3)), ("zeros", 512, (40,)), ("fp8", 128, (5,)), ("fp8", 512, (17,))],
)
def test_product(implementation, kind, group, tokens):
    (x, *weight), wide = operands(kind, group, tokens)
    interpret = INTERPRET and implementation == "triton"
    run = jax.jit(functools.partial(quantized_product, implementation=implementation, interpret=interpret, dtype=F32))
    found = run(x, *weight)
    assert (found.dtype, found.shape) == (F32, (*tokens, OUTPUTS))
    assert error(found, np.asarray(x, np.float64) @ wide.T) < 2e-6  # 16-bit weights would be off by 1e-3


@pytest.mark.parametrize("kind", ["zeros", "fp8"])
def test_parts_sum_to_the_product(kind):
    (x, *weight), wide = operands(kind, 64, (2, 3))
    config = Config(rows=32, tokens=16, splits=4)
    parts = triton.quantized_product(x, *weight, BF16, config=config, interpret=INTERPRET)
    assert (parts.dtype, parts.shape) == (F32, (4, 2, 3, OUTPUTS))
    assert error(parts.sum(0), np.asarray(x, np.float64) @ wide.T) < 2e-6
    assert error(parts[0], np.asarray(x, np.float64)[..., :128] @ wide[:, :128].T) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("int4", (1,)), ("zeros", (2, 3)), ("int4", (40,)), ("fp8", (5,)), ("zeros", (64,)), ("fp8", (33,))],
)
@pytest.mark.parametrize("shape", [(192, 384), (320, 2560), (5120, 1536), (34816, 256)], ids=str)
def test_product_on_hopper(kind, tokens, shape):
    """Tiles of 64, 128 and 256 rows; steps of one group and of two; tiles that CTAs share, and CTAs with many."""
    (x, *weight), wide = operands(kind, 128, tokens, *shape)
    wanted = np.asarray(x, np.float64) @ wide.T
    for _ in range(3):  # whoever reads what is not there yet may be lucky once
        parts = mosaic.quantized_product(x, *weight, F32, may_split=True)
        whole = mosaic.quantized_product(x, *weight, F32)
        assert (whole.dtype, whole.shape) == (F32, wanted.shape)
        assert error(parts.sum(0) if parts.ndim > wanted.ndim else parts, wanted) < 2e-6
        assert error(whole, wanted) < 2e-6


def some_configs(configs, shape):
    """The default one; for a small weight all, and some of CTAs by themselves."""
    every = list(configs) if shape == (320, 2560) else []
    return [None, *every, *(dataclasses.replace(config, pair=1) for config in every[:2])]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "tokens"), [("int4", (65,)), ("zeros", (2, 64)), ("int4", (300,)), ("fp8", (130,)), ("zeros", (2000,))]
)
@pytest.mark.parametrize("shape", [(192, 384), (320, 2560), (5120, 1536)], ids=str)
def test_a_wide_product_on_hopper(kind, tokens, shape):
    """Rows and tokens that no tile divides; inputs in parts; CTAs with many tiles; every configuration."""
    (x, *weight), exact = operands(kind, 128, tokens, *shape)
    wanted = np.asarray(x, np.float64) @ exact.T
    for config in some_configs(wide_plan.configs(x, *weight[:2]), shape):
        parts = wide.quantized_product(x, *weight, F32, may_split=True, config=config)
        assert error(parts.sum(0) if parts.ndim > wanted.ndim else parts, wanted) < 2e-6
    rounded = quantized_product(x, *weight, implementation="mosaic_wide")
    assert (rounded.dtype, rounded.shape) == (BF16, wanted.shape)
    assert error(rounded, wanted) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(65,), (2, 150), (2000,)])
@pytest.mark.parametrize("shape", [(192, 384), (320, 2560), (5120, 1536)], ids=str)
def test_a_product_of_e4m3_and_e4m3_on_hopper(tokens, shape):
    """Tensor cores keep some 14 bits of the products of a group."""
    (x, *weight), exact = operands("fp8", 128, tokens, *shape)
    numbers, of_tokens = quantize_rows(x, implementation="reference")
    wanted = np.asarray(numbers, np.float64) * np.asarray(of_tokens, np.float64)[..., None] @ exact.T
    for config in some_configs(wide_plan.configs(x, *weight[:2], is_two_sided=True), shape):
        parts = wide.two_sided_product(x, *weight, F32, may_split=True, config=config)
        assert error(parts.sum(0) if parts.ndim > wanted.ndim else parts, wanted) < 1e-3
    assert error(quantized_product(x, *weight), np.asarray(x, np.float64) @ exact.T) < 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 130])
def test_scales_of_zero_and_of_any_size_on_hopper(tokens):
    """The wide product divides by scales."""
    (x, values, scales, _), exact = operands("int4", 128, (tokens,), 192, 1024)
    numbers = exact / np.repeat(np.asarray(scales, np.float64), 128, axis=1)
    sizes = np.float32([0, 1, -3, 1e-30, 2e-3, 0, 5, 1e-38])
    scales = np.random.default_rng(0).permuted(np.tile(sizes, (192, 1)), axis=1)
    scales[7] = 0
    found = quantized_product(x, values, jnp.asarray(scales), dtype=F32)
    assert error(found, np.asarray(x, np.float64) @ (numbers * np.repeat(scales, 128, axis=1)).T) < 2e-6


@pytest.mark.gpu
def test_a_token_on_hopper_has_its_bits_alone_and_in_a_batch():
    (x, *weight), _ = operands("int4", 128, (16,), 5120, 1536)
    batch = np.asarray(mosaic.quantized_product(x, *weight, F32))
    np.testing.assert_array_equal(np.asarray(mosaic.quantized_product(x[3:4], *weight, F32))[0], batch[3])


def test_ctas_of_hopper_have_equal_runs(monkeypatch):
    """Every step of every tile is some CTA's, and no tile has more parts than the plan says."""
    monkeypatch.setattr(_compat, "sm_count", lambda: 132)
    struct = jax.ShapeDtypeStruct
    for outputs, inputs in ((34816, 5120), (5120, 17408), (5120, 6144), (16384, 5120), (192, 384), (64, 128)):
        x, scales = struct((16, inputs), BF16), struct((outputs, inputs // 128), BF16)
        for values in (struct((outputs, inputs // 4), jnp.uint16), struct((outputs, inputs), E4M3)):
            plan = mosaic_plan.plan_of(mosaic_plan.default_config(x, values, scales), x, values, scales)
            units = np.arange(plan.tiles * plan.steps)
            assert plan.ctas <= 132
            assert units[-1] // plan.run == plan.ctas - 1
            tiles = (units // plan.run).reshape(plan.tiles, plan.steps)
            assert (tiles[:, -1] - tiles[:, 0]).max() < plan.parts


def test_pairs_of_hopper_have_every_tile_once(monkeypatch):
    """Every step of every tile is one pair's, no part is without steps, and the ring fits into shared memory."""
    monkeypatch.setattr(_compat, "sm_count", lambda: 132)
    struct = jax.ShapeDtypeStruct
    for outputs, inputs, tokens in ((34816, 5120, 256), (5120, 17408, 100), (320, 640, 3000), (64, 128, 65)):
        x, scales = struct((tokens, inputs), BF16), struct((outputs, inputs // 128), BF16)
        for is_packed in (True, False):
            values = struct((outputs, inputs // 4), jnp.uint16) if is_packed else struct((outputs, inputs), E4M3)
            assert wide_plan.default_config(x, values, scales) in [*wide_plan.configs(x, values, scales)]
            for config in wide_plan.configs(x, values, scales):
                plan = wide_plan.plan_of(config, x, values, scales)
                assert plan.pieces * config.pair * plan.rows >= outputs
                assert plan.blocks * config.tokens >= tokens
                tiles = {tuple(int(at) for at in plan.place(jnp.int32(tile))) for tile in range(min(plan.count, 300))}
                if plan.count < 300:
                    counts = plan.pieces, plan.blocks, config.splits
                    assert tiles == {
                        (i, j, k) for i in range(counts[0]) for j in range(counts[1]) for k in range(counts[2])
                    }
                ends = [tuple(int(at) for at in plan.inputs(part)) for part in range(config.splits)]
                assert [step for start, end in ends for step in range(start, end)] == [*range(inputs // 128)]
                assert all(start < end for start, end in ends)
                step = 128 * (plan.rows // (2 if is_packed else 1) + 2 * config.tokens)
                assert 2 <= config.stages <= mosaic_plan.SHARED_MEMORY // step


def test_tiles_of_many_tokens():
    (x, *weight), wide = operands("int4", 128, (130,), inputs=256)
    found = triton.quantized_product(x, *weight, BF16, interpret=INTERPRET)
    assert error(found, np.asarray(x, np.float64) @ wide.T) < 5e-3


def test_the_reference_widens_a_large_weight_in_blocks(monkeypatch):
    from pallas_kernels.quantized_product import reference

    monkeypatch.setattr(reference, "WIDENED", OUTPUTS * INPUTS // 5)
    (x, *weight), wide = operands("zeros", 32)
    assert error(quantized_product(x, *weight, F32), np.asarray(x, np.float64) @ wide.T) < 2e-6


@pytest.mark.in_turns(15)
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 2048])
@pytest.mark.parametrize("kind", ["int4", "zeros", "fp8"])
@pytest.mark.parametrize("shape", [(96, 5120), (5120, 17408)], ids=str)
def test_it_lowers_and_is_picked(monkeypatch, kind, tokens, shape):
    struct = jax.ShapeDtypeStruct
    outputs, inputs = shape
    values = struct(shape, E4M3) if kind == "fp8" else struct((outputs, inputs // 4), jnp.uint16)
    scales = struct((outputs, inputs // 128), BF16 if kind == "fp8" else jnp.float16)
    zeros = struct(scales.shape, jnp.uint8) if kind == "zeros" else None
    x = struct((tokens, inputs), BF16)
    fits = outputs % mosaic_plan.ROWS == 0
    for generation in ((8, 0), (8, 6), (8, 9), (9, 0)):
        wanted = "reference" if kind == "fp8" and generation < (8, 9) else "triton"
        if generation == (9, 0) and fits:
            beyond = "mosaic_two_sided" if kind == "fp8" else "mosaic_wide"
            wanted = "mosaic" if tokens <= mosaic_plan.MAX_TOKENS else beyond
        call = (x, values, scales, zeros, BF16)
        assert operation_of(values).choose(call, Device("cuda", generation)).name == wanted
    for generation, target in (((8, 9), "xla.gpu.triton"), ((9, 0), "mosaic_gpu" if fits else "xla.gpu.triton")):
        monkeypatch.setattr(_compat, "compute_capability", lambda generation=generation: generation)
        for function in (quantized_product, split_quantized_product):
            text = cuda_lowering(lambda *args, f=function: f(*args), x, values, scales, *([zeros] if zeros else []))
            assert target in text
        parts = jax.eval_shape(split_quantized_product, x, values, scales, zeros)
        assert (len(parts.shape) == 3) == (tokens <= 64)


@pytest.mark.parametrize(("tokens", "is_padded"), [(1, False), (7, False), (8, False), (12, True)])
def test_tma_fills_a_tile_of_few_tokens(tokens, is_padded):
    """A kernel that pads them took 4 % of a step of plain decoding."""
    struct = jax.ShapeDtypeStruct
    x, values, scales = struct((tokens, 512), BF16), struct((128, 128), jnp.uint16), struct((128, 4), BF16)
    text = cuda_lowering(lambda *call: quantized_product(*call, implementation="mosaic"), x, values, scales)
    assert ("stablehlo.pad" in text) == is_padded


@pytest.mark.parametrize(("capability", "limit"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227)])
def test_steps_in_flight_fit_into_shared_memory(monkeypatch, capability, limit):
    """A step has bytes of the weight's rows, half a byte or a whole one an input, and two an input of the tokens."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    struct = jax.ShapeDtypeStruct
    scales = struct((5120, 40), BF16)
    for values in (struct((5120, 5120), E4M3), struct((5120, 1280), jnp.uint16)):
        for tokens in (1, 16, 32, 64, 65, 8192):
            config = triton.default_config(struct((tokens, 5120), BF16), values, scales)
            step = config.depth * (config.rows * values.shape[1] * values.dtype.itemsize // 5120 + 2 * config.tokens)
            assert config.num_stages * step <= limit * 1024
            assert tokens > 64 or 3 <= config.num_stages <= 6


def evaluated(asm, *, args, constraints, pack, result_shape_dtypes):
    """What the assembly computes of two 16-bit elements in a register, an instruction at a time."""
    assert (constraints, pack) == ("=r" + ",r" * len(args), 2)
    registers = {f"${i + 1}": np.asarray(arg).view(np.uint32) for i, arg in enumerate(args)}
    body = asm.replace("\n", "").strip("{} ").removesuffix(";")
    lines = [re.split(r"[ ,]+", line.strip()) for line in body.split(";")]
    for name, target, *sources in lines[1:]:
        a, *rest = (registers[x] if x in registers else np.uint32(int(x, 0)) for x in sources)
        if name == "mov.b32":
            value = a
        elif name == "shr.b32":
            value = a >> rest[0]
        elif name == "shl.b32":
            value = a << rest[0]
        elif name == "and.b32":
            value = a & rest[0]
        elif name == "lop3.b32":
            b, c, table = rest
            rows = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
            ]
            value = functools.reduce(np.bitwise_or, rows)
        else:
            assert name == "fma.rn.bf16x2"
            x, y, z = (np.asarray(part, np.uint32).reshape(-1).view(BF16).astype(np.float64) for part in (a, *rest))
            value = (x.reshape(-1, 2) * y + z.reshape(-1, 2)).astype(BF16).view(np.uint32)[:, 0]
        registers[target] = value
    return [jnp.asarray(registers["$0"].view(BF16).reshape(result_shape_dtypes[0].shape))]


def test_the_assembly_is_the_plain_expression(monkeypatch):
    """Bit by bit, for every word and zero point: interpreted kernels show nothing about what GPUs run."""
    monkeypatch.setattr(tiles.pltriton, "elementwise_inline_asm", evaluated)
    words = np.arange(1 << 16, dtype=np.uint16)
    for zero in range(17):
        offset = jnp.full(words.shape, -128 - zero, BF16)
        for place in range(4):
            numbers = tiles.numbers(words, offset, place, False)
            assert (numbers == tiles.numbers(jnp.asarray(words), offset, place, True)).all()
            np.testing.assert_array_equal(
                np.asarray(numbers, np.int64), (words.astype(np.int64) >> 4 * place & 15) - zero
            )


def test_the_assembly_of_words_of_e4m3_is_the_plain_expression(monkeypatch):
    """Bit by bit, and 2**-120 of every number but NaN; zeros keep their sign."""
    monkeypatch.setattr(tiles.pltriton, "elementwise_inline_asm", evaluated)
    words = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    for place, bits in enumerate([(4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)]):
        small = tiles.small_e4m3(words, place, False)
        plain = np.asarray(tiles.small_e4m3(jnp.asarray(words), place, True))
        np.testing.assert_array_equal(np.asarray(small).view(np.uint16), plain.view(np.uint16))
        parts = [(words.view(np.uint16) >> source & 1) << bit for bit, source in enumerate(bits)]
        numbers = functools.reduce(np.bitwise_or, parts).astype(np.uint8).view(E4M3).astype(np.float64)
        is_number = ~np.isnan(numbers)
        np.testing.assert_array_equal(plain.astype(np.float64)[is_number] * 2.0**120, numbers[is_number])


def test_every_e4m3_number_is_widened_exactly():
    numbers = np.arange(256, dtype=np.uint8).view(E4M3)
    widened = tiles.widened(jnp.asarray(numbers)[None], [], True)[0]
    assert widened.dtype == BF16
    np.testing.assert_array_equal(np.asarray(widened, np.float64), numbers.astype(np.float64))


@pytest.mark.parametrize(
    ("dtype", "group", "reason"), [(F32, 128, "takes bf16; this is float32"), (BF16, 16, "multiple of 32 inputs")]
)
def test_refusals(dtype, group, reason):
    (x, *weight), _ = operands("int4", group)
    with pytest.raises(NotImplementedError, match=reason):
        quantized_product(x.astype(dtype), *weight, implementation="triton")


@pytest.mark.parametrize("tokens", [16, 300])
def test_words_of_two_are_not_for_mosaic(tokens):
    """It would read them as numbers one by one."""
    struct = jax.ShapeDtypeStruct
    call = struct((tokens, 512), BF16), struct((128, 256), jnp.int16), struct((128, 4), BF16), None, BF16
    assert operation_of(call[1]).choose(call, Device("cuda", (9, 0))).name == "triton"


@pytest.mark.parametrize(
    "change",
    [
        {"values": jnp.zeros((OUTPUTS, INPUTS), jnp.int8)},
        {"scales": jnp.ones((OUTPUTS, 3))},
        {"zeros": jnp.zeros((OUTPUTS, 4))},
    ],
    ids=["values", "scales", "zeros"],
)
def test_what_does_not_fit_is_said(change):
    (x, values, scales, zeros), _ = operands("zeros", 128)
    arguments = {"values": values, "scales": scales, "zeros": zeros} | change
    with pytest.raises(ValueError, match="must"):
        quantized_product(x, **arguments)


def test_sharded_lowering_knows_what_varies():
    (x, values, scales, zeros), _ = operands("zeros", 128)
    mesh, rows = mesh_of(4), Spec("tp")
    run = functools.partial(quantized_product, implementation="triton")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(Spec(), rows, rows, rows), out_specs=Spec(None, "tp"))
    assert (
        "xla.gpu.triton"
        in jax.jit(sharded).trace(x, values, scales, zeros).lower(lowering_platforms=("cuda",)).as_text()
    )
