"""``python -m pallas_kernels.write_kv.bench``: microseconds from a layer's projected heads to its queries and pages."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Rotary
from pallas_kernels.lib import timing

K, H, PAGE, PAGES = 8, 128, 64, 1024
LAYERS = 36  # as in the model: with few calls the benchmark would measure the host's dispatch of a program
DTYPES = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def program(implementation: Any) -> Any:
    """Norm, RoPE and writes of ``LAYERS`` layers with donated pools; returns all pools and queries."""

    def run(pools: Any, heads: Any, slots: Any, rotary: Any) -> Any:
        layers = [
            pallas_kernels.write_kv(k_pages, v_pages, x, slots, rotary, implementation=implementation)
            for (k_pages, v_pages), x in zip(pools, heads, strict=True)
        ]
        return [pages for _, *pages in layers], [q for q, *_ in layers]

    return jax.jit(run, donate_argnums=0)


def measure(batch: int, tokens: int, group: int, name: str, implementation: str) -> dict[str, Any]:
    """Time one case; every layer has its own heads and pools, so that they do not stay in L2."""
    rng = np.random.default_rng(0)
    slots = jnp.asarray(rng.permutation(PAGES * PAGE)[: batch * tokens].reshape(batch, tokens), jnp.int32)
    heads = list(jax.random.normal(jax.random.key(0), (LAYERS, batch, tokens, K, group + 2, H), jnp.bfloat16))
    pools = [[jnp.ones((PAGES, K, PAGE, H), DTYPES[name]) for _ in "kv"] for _ in range(LAYERS)]
    angle = jax.random.uniform(jax.random.key(1), (batch, tokens, H // 2), jnp.float32)
    weight = jnp.ones((H,), jnp.bfloat16)
    rest = (heads, slots, Rotary(jnp.cos(angle), jnp.sin(angle), weight, weight))
    compiled = program(implementation).lower(pools, *rest).compile()
    state = {"pools": pools}

    def again() -> Any:
        state["pools"], queries = compiled(state["pools"], *rest)
        return state["pools"], queries

    time = timing.seconds(again, (), LAYERS, budget=0.05)
    row = batch * tokens * K * H
    size = row * ((2 * group + 2) * heads[0].dtype.itemsize + 2 * jnp.dtype(DTYPES[name]).itemsize)
    return {
        "batch": batch,
        "tokens": tokens,
        "query heads a kv head": group,
        "pages": name,
        "implementation": implementation,
        "us": round(time * 1e6, 2),
        "GB/s": round(size / time / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--groups", nargs="+", type=int, default=[4, 0], help="query heads of each kv head")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "e4m3"], choices=list(DTYPES), help="of the pages")
    parser.add_argument("--json", default="write_kv.json", help="where the rows go")
    args = parser.parse_args()
    rows = []
    for batch in args.batches:
        for tokens in args.tokens:
            for group in args.groups:
                for name in args.dtypes:
                    for implementation in ("reference", "triton"):
                        rows.append(measure(batch, tokens, group, name, implementation))
                        print(" ".join(f"{x}" for x in rows[-1].values()), flush=True)
    timing.save(args.json, rows)
    print(timing.table(rows))


if __name__ == "__main__":
    main()
