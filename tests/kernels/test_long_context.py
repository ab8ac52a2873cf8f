"""The longest context that is promised: 262,144 tokens, split over many programs, on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, write_kv

LENGTH, PAGE = 262_144, 64
B, T, N, K, H = 1, 16, 8, 2, 128


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "block"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_longest_context(implementation, dtype, mask):
    keys = jax.random.split(jax.random.key(0), 3)
    pages = LENGTH // PAGE
    q = 4 * jax.random.normal(keys[0], (B, T, N, H), jnp.bfloat16)  # sharp: far keys must not be lost in an average
    pools = [jax.random.normal(key, (pages, K, PAGE, H), jnp.bfloat16).astype(dtype) for key in keys[1:]]
    table = jnp.asarray(np.random.default_rng(0).permutation(pages)[None], jnp.int32)
    lengths = jnp.array([LENGTH], jnp.int32)
    found = paged_attention(q, *pools, table, lengths, mask=mask, implementation=implementation)
    wide = [pool.astype(jnp.float32) for pool in pools]
    expected = paged_attention(q.astype(jnp.float32), *wide, table, lengths, mask=mask, implementation="reference")
    error = jnp.linalg.norm(found.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    assert error <= 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_pages_at_both_ends_of_a_large_pool(implementation, dtype):
    """A pool that layers share is larger than 32 bits can address; reads and writes still reach the right pages."""
    far_apart(implementation, dtype, pages=-(-LARGE // (K * PAGE * H * jnp.dtype(dtype).itemsize)))


LARGE = (4 << 30) + (1 << 28)  # bytes


def far_apart(implementation, dtype, pages):
    """Write and attend over the first and the last pages of a pool, and over a pool of those pages alone."""
    rng = np.random.default_rng(0)
    used = np.concatenate([np.arange(3), np.arange(pages - 3, pages), [pages // 2]])
    heads = jnp.asarray(rng.standard_normal((B, T, K, N // K + 2, H)), jnp.bfloat16)
    some = [jnp.asarray(rng.standard_normal((len(used), K, PAGE, H)), jnp.bfloat16).astype(dtype) for _ in "kv"]
    order = rng.permutation(len(used))
    length = len(used) * PAGE
    position = np.arange(length - T, length)[None]
    found = []
    for pools, number in (
        (some, np.arange(len(used))),
        ([jnp.zeros((pages, K, PAGE, H), dtype).at[used].set(pool) for pool in some], used),
    ):
        table = number[order][None]
        slots = jnp.asarray(table[0, position // PAGE] * PAGE + position % PAGE, jnp.int32)
        q, *written = write_kv(*pools, heads, slots)
        lengths = jnp.array([length], jnp.int32)
        out = paged_attention(q, *written, jnp.asarray(table, jnp.int32), lengths, implementation=implementation)
        found.append([out, *(pool[jnp.asarray(number)] for pool in written)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
