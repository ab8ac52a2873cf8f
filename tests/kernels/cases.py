"""What the kernel tests share: geometries, random calls with poisoned memory, attention in float64 by brute force."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
PAGE_DTYPES = [BF16, E4M3, E5M2]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The static part of a call; letters as in paged_attention. M: pages of a sequence."""

    B: int
    T: int
    N: int
    K: int
    H: int = 64
    S: int = 16
    M: int = 4
    dtype: Any = BF16
    mask: str = "causal"
    window: int | None = None

    @property
    def P(self) -> int:  # noqa: N802
        return self.B * self.M + 3

    def __str__(self) -> str:
        window = "" if self.window is None else f"-w{self.window}"
        return (
            f"B{self.B}T{self.T}N{self.N}K{self.K}H{self.H}S{self.S}-{jnp.dtype(self.dtype).name}-{self.mask}{window}"
        )


@dataclasses.dataclass
class Call:
    """One call, as numpy arrays; ``arguments`` are the positional ones, ``options`` those by name."""

    geometry: Geometry
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_length: np.ndarray
    q_length: np.ndarray
    valid_from: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return (self.q, self.k_pages, self.v_pages, self.page_table, self.kv_length, self.q_length)

    @property
    def options(self) -> dict[str, Any]:
        static = {"mask": self.geometry.mask, "window": self.geometry.window}
        return static | {"k_scale": self.k_scale, "v_scale": self.v_scale, "valid_from": self.valid_from}

    def run(self, attend: Any) -> np.ndarray:
        return np.asarray(attend(*self.arguments, **self.options), np.float64)


def sees(geometry: Geometry, query: int, key: int) -> bool:
    """The mask for one pair of positions, written independently of ``pallas_kernels.visible``."""
    if geometry.mask == "causal" and key > query:
        return False
    return geometry.window is None or abs(query - key) < geometry.window


def visible_keys(call: Call, b: int, t: int) -> list[int]:
    if t >= call.q_length[b]:
        return []
    query = int(call.kv_length[b] - call.q_length[b] + t)
    keys = range(int(call.valid_from[b]), int(call.kv_length[b]))
    return [j for j in keys if sees(call.geometry, query, j)]


def brute_force(call: Call) -> np.ndarray:
    """Attention in float64, one query token and head at a time."""
    g = call.geometry
    out = np.zeros((g.B, g.T, g.N, g.H))
    k_pool, v_pool = np.asarray(call.k_pages, np.float64), np.asarray(call.v_pages, np.float64)
    for b in range(g.B):
        for t in range(g.T):
            keys = visible_keys(call, b, t)
            if not keys:
                continue
            page = call.page_table[b, [j // g.S for j in keys]]
            offset = np.array([j % g.S for j in keys])
            for n in range(g.N):
                h = n // (g.N // g.K)
                k, v = k_pool[page, h, offset] * call.k_scale[h], v_pool[page, h, offset] * call.v_scale[h]
                logits = k @ np.asarray(call.q[b, t, n], np.float64) * g.H**-0.5
                weights = np.exp(logits - logits.max())
                out[b, t, n] = weights @ v / weights.sum()
    return out


def random_call(
    geometry: Geometry,
    seed: int,
    kv_length: list[int],
    q_length: list[int],
    valid_from: list[int] | None = None,
    *,
    q_dtype: Any = BF16,
    shared: int = 0,
    scales: bool = False,
) -> Call:
    """A call on random data in which everything that may not be read is NaN, and page numbers not to follow are wild.

    ``shared``: so many first pages of every sequence are those of sequence 0, as after a prefix hit.
    """
    g, rng = geometry, np.random.default_rng(seed)
    pool = (g.P, g.K, g.S, g.H)
    pages = [np.asarray(rng.standard_normal(pool).astype(np.float32), g.dtype) for _ in range(2)]
    table = rng.permutation(g.P)[: g.B * g.M].reshape(g.B, g.M).astype(np.int32)
    table[:, :shared] = table[0, :shared]
    call = Call(
        geometry,
        np.asarray(rng.standard_normal((g.B, g.T, g.N, g.H)).astype(np.float32) * 2, q_dtype),
        *pages,
        table,
        np.array(kv_length, np.int32),
        np.array(q_length, np.int32),
        np.array(valid_from or [0] * g.B, np.int32),
        *(rng.uniform(0.5, 2, g.K).astype(np.float32) if scales else np.ones(g.K, np.float32) for _ in range(2)),
    )
    _poison(call, rng)
    return call


def _poison(call: Call, rng: np.random.Generator) -> None:
    g = call.geometry
    read = np.zeros((g.P, g.S), bool)
    for b in range(g.B):
        keys = sorted({j for t in range(g.T) for j in visible_keys(call, b, t)})
        for j in keys:
            read[call.page_table[b, j // g.S], j % g.S] = True
    for pool in (call.k_pages, call.v_pages):
        np.copyto(pool, np.asarray(np.nan, pool.dtype), where=~read[:, None, :, None])
    for b in range(g.B):
        needed = {j // g.S for t in range(g.T) for j in visible_keys(call, b, t)}
        for m in set(range(g.M)) - needed:
            call.page_table[b, m] = rng.choice([-1, g.P, 2**30, -(2**31), int(rng.integers(g.P))])


def error(found: Any, expected: Any) -> float:
    """Relative error, norm over norm; NaN anywhere makes it infinite."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / scale) if scale else float(np.linalg.norm(found))


def operands(
    tokens: tuple[int, ...], shape: tuple[int, ...], dtype: Any = BF16, seed: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Tokens [*tokens, D] and a weight of that shape, D last, whose products have a deviation of 1."""
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal(s, np.float32) for s in ((*tokens, shape[-1]), shape))
    return jnp.asarray(x, dtype), jnp.asarray(weight / shape[-1] ** 0.5, dtype)


def shapes(tokens: tuple[int, ...], shape: tuple[int, ...], dtype: Any = BF16) -> tuple[Any, Any]:
    """Shapes and dtypes of ``operands``."""
    return jax.ShapeDtypeStruct((*tokens, shape[-1]), dtype), jax.ShapeDtypeStruct(shape, dtype)


def cuda_lowering(f: Any, *arguments: Any) -> str:
    """What ``f`` lowers to for an H200, on any machine: catches shapes, layouts and dtypes that a kernel cannot do."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with on_an_h200():
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def on_an_h200() -> Any:
    """A context in which JAX traces and lowers as for an H200."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")))


def mesh_of(devices: int) -> Mesh:
    """A mesh of the first so many devices, over axis `tp`; skips where there are fewer, as on a machine of one GPU."""
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices (XLA_FLAGS=--xla_force_host_platform_device_count={devices})")
    return jax.make_mesh((devices,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
