"""Every implementation of the page write that this machine has, against a loop over tokens in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import write_kv
from tests.kernels.cases import BF16, E4M3, E5M2, F32

DTYPES = [BF16, E4M3, E5M2, jnp.float16, F32]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
P, K, S, H, T = 6, 3, 16, 64, 12


def pools(dtype, seed=0, shape=(P, K, S, H)):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape).astype(np.float32), dtype) for _ in range(2)]


def tokens(seed=1, n=T, size=1.0, dtype=BF16):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal((n, K, H)).astype(np.float32) * size, dtype) for _ in range(2)]


def by_loop(pool, x, slots, scale):
    """The oracle of the oracle: one token at a time, rounding by ml_dtypes."""
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
        (k_pages, v_pages), (k, v) = pools(dtype), tokens(data.draw(st.integers(0, 99)))
        found = write(k_pages, v_pages, k, v, slots, k_scale=scale, v_scale=np.float32(0.5))
        same_bits(found[0], by_loop(k_pages, k, slots, scale))
        same_bits(found[1], by_loop(v_pages, v, slots, 0.5))

    check()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: jnp.dtype(d).name)
def test_overflow_is_stored_as_the_largest_number(write, dtype):
    (k_pages, v_pages), (k, v) = pools(dtype), tokens(size=1e6)
    found = write(k_pages, v_pages, k, v, np.arange(T, dtype=np.int32))
    for pool in found:
        written = np.asarray(pool[0, :, :T], np.float32)
        assert np.isfinite(written).all()
        assert np.abs(written).max() == float(jnp.finfo(dtype).max)


def test_skipped_tokens_write_nothing_even_if_they_are_nan(write):
    (k_pages, v_pages), (k, v) = pools(E4M3), tokens()
    k[:], v[:] = np.nan, np.nan
    found = write(k_pages, v_pages, k, v, np.full(T, -1, np.int32))
    same_bits(found[0], k_pages)
    same_bits(found[1], v_pages)


def test_leading_axes_are_tokens(write):
    (k_pages, v_pages), (k, v) = pools(BF16), tokens()
    slots = np.arange(T, dtype=np.int32) * 5
    flat = write(k_pages, v_pages, k, v, slots)
    nested = write(k_pages, v_pages, k.reshape(3, 4, K, H), v.reshape(3, 4, K, H), slots.reshape(3, 4))
    same_bits(nested[0], np.asarray(flat[0]))
    same_bits(nested[1], np.asarray(flat[1]))


def test_no_token_at_all(write):
    k_pages, v_pages = pools(BF16)
    found = write(k_pages, v_pages, *tokens(n=0), np.zeros(0, np.int32))
    same_bits(found[0], k_pages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_pages": np.zeros((P, K, S, 2 * H), np.float32)}, "k_pages and v_pages must be alike"),
        ({"v": np.zeros((T, K, 2 * H), np.float32)}, r"k and v must be \[\*slots=\[12\], K=3, H=64\]"),
        ({"slots": np.zeros(T, np.float32)}, "slots must be integers; got float32"),
        ({"k_scale": np.ones(2, np.float32)}, r"k_scale must be a scalar or one number a kv head \[3\]; got \[2\]"),
        ({"implementation": "mosaic"}, "implementation must be 'triton', 'reference' or None; got 'mosaic'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    (k_pages, v_pages), (k, v) = pools(F32), tokens(dtype=F32)
    right = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": np.arange(T)}
    with pytest.raises(ValueError, match=message):
        write_kv(**(right | change))


def test_triton_refuses_in_a_sentence():
    pool = np.zeros((2, 1, 16, 96), np.float32)
    x = np.zeros((1, 1, 96), np.float32)
    with pytest.raises(NotImplementedError, match="a head size that is a power of two; this is 96"):
        write_kv(pool, pool, x, x, np.zeros(1, np.int32), implementation="triton", interpret=True)
    big = jax.ShapeDtypeStruct((3 * (1 << 30) // (64 * 128), 1, 64, 128), E4M3)
    token = jax.ShapeDtypeStruct((1, 1, 128), BF16)
    slot = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        jax.eval_shape(lambda *a: write_kv(*a, implementation="triton"), big, big, token, token, slot)
