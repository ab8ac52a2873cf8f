"""Every implementation of the page write that this machine has, against loops and float64 in numpy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import Rotary, write_kv
from tests.kernels.cases import BF16, E4M3, E5M2, F32
from tests.kernels.conftest import ON_GPU

DTYPES = [BF16, E4M3, E5M2, jnp.float16, F32]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
P, K, S, H, T = 6, 3, 16, 64, 12


def pools(dtype, seed=0, shape=(P, K, S, H)):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape).astype(np.float32), dtype) for _ in range(2)]


def tokens(seed=1, n=T, size=1.0, dtype=BF16, group=1):
    """Heads: ``group`` queries, a key and a value for each kv head."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_normal((n, K, group + 2, H)).astype(np.float32) * size, dtype)


def rotary_of(dtype, norms, n=T):
    """Angles of positions far apart; with ``norms="norms"`` weights of both norms, and an eps that is felt."""
    rng = np.random.default_rng(7)
    angles = rng.integers(0, 40000, (n, 1)) / 1e4 ** (np.arange(H // 2) / (H // 2))
    weights = [np.asarray(1 + 0.3 * rng.standard_normal(H), dtype) if norms == "norms" else None for _ in "qk"]
    return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), *weights, eps=0.05)


def by_loop(pool, x, slots, scale):
    """An oracle for the reference: one token at a time, rounding by ml_dtypes."""
    out, limit = pool.copy(), float(jnp.finfo(pool.dtype).max)
    for token, slot in enumerate(slots):
        if slot >= 0:
            y = np.asarray(x[token], np.float32) / np.broadcast_to(np.asarray(scale, np.float32), (K,))[:, None]
            out[slot // S, :, slot % S] = np.clip(y, -limit, limit).astype(pool.dtype)
    return out


def same_bits(found, expected):
    found = np.asarray(found)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{found.itemsize}"))


@by_dtype
def test_writes_what_a_loop_writes(write, dtype):
    @settings(
        max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.data())
    def check(data):
        slots = np.array(data.draw(st.permutations(range(P * S)))[:T], np.int32)
        slots[data.draw(st.lists(st.booleans(), min_size=T, max_size=T))] = -1
        scale = np.array(data.draw(st.lists(st.sampled_from([0.25, 0.5, 1, 2]), min_size=K, max_size=K)), np.float32)
        (k_pages, v_pages), heads = pools(dtype), tokens(data.draw(st.integers(0, 99)))
        q, *found = write(k_pages, v_pages, heads, slots, k_scale=scale, v_scale=np.float32(0.5))
        same_bits(q, heads[:, :, 0])
        same_bits(found[0], by_loop(k_pages, heads[:, :, 1], slots, scale))
        same_bits(found[1], by_loop(v_pages, heads[:, :, 2], slots, 0.5))

    check()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: jnp.dtype(d).name)
def test_overflow_is_stored_as_the_largest_number(write, dtype):
    _, *found = write(*pools(dtype), tokens(size=1e6), np.arange(T, dtype=np.int32))
    for pool in found:
        written = np.asarray(pool[0, :, :T], np.float32)
        assert np.isfinite(written).all()
        assert np.abs(written).max() == float(jnp.finfo(dtype).max)


def test_skipped_tokens_write_nothing_even_if_they_are_nan(write):
    (k_pages, v_pages), heads = pools(E4M3), tokens()
    heads[:, :, 1:] = np.nan
    q, *found = write(k_pages, v_pages, heads, np.full(T, -1, np.int32))
    same_bits(q, heads[:, :, 0])
    same_bits(found[0], k_pages)
    same_bits(found[1], v_pages)


def test_leading_axes_are_tokens(write):
    heads, slots, rotary = tokens(group=2), np.arange(T, dtype=np.int32) * 5, rotary_of(BF16, "norms")
    scales = np.linspace(0.5, 2, T, dtype=np.float32), np.full(heads.shape[1:], 3, np.float32)
    rotary = dataclasses.replace(rotary, scales=scales)
    q, *flat = write(*pools(BF16), heads, slots, rotary)
    rotary = jax.tree.map(lambda x: x.reshape(3, 4, *x.shape[1:]) if len(x) == T else x, rotary)
    found = write(*pools(BF16), heads.reshape(3, 4, K, 4, H), slots.reshape(3, 4), rotary)
    same_bits(found[0], np.asarray(q).reshape(3, 4, 2 * K, H))
    same_bits(found[1], np.asarray(flat[0]))
    same_bits(found[2], np.asarray(flat[1]))


@pytest.mark.parametrize("group", [1, 3])
def test_gates_in_front_of_the_queries_are_not_read(write, group):
    heads, rotary, slots = tokens(group=group), rotary_of(BF16, "norms"), np.arange(T, dtype=np.int32)
    expected = write(*pools(BF16), heads, slots, rotary)
    with_gates = np.concatenate([np.full((T, K, group, H), np.nan, BF16), heads], axis=2)
    found = write(*pools(BF16), with_gates, slots, dataclasses.replace(rotary, has_gates=True))
    for array, wanted in zip(found, expected, strict=True):
        same_bits(array, np.asarray(wanted))


@pytest.mark.parametrize("rotary", [None, "norms"])
def test_no_token_at_all(write, rotary):
    k_pages, v_pages = pools(BF16)
    found = write(k_pages, v_pages, tokens(n=0), np.zeros(0, np.int32), rotary and rotary_of(BF16, rotary, n=0))
    assert found[0].shape == (0, K, H)
    same_bits(found[1], k_pages)


def by_hand(x, weight, rotary):
    """Norm and RoPE of heads [T, N, H] in float64, each pair of elements a complex number that is rotated."""
    x = np.asarray(x, np.float64)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + rotary.eps) * np.asarray(weight, np.float64)
    turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * (rotary.cos + 1j * rotary.sin)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def assert_close(found, expected, dtype):
    """Equal within three roundings of ``dtype``: of the norm, of its weight, and at the end."""
    error = np.abs(np.asarray(found, np.float64) - expected)
    size = np.linalg.norm(expected, axis=-1, keepdims=True) / np.sqrt(H)  # of a head: RoPE mixes two of its elements
    assert (error / size).max() < 8 * float(jnp.finfo(dtype).eps)


@pytest.mark.in_turns(20)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("norms", ["norms", "no norms"])
@pytest.mark.parametrize("group", [0, 3, 4, *(pytest.param(group, marks=pytest.mark.long) for group in (1, 5))])
def test_norms_and_rope(write, dtype, norms, group):
    heads, rotary, slots = tokens(dtype=dtype, group=group), rotary_of(dtype, norms), np.arange(T, dtype=np.int32) + 9
    slots[[2, 7]] = -1
    k_pages, v_pages = pools(dtype)
    q, *found = write(k_pages, v_pages, heads, slots, rotary)
    assert (q.shape, q.dtype) == ((T, K * group, H), dtype)
    if group:
        assert_close(q, by_hand(heads[:, :, :group].reshape(T, -1, H), rotary.q_norm, rotary), dtype)
    kept, (page, offset) = slots >= 0, np.divmod(slots[slots >= 0], S)
    keys = by_hand(heads[:, :, group], rotary.k_norm, rotary)
    assert_close(np.asarray(found[0])[page, :, offset], keys[kept], dtype)
    same_bits(found[1], by_loop(v_pages, heads[:, :, group + 1], slots, 1.0))
    untouched = np.ones((P, S), bool)
    untouched[page, offset] = False
    same_bits(np.asarray(found[0]).swapaxes(1, 2)[untouched], k_pages.swapaxes(1, 2)[untouched])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("group", [0, 3])
def test_scales_of_fp8_products_come_first(write, dtype, group):
    heads, rotary, slots = tokens(dtype=dtype, group=group), rotary_of(dtype, "norms"), np.arange(T, dtype=np.int32)
    rng = np.random.default_rng(3)
    of_tokens, of_columns = (rng.uniform(0.1, 9, s).astype(np.float32) for s in ((T,), heads.shape[1:]))
    scaled = (heads.astype(np.float32) * (of_tokens[:, None, None, None] * of_columns)).astype(dtype)
    q, *found = write(*pools(dtype), heads, slots, dataclasses.replace(rotary, scales=(of_tokens, of_columns)))
    if group:
        assert_close(q, by_hand(scaled[:, :, :group].reshape(T, -1, H), rotary.q_norm, rotary), dtype)
    keys = np.asarray(found[0])[0, :, :T].swapaxes(0, 1)
    assert_close(keys, by_hand(scaled[:, :, group], rotary.k_norm, rotary), dtype)
    same_bits(found[1], by_loop(pools(dtype)[1], scaled[:, :, group + 1], slots, 1.0))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: jnp.dtype(d).name)
def test_fp8_pages_hold_the_rotated_keys_divided_by_their_scale(write, dtype):
    heads, rotary, slots = tokens(dtype=F32, group=3), rotary_of(F32, "norms"), np.arange(T, dtype=np.int32)
    scale = np.array([0.25, 3.0, 1e-5], np.float32)  # the last overflows
    k_pages, v_pages = pools(dtype)
    q, *found = write(k_pages, v_pages, heads, slots, rotary, k_scale=scale, v_scale=np.float32(0.5))
    assert q.dtype == F32
    limit = float(jnp.finfo(dtype).max)
    keys = np.clip(by_hand(heads[:, :, 3], rotary.k_norm, rotary) / scale[:, None], -limit, limit)
    stored = np.asarray(found[0][0, :, :T], np.float64).swapaxes(0, 1)
    step = float(jnp.finfo(dtype).eps)  # relative, of normal numbers; 2 ** -9 and less is the step of the others
    assert (np.abs(stored - keys) <= np.maximum(step / 2 * 1.001 * np.abs(keys), 2.0**-10)).all()
    assert np.abs(stored[:, 2]).max() == limit
    same_bits(found[1], by_loop(v_pages, heads[:, :, 4], slots, 0.5))


@pytest.mark.parametrize("dtype", [BF16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_the_kernel_rounds_where_the_reference_rounds(dtype):
    """Equal bit for bit, with XLA held to the roundings as written; another rounding moves every third number."""
    operands = (*pools(dtype), tokens(dtype=dtype, group=4), np.arange(T, dtype=np.int32), rotary_of(dtype, "norms"))

    def run(**how):
        compiled = jax.jit(functools.partial(write_kv, **how)).lower(*operands)
        return compiled.compile({"xla_allow_excess_precision": False})(*operands)

    expected = run(implementation="reference")
    for x, y in zip(run(implementation="triton", interpret=not ON_GPU), expected, strict=True):
        assert np.mean(np.asarray(x) != np.asarray(y)) < 0.01  # squares summed in another order move a few


def test_8192_tokens_of_a_prefill(write):
    rng = np.random.default_rng(0)
    heads = np.asarray(rng.standard_normal((8192, 1, 4, 2)), F32)
    slots = rng.permutation(8192).astype(np.int32)
    q, k_pages, v_pages = write(*[np.zeros((512, 1, 16, 2), F32) for _ in "kv"], heads, slots)
    same_bits(q, heads[:, 0, :2])
    for pool, x in ((k_pages, heads[:, 0, 2]), (v_pages, heads[:, 0, 3])):
        same_bits(np.asarray(pool).reshape(8192, 2)[slots], x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_pages": np.zeros((P, K, S, 2 * H), np.float32)}, "k_pages and v_pages must be alike"),
        ({"heads": np.zeros((T, K, 3, 2 * H), np.float32)}, r"heads must be \[\*slots=\[12\], K=3, J, H=64\]"),
        ({"heads": np.zeros((T, K, 1, H), np.float32)}, r"J being at least 2 .*; got \[12, 3, 1, 64\]"),
        ({"heads": np.zeros((K, H), np.float32)}, r"heads must be .*; got \[3, 64\]"),
        (
            {"rotary": Rotary(np.zeros((T, H), np.float32), np.zeros((T, H // 2), np.float32))},
            r"rotary.cos must be \[12, 32\], as heads and slots are; got \[12, 64\]",
        ),
        (
            {"rotary": dataclasses.replace(rotary_of(F32, "norms"), k_norm=np.ones(3, np.float32))},
            r"rotary.k_norm must be \[64\], as heads and slots are; got \[3\]",
        ),
        (
            {"rotary": dataclasses.replace(rotary_of(F32, ""), scales=(np.ones(T), np.ones((K, 1, H))))},
            r"rotary.scales\[1\] must be \[3, 3, 64\], as heads and slots are; got \[3, 1, 64\]",
        ),
        ({"slots": np.zeros(T, np.float32)}, "slots must be integers; got float32"),
        ({"k_scale": np.ones(2, np.float32)}, r"k_scale must be a scalar or one number a kv head \[3\]; got \[2\]"),
        ({"implementation": "mosaic"}, "implementation must be 'triton', 'reference' or None; got 'mosaic'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    k_pages, v_pages = pools(F32)
    right = {"k_pages": k_pages, "v_pages": v_pages, "heads": tokens(dtype=F32), "slots": np.arange(T)}
    with pytest.raises(ValueError, match=message):
        write_kv(**(right | change))


def test_triton_refuses_in_a_sentence():
    pool = np.zeros((2, 1, 16, 96), np.float32)
    heads = np.zeros((1, 1, 3, 96), np.float32)
    with pytest.raises(NotImplementedError, match="a head size that is a power of two; this is 96"):
        write_kv(pool, pool, heads, np.zeros(1, np.int32), implementation="triton", interpret=True)
    big = jax.ShapeDtypeStruct((3 * (1 << 30) // (64 * 128), 1, 64, 128), E4M3)
    token = jax.ShapeDtypeStruct((1, 1, 3, 128), BF16)
    slot = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda *a: write_kv(*a, implementation="triton"), big, big, token, slot)
