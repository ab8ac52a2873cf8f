"""The kernels under shard_map over kv heads: each device holds its heads' pages and does their part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import Rotary, paged_attention, write_kv
from tests.kernels.cases import E4M3, Geometry, brute_force, error, random_call
from tests.kernels.conftest import ON_GPU

DEVICES = len(jax.devices()) if ON_GPU else 4
HEADS = Spec(None, None, "tp")  # queries [B, T, N, H] and heads [B, T, K, J, H]
PAGES = Spec(None, "tp")


@pytest.fixture
def mesh():
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} devices (XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES})")
    return Mesh(np.array(jax.devices()[:DEVICES]), ("tp",))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("splits", [False, True])
def test_attention_sharded_over_kv_heads(mesh, implementation, splits):
    geometry = Geometry(B=2, T=4, N=2 * DEVICES, K=DEVICES, M=6 if splits else 1, dtype=E4M3)
    call = random_call(geometry, 0, [90, 33] if splits else [16, 5], [4, 4], scales=True)
    interpret = implementation == "triton" and not ON_GPU

    def local(q, k_pages, v_pages, k_scale, v_scale, page_table, kv_length, q_length):
        return paged_attention(
            q, k_pages, v_pages, page_table, kv_length, q_length,
            k_scale=k_scale, v_scale=v_scale, implementation=implementation, interpret=interpret,
        )  # fmt: skip

    sharded = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(HEADS, PAGES, PAGES, Spec("tp"), Spec("tp"), Spec(), Spec(), Spec()),
            out_specs=HEADS,
            check_vma=not interpret,  # JAX's interpreter does not track what varies over the mesh
        )
    )
    out = sharded(*call.arguments[:3], call.k_scale, call.v_scale, *call.arguments[3:])
    assert error(out, brute_force(call)) <= 1e-2
    assert len({s.device for s in out.addressable_shards}) == DEVICES


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("rotates", [False, True])
def test_write_sharded_over_kv_heads(mesh, implementation, group, rotates):
    interpret = implementation == "triton" and not ON_GPU
    rng = np.random.default_rng(0)
    pages = [jnp.asarray(rng.standard_normal((5, DEVICES, 16, 64)), E4M3) for _ in "kv"]
    heads = jnp.asarray(rng.standard_normal((2, 3, DEVICES, group + 2, 64)), jnp.bfloat16)
    angles = rng.uniform(0, 9, (2, 3, 32))
    norm = jnp.asarray(rng.standard_normal(64), jnp.bfloat16)
    rotary = Rotary(jnp.cos(angles), jnp.sin(angles), k_norm=norm) if rotates else None
    slots = jnp.array([[3, -1, 70], [16, 17, -1]], jnp.int32)

    def local(*operands):
        return write_kv(*operands, implementation=implementation, interpret=interpret)

    in_specs, out_specs = (PAGES, PAGES, HEADS, Spec(), Spec()), (HEADS, PAGES, PAGES)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=not interpret)
    found = jax.jit(sharded)(*pages, heads, slots, rotary)
    expected = write_kv(*pages, heads, slots, rotary, implementation="reference")
    # What is only written is the same; XLA may round turned keys to bfloat16 or not before it rounds them to fp8.
    bounds = {"rtol": 0.13, "atol": 0.03} if rotates else {"rtol": 0, "atol": 0}
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), **bounds)
