"""Hidden units from gate and up in few bits: by what each machine has, and lowered for CUDA."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec
from scipy.special import expit

from pallas_kernels import gated, quantized_product, quantized_swiglu
from pallas_kernels.lib.shared_memory import SHARED_MEMORY
from pallas_kernels.quantized_product import QUANTIZED_SWIGLU, swiglu, swiglu_pieces
from pallas_kernels.quantized_product.hidden import HALF
from pallas_kernels.quantized_product.wide_plan import Config, plan_of
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of
from tests.kernels.test_quantized_product import operands

HOPPER = Device("cuda", (9, 0))


def gate_up(kind, tokens, parts, units, inputs, x=None):
    """x, a weight of parts of gates and up projections, and the hidden units that they give in float64."""
    (random, *weight), exact = operands(kind, 128, tokens, 2 * parts * units, inputs)
    x = random if x is None else x
    products = (np.asarray(x, np.float64) @ exact.T).reshape(*tokens, parts, 2, units)
    gate, up = products[..., 0, :], products[..., 1, :]
    shaped = [None if part is None else part.reshape(parts, 2, units, -1) for part in weight]
    return x, shaped, (gate * expit(gate) * up).reshape(*tokens, parts * units)


@pytest.mark.parametrize("implementation", [None, "apart", "reference"])
@pytest.mark.parametrize("kind", ["zeros", "fp8"])
def test_hidden_units(implementation, kind):
    x, weight, wanted = gate_up(kind, (2, 3), 4, 8, 256)
    found = quantized_swiglu(x, *weight, implementation=implementation)
    assert (found.dtype, found.shape) == (BF16, (2, 3, 32))
    assert error(found, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(65,), (2, 128), (300,)])
@pytest.mark.parametrize("sizes", [(2, 96, 384), (16, 160, 1024), (16, 1088, 256)], ids=str)
def test_hidden_units_on_hopper(tokens, sizes):
    """Tokens, parts and pairs of CTAs that no tile divides."""
    x, weight, wanted = gate_up("fp8", tokens, *sizes)
    matrix, of_groups, _ = (None if part is None else part.reshape(-1, part.shape[-1]) for part in weight)
    products = quantized_product(x, matrix, of_groups, implementation="mosaic_two_sided")
    apart = gated(products.reshape(*tokens, *weight[0].shape[:-1]))
    for _ in range(3):  # whoever reads what is not there yet may be lucky once
        found = quantized_swiglu(x, *weight, implementation="mosaic_two_sided")
        assert (found.dtype, found.shape) == (BF16, wanted.shape)
        assert error(found, wanted) < error(apart, wanted) + 1e-4
        assert error(found, np.asarray(apart, np.float64)) < 5e-3  # of the same products


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (9,), (16,), (24,), (33,), (64,)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 192, 384), (16, 1024, 256), (16, 1088, 1024)], ids=str)
def test_hidden_units_of_pieces(tokens, sizes):
    """As exact as with tokens in bfloat16, as far as a few hundred roundings tell; tokens that no tile is full of."""
    x, weight, wanted = gate_up("fp8", tokens, *sizes)
    x = x * jnp.exp2(jnp.arange(x.shape[-1]) % 12).astype(BF16)[::-1]
    *_, wanted = gate_up("fp8", tokens, *sizes, x=x)
    found = quantized_swiglu(x, *weight, implementation="mosaic_pieces")
    apart = quantized_swiglu(x, *weight, implementation="apart")
    assert (found.dtype, found.shape) == (BF16, wanted.shape)
    assert error(found, wanted) < 1.15 * error(apart, wanted)


@pytest.mark.gpu
def test_a_broken_token_breaks_no_other():
    x, weight, _ = gate_up("fp8", (16,), 2, 192, 384)
    run = functools.partial(quantized_swiglu, implementation="mosaic_pieces")
    clean, broken = (np.asarray(run(x, *weight), F32) for x in (x, x.at[5].set(jnp.nan).at[7, 3].set(jnp.inf)))
    assert np.isnan(broken[[5, 7]]).all()
    np.testing.assert_array_equal(np.delete(broken, [5, 7], 0), np.delete(clean, [5, 7], 0))
    np.testing.assert_array_equal(clean[3], run(x[3:4], *weight)[0])


def test_every_row_of_gate_and_up_has_a_consumer():
    units, parts = 5 * HALF, 3
    struct = jax.ShapeDtypeStruct
    call = struct((256, 1024), BF16), struct((2 * parts * units, 256), jnp.uint16), struct((2 * parts * units, 8), F32)
    plan = plan_of(Config(3, 128, 4), *call, units)
    rows = []
    for unit in range(0, parts * units, HALF):
        gate, up = (int(first) for first in plan.rows_of(jnp.int32(2 * unit)))
        part, within = divmod(unit, units)
        assert (gate, up) == (part * 2 * units + within, part * 2 * units + units + within)
        rows += [*range(gate, gate + HALF), *range(up, up + HALF)]
    assert sorted(rows) == list(range(2 * parts * units))
    assert plan_of(Config(3, 128, 4), *call).rows_of(128) == (128, None)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_it_lowers_and_is_picked(kind):
    struct, parts = jax.ShapeDtypeStruct, (16, 2, 1088)
    values = struct((*parts, 1024), E4M3) if kind == "fp8" else struct((*parts, 256), jnp.uint16)
    scales = struct((*parts, 8), BF16)
    of_fp8 = {9: "mosaic_pieces", 64: "mosaic_pieces", 256: "mosaic_two_sided"} if kind == "fp8" else {}
    for tokens in (1, 8, 9, 64, 256):
        wanted = of_fp8.get(tokens, "apart")
        call = struct((tokens, 1024), BF16), values, scales, None, BF16
        assert QUANTIZED_SWIGLU.choose(call, HOPPER).name == wanted
        assert QUANTIZED_SWIGLU.choose(call, Device("cuda", (8, 9))).name == "apart"
    if kind == "fp8":
        for tokens, name in of_fp8.items():
            run = functools.partial(quantized_swiglu, implementation=name)
            x = struct((tokens, 1024), BF16)
            assert "mosaic_gpu" in cuda_lowering(lambda *args, run=run: run(*args), x, values, scales)


def test_few_rows_are_multiplied_in_parts():
    """Their tiles would leave multiprocessors idle."""
    struct = jax.ShapeDtypeStruct
    call = struct((128, 5120), BF16), struct((4, 2, 1088, 5120), E4M3), struct((4, 2, 1088, 40), BF16), None, BF16
    assert QUANTIZED_SWIGLU.choose(call, HOPPER).name == "apart"
    assert re.search(r"128 tokens is faster in \d parts", swiglu.slower(*call))


@pytest.mark.parametrize(("tokens", "name"), [(256, "mosaic_two_sided"), (16, "mosaic_pieces")])
def test_sharded_lowering_knows_what_varies(tokens, name):
    struct, mesh, parts = jax.ShapeDtypeStruct, mesh_of(4), Spec("tp")
    run = functools.partial(quantized_swiglu, implementation=name)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(Spec(), parts, parts), out_specs=Spec(None, "tp"))
    call = struct((tokens, 1024), BF16), struct((16, 2, 1088, 1024), E4M3), struct((16, 2, 1088, 8), BF16)
    assert "mosaic_gpu" in jax.jit(sharded).trace(*call).lower(lowering_platforms=("cuda",)).as_text()


def test_refusals():
    struct = jax.ShapeDtypeStruct
    x, values, scales = struct((128, 1024), BF16), struct((4, 2, 40, 1024), E4M3), struct((4, 2, 40, 8), BF16)
    in_4_bits = struct((4, 2, 32, 256), jnp.uint16), struct((4, 2, 32, 8), BF16)
    assert "needs weights in e4m3" in swiglu.refusal(x, *in_4_bits, None, BF16)
    sentence = "needs parts of the hidden units that 32 divides, in bf16; these are 40 in bfloat16."
    assert swiglu.refusal(x, values, scales, None, BF16).endswith(sentence)
    with pytest.raises(NotImplementedError, match="that 32 divides"):
        jax.eval_shape(functools.partial(quantized_swiglu, implementation="mosaic_two_sided"), x, values, scales)
    with pytest.raises(ValueError, match=r"must be \[\*T, D\] and the weight \[E, 2, I, D\]"):
        quantized_swiglu(jnp.zeros((3, 512), BF16), jnp.zeros((4, 256), jnp.uint16), jnp.zeros((4, 8), BF16))


def test_what_pieces_do_not_do_is_said_in_a_sentence():
    struct = jax.ShapeDtypeStruct
    x, values, scales = struct((16, 1024), BF16), struct((16, 2, 1088, 1024), E4M3), struct((16, 2, 1088, 8), BF16)

    def reason(x=x, values=values, scales=scales, dtype=BF16):
        return swiglu_pieces.refusal(x, values, scales, None, dtype)

    assert reason() is None
    assert reason(values=struct((16, 2, 1088, 256), jnp.uint16)).endswith("weights in e4m3; these are uint16.")
    assert reason(dtype=F32).endswith("takes and gives bf16; these are bfloat16 and float32.")
    assert reason(x=struct((65, 1024), BF16)).endswith("takes up to 64 tokens; these are 65.")
    assert reason(scales=struct((16, 2, 1088, 16), BF16)).endswith("needs groups of 128 inputs; these have 64.")
    assert "a multiple of 8 and 64 to 192 units" in reason(values=struct((16, 2, 40, 1024), E4M3))
    few = struct((4, 2, 64, 1024), E4M3), struct((4, 2, 64, 8), BF16)
    assert "90% of the 132 multiprocessors; these are 4." in swiglu_pieces.slower(x, *few, None, BF16)
    assert swiglu_pieces.slower(struct((8, 1024), BF16), values, scales, None, BF16).endswith("these are 8.")
    narrow = struct((16, 2, 40, 1024), E4M3), struct((16, 2, 40, 8), BF16)
    with pytest.raises(NotImplementedError, match="64 to 192 units"):
        jax.eval_shape(functools.partial(quantized_swiglu, implementation="mosaic_pieces"), x, *narrow)


@pytest.mark.parametrize(
    ("tokens", "inputs", "filled"),
    [(1, 5120, 16), (16, 5120, 16), (17, 5120, 32), (33, 5120, 64), (64, 5120, 64), (1, 384, 32), (16, 384, 32)],
)
def test_tiles_of_pieces_fit_and_have_every_unit_once(tokens, inputs, filled):
    struct = jax.ShapeDtypeStruct
    plan = swiglu_pieces.plan_of(struct((tokens, inputs), BF16), struct((16, 2, 1088, inputs), E4M3))
    assert (plan.units, plan.tiles, plan.tokens, plan.consumers) == (136, 128, filled, 3)
    kept = [first + row for i, first in enumerate(plan.starts) for row in range(64 * i - first, 64)]
    assert kept == list(range(136))
    assert 2 * plan.token_stages >= plan.stages + 1 >= 6  # a step's tokens stay until its rows of up are multiplied
    of_tokens = plan.token_stages * plan.tokens * plan.groups * (2 * 128 + 4)
    assert plan.stages * plan.units * plan.depth + of_tokens <= SHARED_MEMORY
    assert plan.tokens * plan.groups * 4 % 128 == 0  # what TMA copies
