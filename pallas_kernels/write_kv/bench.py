"""``python -m pallas_kernels.write_kv.bench``: microseconds of a page write, norm and RoPE of the keys too or not."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import timing

K, H, PAGE, PAGES = 8, 128, 64, 1024
LAYERS = 36  # as many as the model has: with few, the host's dispatch of a program is what one would measure
DTYPES = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def normed_and_rotated(k: jax.Array, weight: jax.Array, angle: jax.Array) -> jax.Array:
    """Keys as a layer computes them before the write: RMS norm over H, then RoPE at ``angle`` [B, T, H / 2]."""
    x = k.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(k.dtype)


def program(implementation: Any, rotate: bool) -> Any:
    """The writes of ``LAYERS`` layers, pools donated; with ``rotate`` the keys are normed and rotated first."""

    def run(pools: Any, k: Any, v: Any, slots: Any, weight: Any, angle: Any) -> Any:
        out = []
        for i, (k_pages, v_pages) in enumerate(pools):
            keys = normed_and_rotated(k[i], weight, angle) if rotate else k[i]
            out.append(pallas_kernels.write_kv(k_pages, v_pages, keys, v[i], slots, implementation=implementation))
        return out

    return jax.jit(run, donate_argnums=0)


def measure(batch: int, tokens: int, name: str, implementation: str, rotate: bool) -> dict[str, Any]:
    """One row. Every layer has its own keys and pools, so that the writes do not stay in L2."""
    rng = np.random.default_rng(0)
    slots = jnp.asarray(rng.permutation(PAGES * PAGE)[: batch * tokens].reshape(batch, tokens), jnp.int32)
    new = jax.random.normal(jax.random.key(0), (2, LAYERS, batch, tokens, K, H), jnp.bfloat16)
    k, v = list(new[0]), list(new[1])
    pools = [tuple(jnp.ones((PAGES, K, PAGE, H), DTYPES[name]) for _ in "kv") for _ in range(LAYERS)]
    angle = jax.random.uniform(jax.random.key(1), (batch, tokens, H // 2), jnp.float32)
    rest = (k, v, slots, jnp.ones((H,), jnp.float32), angle)
    compiled = program(implementation, rotate).lower(pools, *rest).compile()
    state = {"pools": pools}

    def again() -> Any:
        state["pools"] = compiled(state["pools"], *rest)
        return state["pools"]

    time = timing.seconds(again, (), LAYERS, budget=0.05)
    size = new[:, 0].size * (2 + jnp.dtype(DTYPES[name]).itemsize)
    row = {"batch": batch, "tokens": tokens, "dtype": name, "implementation": implementation, "norm+rope": rotate}
    return row | {"us": round(time * 1e6, 2), "GB/s": round(size / time / 1e9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "e4m3"], choices=list(DTYPES))
    parser.add_argument("--json", default="write_kv.json", help="where the rows go")
    args = parser.parse_args()
    rows = []
    for batch in args.batches:
        for tokens in args.tokens:
            for name in args.dtypes:
                for implementation, rotate in (("reference", False), ("triton", False), ("triton", True)):
                    rows.append(measure(batch, tokens, name, implementation, rotate))
                    print(" ".join(f"{x}" for x in rows[-1].values()), flush=True)
    timing.save(args.json, rows)
    print(timing.table(rows))


if __name__ == "__main__":
    main()
