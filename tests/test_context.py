"""A drafter's context of all layers at once, against layer after layer, in every cache that takes one."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.caches import ContextCache
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import LayerMask
from dflash_jax.state import paged_kv as module
from dflash_jax.state.paged_kv import PagedKVCache, Place
from dflash_jax.train.cache import SequenceCache
from pallas_kernels import Rotary, _compat
from tests.dense_kv import DenseKVCache
from tests.kernels.cases import BF16, E4M3, F32, cuda_lowering, mesh_of
from tests.kernels.conftest import ON_GPU

B, T, K, H, S, L = 2, 5, 4, 16, 8, 5
# Four layers in a pool, in no order, and one in another, whose group has another table.
PLACES = (Place(1, 0, 12), Place(1, 0, 0), Place(0, 1, 0), Place(1, 0, 4), Place(1, 0, 8))
POSITIONS = np.array([[6, 7, 8, 9, -1], [0, 1, 23, 24, 900]], np.int32)  # of which 24 has no page, and 900 no entry
TABLES = (np.array([[0, 2, -1], [1, -1, 3]], np.int32), np.array([[3, 1, -1], [-1, 0, 2]], np.int32))


def numbers(*shape, seed=0, dtype=F32):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def context(joined, norms, dtype=F32):
    """Heads, tables, and a norm of each layer."""
    heads = numbers(B, T, K, 2 * L, H, dtype=dtype)
    angles = numbers(B, T, H // 2, seed=1)
    weights = [1 + 0.3 * numbers(H, seed=2 + i, dtype=dtype) if norms else None for i in range(L)]
    return [heads] if joined else np.split(heads, L, axis=3), Rotary(np.cos(angles), np.sin(angles), eps=0.01), weights


def paged(dtype=F32, with_scales=False):
    keys, values = ([numbers(pages, K, S, H, seed=i, dtype=dtype) for pages in (16, 4)] for i in (7, 8))
    scales = [np.abs(numbers(L, K, seed=i)) + 0.1 if with_scales else None for i in (9, 10)]
    arrays = jax.tree.map(jnp.asarray, (keys, values, *scales, None, TABLES, (np.zeros(B, np.int32),) * 2))
    return PagedKVCache(*arrays, PLACES, mesh=Mesh.of(1))


CACHES = {
    "paged": paged,
    "paged fp8": functools.partial(paged, E4M3, True),
    "dense": lambda: DenseKVCache.zeros(L, (B, 24, K, H), jnp.float32),
    "sequence": SequenceCache,
}


def at_once(cache, heads, rotary, norms):
    return cache.write_context(heads, rotary, norms, jnp.asarray(POSITIONS))


def one_by_one(cache, heads, rotary, norms):
    every = jnp.split(jnp.concatenate(heads, axis=-2), L, axis=-2)
    for layer, own in enumerate(every):
        q, cache = cache.write(layer, own, dataclasses.replace(rotary, k_norm=norms[layer]), jnp.asarray(POSITIONS))
        assert q.shape == (B, T, 0, H)
    return cache


def assert_same_bits(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.in_turns(8)
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("name", CACHES)
def test_layers_at_once_are_layers_one_by_one(name, norms, joined):
    cache = CACHES[name]()
    assert isinstance(cache, ContextCache)
    operands = (cache, *context(joined, norms))
    found = jax.jit(at_once)(*operands)
    assert_same_bits(found, jax.jit(one_by_one)(*operands))
    stored = [np.asarray(pool, np.float32) for pool in jax.tree.leaves((found.keys, found.values))]
    before = [np.asarray(pool, np.float32) for pool in jax.tree.leaves((cache.keys, cache.values))]
    assert all((x != y).any() for x, y in zip(stored, before or [0] * len(stored), strict=True))


@pytest.mark.parametrize("joined", [True, pytest.param(False, marks=pytest.mark.long)], ids=["joined", "apart"])
@pytest.mark.parametrize(
    ("dtype", "with_scales"), [(F32, False), (BF16, True), (E4M3, True)], ids=["float32", "bfloat16", "fp8"]
)
def test_kernels_write_what_kernels_write_one_by_one(monkeypatch, dtype, with_scales, joined):
    for name in ("write_kv", "write_context"):
        kernel = functools.partial(getattr(module, name), implementation="triton", interpret=not ON_GPU)
        monkeypatch.setattr(module, name, kernel)
    operands = (paged(dtype, with_scales), *context(joined, norms=True, dtype=BF16))
    as_written = {"xla_allow_excess_precision": False}  # every rounding to bfloat16
    found, expected = (jax.jit(f, compiler_options=as_written)(*operands) for f in (at_once, one_by_one))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("devices", [2, 3], ids=["split", "whole"])  # which four kv heads can be split over, and cannot
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_devices_write_their_own_heads(devices, joined):
    one, operands = paged(E4M3, True), context(joined, norms=True)
    many = dataclasses.replace(one, mesh=Mesh(mesh_of(devices)))
    found, expected = jax.jit(at_once)(many, *operands), jax.jit(at_once)(one, *operands)
    assert_same_bits((found.keys, found.values), (expected.keys, expected.values))
    shard = found.keys[0].addressable_shards[0].data
    assert shard.shape[1] == (K // devices if devices == 2 else K)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("joined", "norms"), [(True, True), (True, False), (False, True)])
def test_a_kernel_a_pool(monkeypatch, joined, norms, devices):
    """And no copy of what it reads: the heads, norms and scales."""
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    cache = dataclasses.replace(paged(E4M3, True), mesh=Mesh(mesh_of(devices)))
    operands = (cache, *context(joined, norms, BF16))
    if devices == 1:
        text = cuda_lowering(at_once, *operands)
    else:
        text = jax.jit(at_once).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    # One function a pool, since layers and shapes differ, and it is called once.
    assert text.count("xla.gpu.triton") == 2
    assert not any(f"stablehlo.{name} " in text for name in ("slice", "dynamic_slice", "concatenate"))


@pytest.mark.parametrize("is_fused", [True, False])
def test_cudnn_attends_only_where_its_kv_heads_can_be_split(monkeypatch, is_fused):
    """A mesh of four could not count the experts of a model of two kv heads."""
    calls = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: calls.append(q) or q)
    q, k = numbers(1, 3, 4, 8, dtype=BF16), numbers(1, 3, 2, 8, dtype=BF16)
    cache = SequenceCache({0: jnp.asarray(k)}, {0: jnp.asarray(k)}, is_fused=is_fused)
    cache.attend(0, jnp.asarray(q), jnp.arange(3)[None], jnp.array([3]), LayerMask("causal"))
    assert len(calls) == is_fused
