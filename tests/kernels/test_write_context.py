"""Keys and values of many layers in one call, against a call of ``write_kv`` for each, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Rotary, write_context, write_kv
from tests.kernels.cases import BF16, E4M3, E5M2, F32, cuda_lowering
from tests.kernels.conftest import ON_GPU, WRITERS
from tests.kernels.test_write_kv import H, K, P, S, T, pools, rotary_of, same_bits

L = 4
FIRST_PAGES = {0: P, 3: 0, 1: 2 * P}  # layer 2 keeps its pages elsewhere
SHAPE = (3 * P, K, S, H)
HOW = [("reference", False), ("triton", not ON_GPU)]


def name_of(dtype):
    return jnp.dtype(dtype).name


by_implementation = pytest.mark.parametrize(("implementation", "interpret"), HOW, ids=WRITERS)


def context(dtype=BF16, norms="norms", joined=True, n=T):
    """Heads of all layers, in one array or in three, tables, and a different norm for each layer."""
    rng = np.random.default_rng(3)
    heads = np.asarray(rng.standard_normal((n, K, 2 * L, H)).astype(np.float32), dtype)
    weights = [np.asarray(1 + 0.3 * rng.standard_normal(H), dtype) if norms == "norms" else None for _ in range(L)]
    return [heads] if joined else np.split(heads, [2, 6], axis=2), rotary_of(dtype, "no norms", n=n), weights


def some_slots():
    slots = np.random.default_rng(5).permutation(P * S)[:T].astype(np.int32)
    slots[[0, 4, 5]] = -1
    return slots


def scales():
    rng = np.random.default_rng(9)
    return {name: rng.uniform(0.01, 2, (L, K)).astype(np.float32) for name in ("k_scale", "v_scale")}


def at_once(k_pages, v_pages, heads, slots, rotary, norms, scale, **how):
    return write_context(k_pages, v_pages, heads, slots, rotary, norms, FIRST_PAGES, **scale, **how)


def one_by_one(k_pages, v_pages, heads, slots, rotary, norms, scale, **how):
    heads = jnp.concatenate(heads, axis=-2)
    for layer, first_page in FIRST_PAGES.items():
        of_layer = heads[..., 2 * layer : 2 * layer + 2, :]
        own_slots = jnp.where(slots < 0, -1, slots + first_page * S)
        own_rotary = dataclasses.replace(rotary, k_norm=norms[layer])
        factors = {name: x[layer] for name, x in scale.items()}
        _, k_pages, v_pages = write_kv(k_pages, v_pages, of_layer, own_slots, own_rotary, **factors, **how)
    return k_pages, v_pages


def run(function, *operands, **how):
    """Run with XLA held to the roundings as written."""
    compiled = jax.jit(functools.partial(function, **how)).lower(*operands)
    return [np.asarray(x) for x in compiled.compile({"xla_allow_excess_precision": False})(*operands)]


KINDS = [(BF16, BF16), (F32, F32), (BF16, E4M3), (F32, E4M3), (BF16, E5M2)]  # of heads and pages
FIRST_KINDS = ((F32, E4M3),)  # the others differ from it in norms and parts as in dtypes alone


def same_bits_cases():
    """Heads and pages of all kinds, whole and with norms; parts and heads without norms of the first ones."""
    for kind, norms, joined in itertools.product(KINDS, ("norms", "no norms"), (True, False)):
        is_one_more = (norms, joined) != ("norms", True) and (
            kind not in FIRST_KINDS or (norms == "no norms" and not joined)
        )
        name = "-".join([*map(name_of, kind), norms, "joined" if joined else "apart"])
        yield pytest.param(*kind, norms, joined, id=name, marks=pytest.mark.long if is_one_more else ())


@by_implementation
@pytest.mark.parametrize(("dtype", "pages", "norms", "joined"), [*same_bits_cases()])
def test_the_same_bits_as_layer_by_layer(implementation, interpret, joined, norms, dtype, pages):
    heads, rotary, weights = context(dtype, norms, joined)
    operands = (*pools(pages, shape=SHAPE), heads, some_slots(), rotary, weights, scales())
    outputs, expected = (
        run(function, *operands, implementation=implementation, interpret=interpret)
        for function in (at_once, one_by_one)
    )
    for x, y, before in zip(outputs, expected, operands, strict=False):
        same_bits(x, y)
        assert np.sum((x != before).any(axis=(1, 3))) == len(FIRST_PAGES) * (T - 3)  # each where no other wrote


@pytest.mark.parametrize("norms", ["norms", "no norms"])
@pytest.mark.parametrize(("dtype", "pages"), [(BF16, BF16), (F32, F32), (BF16, E4M3), (F32, E5M2)], ids=name_of)
def test_the_kernel_rounds_where_the_reference_rounds(norms, dtype, pages):
    heads, rotary, weights = context(dtype, norms)
    exact = {name: np.exp2(np.round(np.log2(x))) for name, x in scales().items()}  # to divide by
    operands = (*pools(pages, shape=SHAPE), heads, some_slots(), rotary, weights, exact)
    expected = run(at_once, *operands, implementation="reference")
    keys, values = run(at_once, *operands, implementation="triton", interpret=not ON_GPU)
    same_bits(values, expected[1])
    if pages == F32:
        np.testing.assert_allclose(keys, expected[0], rtol=1e-5, atol=1e-6)
    else:
        assert np.mean(keys != expected[0]) < 0.01  # squares summed in another order move a few


@by_implementation
def test_tokens_without_a_slot_write_nothing_even_if_they_are_nan(implementation, interpret):
    heads, rotary, weights = context()
    before = pools(E4M3, shape=SHAPE)
    operands = (*before, [np.full_like(heads[0], np.nan)], np.full(T, -1, np.int32), rotary, weights, {})
    for x, y in zip(run(at_once, *operands, implementation=implementation, interpret=interpret), before, strict=True):
        same_bits(x, y)


@by_implementation
@pytest.mark.parametrize("tokens", [(3, 4), (), (0,), (2, 0)], ids=str)
def test_leading_axes_are_tokens(implementation, interpret, tokens):
    n = int(np.prod(tokens))
    heads, rotary, weights = context(n=n)
    slots = some_slots()[::-1][:n].copy()
    how = {"implementation": implementation, "interpret": interpret}
    flat = run(at_once, *pools(BF16, shape=SHAPE), heads, slots, rotary, weights, {}, **how)
    heads, slots, rotary = jax.tree.map(lambda x: x.reshape((*tokens, *x.shape[1:])), (heads, slots, rotary))
    outputs = run(at_once, *pools(BF16, shape=SHAPE), heads, slots, rotary, weights, {}, **how)
    for x, y, before in zip(outputs, flat, pools(BF16, shape=SHAPE), strict=True):
        same_bits(x, y)
        assert (x != before).any() == (n > 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_pages": np.zeros(SHAPE, BF16)}, "k_pages and v_pages must be alike"),
        ({"heads": [np.zeros((T, K, 2 * L, 2 * H), np.float32)]}, r"heads must be \[\*slots=\[12\], K=3, J, H=64\]"),
        ({"heads": [np.zeros((T, K, 6, H), np.float32)]}, r"heads must have a key and a value .*; got \[6\], 4 and"),
        ({"heads": [np.zeros((T, K, J, H), np.float32) for J in (3, 5)]}, r"heads must have .*; got \[3, 5\], 4 and"),
        ({"k_norms": [None] * 3}, r"heads must have a key and a value for each layer of k_norms.*; got \[8\], 3 and"),
        ({"k_norms": [None] * 3 + [np.ones(3)]}, r"rotary.k_norm must be \[64\], as heads and slots are; got \[3\]"),
        ({"first_pages": {4: 0}}, r"first_pages must name some of these layers; got \[8\], 4 and \[4\]"),
        ({"first_pages": {}}, r"first_pages must name some of these layers; got \[8\], 4 and \[\]"),
        ({"rotary": rotary_of(F32, "norms")}, "rotary must have no norms"),
        (
            {"rotary": Rotary(np.zeros((T, H), np.float32), np.zeros((T, H // 2), np.float32))},
            r"rotary.cos must be \[12, 32\], as heads and slots are; got \[12, 64\]",
        ),
        ({"slots": np.zeros(T, np.float32)}, "slots must be integers; got float32"),
        ({"k_scale": np.ones(K)}, r"k_scale must be a scalar or one number a kv head \[4, 3\]; got \[3\]"),
        ({"implementation": "mosaic"}, "implementation must be 'triton', 'reference' or None; got 'mosaic'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    heads, rotary, weights = context(F32)
    k_pages, v_pages = pools(F32, shape=SHAPE)
    right = {"k_pages": k_pages, "v_pages": v_pages, "heads": heads, "slots": some_slots()}
    right |= {"rotary": rotary, "k_norms": weights, "first_pages": FIRST_PAGES}
    with pytest.raises(ValueError, match=message):
        write_context(**(right | change))


def test_triton_refuses_in_a_sentence():
    pool, angles = np.zeros((2, 1, 16, 96), np.float32), np.zeros((1, 48), np.float32)
    with pytest.raises(NotImplementedError, match="a head size that is a power of two; this is 96"):
        write_context(
            pool, pool, [np.zeros((1, 1, 2, 96), np.float32)], np.zeros(1, np.int32), Rotary(angles, angles), [None],
            {0: 0}, implementation="triton", interpret=True,
        )  # fmt: skip


@pytest.mark.parametrize("norms", ["norms", "no norms"])
@pytest.mark.parametrize("pages", [BF16, E4M3, E5M2], ids=name_of)
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_one_kernel_for_cuda_that_writes_in_place_and_reads_heads_where_they_lie(joined, pages, norms):
    heads, rotary, weights = context(BF16, norms, joined)
    operands = (*pools(pages, shape=SHAPE), heads, some_slots(), rotary, weights, scales())
    text = cuda_lowering(functools.partial(at_once, implementation="triton"), *operands)
    calls = [line for line in text.splitlines() if "xla.gpu.triton" in line]
    assert len(calls) == 1
    for i in (0, 1):
        assert f"output_tuple_indices = [{i}], operand_index = {i}" in calls[0]
    assert not any(f"stablehlo.{name}" in text for name in ("slice", "dynamic_slice", "gather", "concatenate"))
