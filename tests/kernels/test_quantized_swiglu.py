"""Hidden units from gate and up in few bits: by what each machine has, and lowered for CUDA."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import gated, quantized_product, quantized_swiglu
from pallas_kernels.quantized_product import QUANTIZED_SWIGLU, swiglu
from pallas_kernels.quantized_product.hidden import HALF
from pallas_kernels.quantized_product.wide_plan import Config, plan_of
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of
from tests.kernels.test_quantized_product import operands

HOPPER = Device("cuda", (9, 0))


def gate_up(kind, tokens, parts, units, inputs):
    """x, a weight of parts of gates and up projections, and the hidden units that they give in float64."""
    (x, *weight), exact = operands(kind, 128, tokens, 2 * parts * units, inputs)
    products = (np.asarray(x, np.float64) @ exact.T).reshape(*tokens, parts, 2, units)
    gate, up = products[..., 0, :], products[..., 1, :]
    shaped = [None if part is None else part.reshape(parts, 2, units, -1) for part in weight]
    return x, shaped, (gate / (1 + np.exp(-gate)) * up).reshape(*tokens, parts * units)


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
    for tokens, wanted in ((1, "apart"), (64, "apart"), (256, "mosaic_two_sided" if kind == "fp8" else "apart")):
        call = struct((tokens, 1024), BF16), values, scales, None, BF16
        assert QUANTIZED_SWIGLU.choose(call, HOPPER).name == wanted
        assert QUANTIZED_SWIGLU.choose(call, Device("cuda", (8, 9))).name == "apart"
    if kind == "fp8":
        run = functools.partial(quantized_swiglu, implementation="mosaic_two_sided")
        assert "mosaic_gpu" in cuda_lowering(lambda *args: run(*args), struct((256, 1024), BF16), values, scales)


def test_few_rows_are_multiplied_in_parts():
    """Their tiles would leave multiprocessors idle."""
    struct = jax.ShapeDtypeStruct
    call = struct((128, 5120), BF16), struct((4, 2, 1088, 5120), E4M3), struct((4, 2, 1088, 40), BF16), None, BF16
    assert QUANTIZED_SWIGLU.choose(call, HOPPER).name == "apart"
    assert re.search(r"128 tokens is faster in \d parts", swiglu.slower(*call))


def test_sharded_lowering_knows_what_varies():
    struct, mesh, parts = jax.ShapeDtypeStruct, mesh_of(4), Spec("tp")
    run = functools.partial(quantized_swiglu, implementation="mosaic_two_sided")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(Spec(), parts, parts), out_specs=Spec(None, "tp"))
    call = struct((256, 1024), BF16), struct((16, 2, 1088, 1024), E4M3), struct((16, 2, 1088, 8), BF16)
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
