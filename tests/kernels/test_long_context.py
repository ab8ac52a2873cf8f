"""The longest context that is promised: 262,144 tokens, split over many programs, on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention

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
