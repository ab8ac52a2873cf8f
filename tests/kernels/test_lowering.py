"""Every implementation and page dtype lowers for CUDA on any machine, and only the compat module warns or branches."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as Spec

import pallas_kernels
from pallas_kernels import Rotary, _compat, paged_attention, write_context, write_kv
from pallas_kernels.paged_attention import MOST_WIDENED
from tests.kernels.cases import BF16, E4M3, E5M2, PAGE_DTYPES, cuda_lowering, mesh_of

TARGETS = {"triton": "xla.gpu.triton", "mosaic": "mosaic_gpu"}
SHAPES = {  # name: T, N, K, H
    "decode": (1, 32, 8, 128),
    "verify": (16, 32, 8, 128),
    "verify-mqa-256": (16, 16, 1, 256),
    "draft-64": (8, 8, 2, 64),
    "prefill": (512, 32, 8, 128),
    "prefill-lone-head": (320, 1, 1, 128),
}


def arguments(T, N, K, H, dtype, B=8, P=300, S=64, M=128):
    struct = jax.ShapeDtypeStruct
    pool = struct((P, K, S, H), dtype)
    return struct((B, T, N, H), BF16), pool, pool, struct((B, M), jnp.int32), struct((B,), jnp.int32)


# Elsewhere they differ from bfloat16, and from each other, as they do there.
FP8_AT = {E4M3: ("verify", "decode"), E5M2: ("verify",)}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(
            shape,
            dtype,
            id=f"{shape}-{jnp.dtype(dtype).name}",
            marks=() if shape in FP8_AT.get(dtype, SHAPES) else pytest.mark.long,
        )
        for shape in SHAPES
        for dtype in PAGE_DTYPES
    ],
)
@pytest.mark.parametrize("implementation", TARGETS)
def test_attention_lowers(implementation, shape, dtype):
    either = [{"mask": "block"}, {"window": 100}] if shape == "verify" else []
    for options in ({}, {"mask": "block", "window": 100}, *either):
        f = functools.partial(paged_attention, implementation=implementation, **options)
        assert TARGETS[implementation] in cuda_lowering(f, *arguments(*SHAPES[shape], dtype))


def write_arguments(shape, group, dtype, norms=True, rotary=True, scales=False):
    """Arguments of a page write of [B, T] tokens into pools of 8 kv heads."""
    struct = jax.ShapeDtypeStruct
    _, pool, _, _, _ = arguments(1, 32, 8, 128, dtype)
    table, weight = struct((*shape, 64), jnp.float32), struct((128,), BF16) if norms else None
    heads, slots = struct((*shape, 8, group + 2, 128), BF16), struct(shape, jnp.int32)
    factors = (struct(shape, jnp.float32), struct(heads.shape[-3:], jnp.float32)) if scales else None
    return pool, pool, heads, slots, Rotary(table, table, weight, weight, factors) if rotary else None


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("group", [0, 4, *(pytest.param(group, marks=pytest.mark.long) for group in (1, 5, 8))])
def test_write_lowers(dtype, group):
    f = functools.partial(write_kv, implementation="triton")
    for options in ({}, {"norms": False}, {"rotary": False}, {"scales": True}):
        assert "xla.gpu.triton" in cuda_lowering(f, *write_arguments((64, 16), group, dtype, **options))
    assert "xla.gpu.triton" in cuda_lowering(f, *write_arguments((1, 8192), group, dtype))


@pytest.mark.parametrize("group", [0, 4])
def test_sharded_write_knows_what_varies(group):
    heads, pages = Spec(None, None, "tp"), Spec(None, "tp")
    sharded = jax.shard_map(
        functools.partial(write_kv, implementation="triton"),
        mesh=mesh_of(4),
        in_specs=(pages, pages, heads, Spec(), Spec()),
        out_specs=(heads, pages, pages),
    )
    traced = jax.jit(sharded).trace(*write_arguments((4, 16), group, E4M3))
    assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_sharded_write_of_a_context_knows_what_varies():
    heads, pages = Spec(None, None, "tp"), Spec(None, "tp")

    def write(k_pages, v_pages, x, slots, rotary, norm):
        first_pages = {0: 0, 2: 100}
        return write_context(
            k_pages, v_pages, [x], slots, rotary, [norm, None, norm], first_pages, implementation="triton"
        )

    specs = (pages, pages, heads, Spec(), Spec(), Spec())
    sharded = jax.shard_map(write, mesh=mesh_of(4), in_specs=specs, out_specs=(pages, pages))
    operands = *write_arguments((4, 16), 4, E4M3, norms=False), jax.ShapeDtypeStruct((128,), BF16)
    assert "xla.gpu.triton" in jax.jit(sharded).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_no_warning_reaches_the_user():
    """In a process of its own, with every warning on: pytest puts its own filters before the package's."""
    code = (
        "import functools, tests.kernels.test_lowering as t\n"
        "f = functools.partial(t.paged_attention, implementation='triton')\n"
        "t.cuda_lowering(f, *t.arguments(1, 8, 8, 128, t.E4M3))\n"
    )
    root = pathlib.Path(pallas_kernels.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Triton backend is deprecated" not in run.stderr


def test_one_place_silences_and_one_knows_versions():
    root = pathlib.Path(pallas_kernels.__file__).parent
    for path in root.rglob("*.py"):
        matches = re.findall(r"filterwarnings|simplefilter|__version_info__", path.read_text())
        assert matches == [] or path.name == "_compat.py", path


@pytest.mark.parametrize("implementation", TARGETS)
def test_sharded_lowering_knows_what_varies(implementation):
    """With check_vma on, as users run it: the output varies over the mesh axis of the heads, and says so."""
    shard = functools.partial(
        jax.shard_map,
        functools.partial(paged_attention, implementation=implementation),
        mesh=mesh_of(4),
        in_specs=(Spec(None, None, "tp"), Spec(None, "tp"), Spec(None, "tp"), Spec(), Spec()),
    )

    def lower(out_specs: Spec) -> str:
        traced = jax.jit(shard(out_specs=out_specs)).trace(*arguments(16, 32, 8, 128, E4M3))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert TARGETS[implementation] in lower(Spec(None, None, "tp"))
    with pytest.raises(ValueError, match="out_specs"):
        lower(Spec())


TRITON, MOSAIC = TARGETS["triton"], TARGETS["mosaic"]
SPLIT = [TRITON, MOSAIC]  # Mosaic's kernel over parts of the keys, and Triton's that merges them


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "targets"),
    [
        ((9, 0), "verify", E4M3, SPLIT),
        ((9, 0), "verify", BF16, SPLIT),
        ((9, 0), "decode", BF16, [TRITON]),
        ((9, 0), "decode", E4M3, SPLIT),
        ((9, 0), "verify-mqa-256", E4M3, SPLIT),
        ((9, 0), "prefill", E4M3, [MOSAIC]),
        ((9, 0), "prefill", BF16, [MOSAIC]),
        ((9, 0), "prefill-lone-head", BF16, [TRITON]),
        ((9, 0), "verify", jnp.float32, []),
        ((8, 9), "verify", E4M3, [TRITON]),
        ((8, 0), "verify", E4M3, []),
        (None, "verify", E4M3, []),
    ],
)
def test_the_public_function_picks(monkeypatch, capability, shape, dtype, targets):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    text = cuda_lowering(lambda *args: paged_attention(*args), *arguments(*SHAPES[shape], dtype))  # traced anew
    assert [x for x in TARGETS.values() if x in text] == targets


@pytest.mark.parametrize(("dtype", "target"), [(BF16, "mosaic"), (E4M3, "triton")])
def test_a_chunk_over_more_fp8_pages_than_may_be_copied(monkeypatch, dtype, target):
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    pages = MOST_WIDENED // (4 * 8 * 64 * 128) + 1
    text = cuda_lowering(lambda *args: paged_attention(*args), *arguments(512, 32, 8, 128, dtype, B=1, M=pages))
    assert TARGETS[target] in text
