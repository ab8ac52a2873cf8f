"""The routed experts in 4 bits and in e4m3, against the dense formula with the numbers that they stand for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from dflash_jax.weights import packing
from pallas_kernels import _compat
from pallas_kernels.experts import FewBits, Shared, experts, operation_of
from pallas_kernels.experts.config import default_config, fitted
from pallas_kernels.experts.few_plan import TURNS, plans_of
from pallas_kernels.quantized_product.layout import span_of_group
from pallas_kernels.registry import Device
from tests.kernels import test_quantized_product
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, error, mesh_of
from tests.kernels.test_experts import QWEN35_35B, QWEN35_122B, expected, routed, run

WIDE = "bf16"
# Where a word has each bit of its two numbers in e4m3, the lowest first.
BITS = (4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)


def stack(kind, group, shape, touched, seed):
    """A stack of matrices of experts, NaN where none is touched, and the numbers that it stands for in float64."""
    outputs = int(np.prod(shape[:-1]))
    (_, *parts), wide = test_quantized_product.operands(
        kind, group, outputs=outputs, inputs=shape[-1], tokens=(1,), seed=seed
    )
    if kind == "fp8":
        parts[0] = in_words(np.asarray(parts[0]), span_of_group(group))
    values, scales, zeros = (None if part is None else part.reshape(*shape[:-1], -1) for part in parts)
    scales = jnp.where(touched.reshape(-1, *[1] * (len(shape) - 1)), scales, jnp.nan)
    return FewBits(values, scales, zeros), np.asarray(wide).reshape(shape)


def in_words(numbers, span):
    """Two inputs in e4m3 to a word, half a span apart, put there bit by bit."""
    numbers, half = numbers.view(np.uint8), span // 2
    words = np.zeros((len(numbers), numbers.shape[1] // 2), np.uint16)
    for column in range(numbers.shape[1]):
        at, place = divmod(column, span)
        for bit, target in enumerate(BITS[place // half]):
            words[:, at * half + place % half] |= (numbers[:, column].astype(np.uint16) >> bit & 1) << target
    return jnp.asarray(words.view(np.int16))


@pytest.mark.parametrize("span", [32, 128])
def test_words_are_packed_bit_by_bit(span):
    numbers = np.random.default_rng(span).integers(0, 256, (3, 5, 2 * span), np.uint8)
    words = packing.to_words_of_two(numbers.view(E4M3), span)
    np.testing.assert_array_equal(words, in_words(numbers.reshape(15, -1), span).reshape(3, 5, -1))


def narrow(tokens, k, X, M, D, kinds=("int4", "int4"), groups=(32, 32), dtype=BF16):
    """Operands in few bits, or as they were for the kind `WIDE`, and those of the dense formula."""
    x, *weights, chosen, scales = routed(tokens, k, X, M, D, dtype)
    touched = np.isin(np.arange(X), chosen)
    small, wide = [], []
    for i, (kind, group, weight) in enumerate(zip(kinds, groups, weights, strict=True)):
        one, numbers = (weight, weight) if kind == WIDE else stack(kind, group, weight.shape, touched, i)
        small.append(one)
        wide.append(numbers)
    return (x, *small, chosen, scales), (x, *wide, chosen, scales)


CASES = {
    "one token": ((1,), 3, 7, 32, 64),
    "few tokens": ((7,), 3, 5, 96, 128),
    "sorted": ((3, 7), 4, 9, 32, 64),
    "all on one expert, in blocks": ((70,), 1, 1, 32, 64),
}


@pytest.mark.parametrize(
    ("case", "kinds", "groups"),
    [
        ("one token", ("int4", "zeros"), (64, 32)),
        ("one token", ("fp8", "fp8"), (64, 32)),
        ("few tokens", ("zeros", "int4"), (128, 32)),
        ("few tokens", ("fp8", "int4"), (128, 32)),
        ("sorted", ("fp8", WIDE), (32, None)),
        ("sorted", (WIDE, "int4"), (None, 32)),
        ("all on one expert, in blocks", ("fp8", "zeros"), (32, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("implementation", "dtype", "most"), [("reference", F32, 1e-6), ("triton", BF16, 5e-3)], ids=["f32", "triton"]
)
def test_dense_formula(implementation, dtype, most, case, kinds, groups):
    operands, wide = narrow(*CASES[case], kinds=kinds, groups=groups, dtype=dtype)
    out = run(implementation)(*operands)
    assert (out.dtype, out.shape) == (dtype, operands[0].shape)
    assert error(out, expected(*wide)) < most


@pytest.mark.gpu
@pytest.mark.in_turns(6)
@pytest.mark.parametrize("case", [((1,), 3, 7, 128, 256), ((7,), 3, 5, 384, 128), ((2, 8), 8, 300, 256, 384)], ids=str)
@pytest.mark.parametrize(
    ("kinds", "shared"),
    [
        (("int4", "int4"), None),
        (("zeros", "zeros"), "zeros"),
        (("fp8", "fp8"), "fp8"),
        (("int4", "fp8"), None),
    ],
    ids=str,
)
def test_few_tokens_on_hopper(kinds, shared, case):
    """The shared expert is beside the routed ones where it is in as many bits, in e4m3 with numbers one by one."""
    tokens, _, _, M, D = case
    operands, wide = narrow(*case, kinds=kinds, groups=(128, 128))
    by_all, out = None, 0.0
    if shared is not None:
        shapes_of_it = (M // 64, 2, 64, D), (D, M)
        weights, numbers = zip(*(of_all(shared, shape, i) for i, shape in enumerate(shapes_of_it)), strict=True)
        opened = np.random.default_rng(5).random(tokens).astype(np.float32)
        by_all = Shared(*weights, jnp.asarray(opened))
        gate_up = np.asarray(numbers[0], np.float64).swapaxes(0, 1).reshape(1, 2, M, D)
        down = np.asarray(numbers[1], np.float64)[None]
        out = expected(operands[0], gate_up, down, np.zeros((*tokens, 1), np.int32), opened[..., None])
    found = run("mosaic")(*operands, by_all)
    assert (found.dtype, found.shape) == (BF16, operands[0].shape)
    assert error(found, expected(*wide) + out) < 5e-3


def of_all(kind, shape, seed):
    """A matrix of a shared expert as dense weights are, and its numbers."""
    (_, *parts), numbers = test_quantized_product.operands(
        kind, 128, outputs=int(np.prod(shape[:-1])), inputs=shape[-1], tokens=(1,), seed=seed
    )
    parts = (None if part is None else part.reshape(*shape[:-1], -1) for part in parts)
    return FewBits(*parts), np.asarray(numbers).reshape(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["zeros", "fp8"])
def test_a_token_is_the_same_in_any_company_on_hopper(kind):
    (x, *weights, chosen, scales), _ = narrow((16,), 2, 4, 128, 256, kinds=(kind, kind), groups=(128, 128))
    clean = np.asarray(run("mosaic")(x, *weights, chosen, scales), np.float32)
    order = np.random.default_rng(1).permutation(16)
    moved = run("mosaic")(x[order].at[0].set(jnp.nan), *weights, chosen[order], scales[order])
    np.testing.assert_array_equal(np.asarray(moved, np.float32)[1:], clean[order[1:]])
    alone = run("mosaic")(x[3:4], *weights, chosen[3:4], scales[3:4])
    np.testing.assert_array_equal(np.asarray(alone, np.float32), clean[3:4])


@pytest.mark.parametrize(("tokens", "kind"), [(16, "zeros"), (24, "fp8")])
def test_a_token_is_the_same_in_any_company(tokens, kind):
    """Also beside tokens that are NaN, and in another order."""
    (x, *weights, chosen, scales), _ = narrow((tokens,), 2, 4, 32, 64, kinds=(kind, kind))
    clean = np.asarray(run("triton")(x, *weights, chosen, scales), np.float32)
    order = np.random.default_rng(1).permutation(tokens)
    moved = run("triton")(x[order].at[0].set(jnp.nan), *weights, chosen[order], scales[order])
    np.testing.assert_array_equal(np.asarray(moved, np.float32)[1:], clean[order[1:]])
    assert np.isnan(np.asarray(moved, np.float32)[0]).all()


def shapes(kind, tokens, X, M, D, group=128, k=8):
    struct = jax.ShapeDtypeStruct

    def few(*shape):
        places, dtype = (2, jnp.int16) if kind == "fp8" else (4, jnp.uint16)
        values = struct((*shape[:-1], shape[-1] // places), dtype)
        scales = struct((*shape[:-1], shape[-1] // group), BF16 if kind == "fp8" else jnp.float16)
        return FewBits(values, scales, struct(scales.shape, jnp.uint8) if kind == "zeros" else None)

    weights = few(X, 2, M, D), few(X, D, M)
    return struct((tokens, D), BF16), *weights, struct((tokens, k), jnp.int32), struct((tokens, k), F32)


@pytest.mark.in_turns(12)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("kind", ["int4", "zeros", "fp8"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 8192])
def test_it_lowers_and_is_picked(monkeypatch, capability, kind, tokens):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    for X, M, D in (QWEN35_35B, QWEN35_122B, (256, 128, 3072)):  # the last is a shard of one
        call = shapes(kind, tokens, X, M, D)
        wanted = "reference" if kind == "fp8" and capability < (8, 9) else "triton"
        if capability == (9, 0) and tokens == 16:
            wanted = "mosaic"
        assert operation_of(*call[1:3]).choose(call[:4], Device("cuda", capability)).name == wanted
        config = fitted(default_config(tokens, 8, *call[1:3]), *call[1:3])
        bits = 8 if kind == "fp8" else 4
        for tile, parts in ((config.gate_up, 2), (config.down, 1)):
            ring = tile.num_stages * tile.depth * (parts * tile.rows * bits // 8 + 2 * config.tokens)
            assert tile.num_stages > 1
            assert ring <= (227 if capability == (9, 0) else 99) * 1024
    text = cuda_lowering(lambda *a: experts(*a, implementation="triton"), *call)
    assert text.count("xla.gpu.triton") == (2 if tokens <= 16 else 3)


SHARE = Spec(None, None, "tp")


@pytest.mark.parametrize("kind", ["int4", "zeros", "fp8"])
def test_devices_with_parts_of_the_width(kind):
    """Values, scales and zero points of rows for gate and up, of groups of inputs for down."""
    operands, wide = narrow((5,), 2, 4, 128, 64, kinds=(kind, kind), groups=(64, 32), dtype=F32)
    specs = Spec(), *[jax.tree.map(lambda _: SHARE, weight) for weight in operands[1:3]], Spec(), Spec()

    def share(*operands, implementation=None):
        return jax.lax.psum(experts(*operands, implementation=implementation), "tp")

    shard = jax.shard_map(share, mesh=mesh_of(4), in_specs=specs, out_specs=Spec())
    assert error(jax.jit(shard)(*operands), expected(*wide)) < 1e-6
    traced = jax.shard_map(
        functools.partial(share, implementation="triton"), mesh=mesh_of(4), in_specs=specs, out_specs=Spec()
    )
    call = operands[0].astype(BF16), *operands[1:]
    assert "xla.gpu.triton" in jax.jit(traced).trace(*call).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("call", "dtype", "message"),
    [
        (shapes("int4", 4, 4, 32, 64, group=16, k=2), BF16, "groups of a multiple of 32 inputs; these have 16"),
        (shapes("fp8", 4, 4, 32, 64, group=32, k=2), jnp.float16, "few bits take bf16; this is float16"),
    ],
)
def test_triton_refuses_in_a_sentence(call, dtype, message):
    call = (jax.ShapeDtypeStruct(call[0].shape, dtype), *call[1:])
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(experts, implementation="triton"), *call)
    assert operation_of(*call[1:3]).choose(call[:4], Device("cuda", (9, 0))).name == "reference"


def few_shared(kind, parts, units, D, dtype=E4M3):
    """Shapes of a shared expert, in e4m3 with numbers one by one."""

    def few(*shape):
        values = (*shape[:-1], shape[-1] // 4) if kind == "int4" else shape
        scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 128), BF16)
        return FewBits(jax.ShapeDtypeStruct(values, jnp.uint16 if kind == "int4" else dtype), scales)

    return Shared(few(parts, 2, units, D), few(D, parts * units), jax.ShapeDtypeStruct((16,), F32))


@pytest.mark.parametrize(
    ("kind", "tokens", "shared", "name"),
    [
        ("fp8", 16, few_shared("fp8", 8, 64, 3072), "mosaic"),
        ("int4", 16, few_shared("int4", 8, 64, 3072), "mosaic"),
        ("int4", 8, None, "mosaic"),
        ("int4", 7, None, "triton"),
        ("int4", 17, None, "triton"),
        ("int4", 16, few_shared("fp8", 8, 64, 3072), "triton"),  # in other bits
        ("int4", 16, few_shared("int4", 16, 32, 3072), "triton"),  # in parts of half a block
        ("int4", 16, few_shared("int4", 4, 64, 3072), "triton"),  # half as wide as the others
    ],
)
def test_which_kernels_few_tokens_on_hopper_have(monkeypatch, kind, tokens, shared, name):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    x, gate_up, down, chosen, weights = shapes(kind, tokens, 256, 512, 3072)
    call = (x, gate_up, down, chosen, *([] if shared is None else [shared]))
    assert operation_of(gate_up, down).choose(call, Device("cuda", (9, 0))).name == name
    if shared is not None and name == "triton":
        run_it = functools.partial(experts, implementation="mosaic")
        with pytest.raises(NotImplementedError, match="need a shared expert as wide as the others, in as many bits"):
            jax.eval_shape(run_it, x, gate_up, down, chosen, weights, shared)
        return
    text = cuda_lowering(lambda *given: experts(*given), x, gate_up, down, chosen, weights, shared)
    assert ("mosaic_gpu" in text, "xla.gpu.triton" in text) == (name == "mosaic", name == "triton")


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_each_device_has_its_share_of_them_on_hopper(monkeypatch, kind):
    """Also of the shared expert, whose parts are dealt out; with check_vma on, as users run it."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    x, *weights, chosen, scales = shapes(kind, 16, 256, 1024, 3072)
    specs = Spec(), *[jax.tree.map(lambda _: SHARE, weight) for weight in weights], Spec(), Spec()
    specs_of_shared = Shared(Spec("tp"), Spec(None, "tp"), Spec())
    shard = jax.shard_map(
        lambda *given: jax.lax.psum(experts(*given), "tp"),
        mesh=mesh_of(4),
        in_specs=(*specs, specs_of_shared),
        out_specs=Spec(),
    )
    traced = jax.jit(shard).trace(x, *weights, chosen, scales, few_shared(kind, 16, 64, 3072))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text, "xla.gpu.triton" in text) == (True, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (shapes("int4", 16, 4, 128, 256, group=64, k=2), "groups of 128 inputs; these have 64"),
        (shapes("int4", 17, 4, 128, 256, k=2), "up to 16 tokens in bf16; these are 17 in bfloat16"),
        (shapes("int4", 16, 1024, 128, 256, k=2), "have 4096 bytes .* 1024 experts and 32 pairs take 4372"),
    ],
)
def test_mosaic_refuses_in_a_sentence(call, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(experts, implementation="mosaic"), *call)


@pytest.mark.parametrize(("M", "kind"), [(256, "int4"), (512, "fp8"), (1024, "fp8"), (1024, "int4")])
def test_rings_fit_and_pairs_of_consumers_keep_their_slots(M, kind):
    x, gate_up, down, *_ = shapes(kind, 16, 256, M, 3072)
    for plan in plans_of(x, gate_up, down, None):
        assert plan.stages >= 4
        assert plan.stages % (TURNS * plan.steps if plan.by_tile else TURNS) == 0
        in_flight = plan.stages * plan.groups * (128 * plan.line + 2 * 16 * 128)
        assert 140 << 10 < in_flight < 227 << 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": jnp.zeros((4, 2, 32, 64), jnp.int8)}, r"uint16 \(4 bits\), .*without zeros; got int8"),
        ({"values": jnp.zeros((4, 2, 32, 64), E4M3)}, "experts in e4m3 must be int16 words of two numbers; got float8"),
        ({"scales": jnp.zeros((4, 2, 32, 3))}, r"weight \[4, 2, 32, 64\], G dividing the last; got float32\[4, 2, 32"),
        ({"zeros": jnp.zeros((4, 2, 32, 2), jnp.int8)}, r"zeros must be uint8 \[4, 2, 32, 2\]; got int8"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    (x, gate_up, *rest), _ = narrow((3,), 2, 4, 32, 64)
    with pytest.raises(ValueError, match=message):
        experts(x, gate_up._replace(**change), *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "zeros", "fp8"])
@pytest.mark.parametrize("tokens", [1, 16, 64, 700])
def test_kernels(kind, tokens):
    operands, wide = narrow((tokens,), 8, 32, 256, 512, kinds=(kind, kind), groups=(128, 128))
    assert error(run("triton")(*operands), expected(*wide)) < 6e-3
