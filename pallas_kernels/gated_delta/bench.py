"""``python -m pallas_kernels.gated_delta.bench``: time of commit and verify of one layer, and its share of a copy."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import triton, ungrouped
from pallas_kernels.lib import timing

HEADS = {"27b": (16, 48), "122b": (16, 64), "35b": (16, 32), "122b-tp2": (8, 32)}  # HK, HV; dk = dv = 128
LAYERS, SIZE, TAPE = 12, 128, 16


def rows(key: Any, batch: int, tokens: int, key_heads: int, heads: int) -> ungrouped.Rows:
    """Random rows of one layer."""
    keys = jax.random.split(key, 3)
    mixed = jax.random.normal(keys[0], (batch, tokens, (2 * key_heads + heads) * SIZE), jnp.bfloat16)
    g = -jax.random.uniform(keys[1], (batch, tokens, heads))
    return ungrouped.Rows(mixed, g, jax.random.uniform(keys[2], (batch, tokens, heads)))


def measure(model: str, batch: int, tokens: int, accepted: int, name: str, replay: Any, copy: float) -> dict[str, Any]:
    """One row. Every layer has its own states, so that they do not stay in L2."""
    key_heads, heads = HEADS[model]
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    blocks = [rows(key, batch, tokens, key_heads, heads) for key in keys[:LAYERS]]
    tapes = [rows(key, batch, TAPE, key_heads, heads) for key in keys[LAYERS:]]
    states = [jax.random.normal(key, (batch, heads, SIZE, SIZE)) for key in keys[:LAYERS]]
    slots, count = jnp.arange(batch, dtype=jnp.int32), jnp.full(batch, accepted, jnp.int32)

    def run(states: Any, tapes: Any, blocks: Any, slots: Any, count: Any) -> Any:
        layers = [replay(s, slots, tape, count, block) for s, tape, block in zip(states, tapes, blocks, strict=True)]
        return [after for _, after in layers], [outputs for outputs, _ in layers]

    compiled = jax.jit(run, donate_argnums=0).lower(states, tapes, blocks, slots, count).compile()
    held = {"states": states}

    def again() -> Any:
        held["states"], outputs = compiled(held["states"], tapes, blocks, slots, count)
        return held["states"], outputs

    time = timing.seconds(again, (), LAYERS, budget=0.05)
    size = (2 if accepted else 1) * states[0].nbytes  # rows are a twentieth of it at most
    return {
        "model": model,
        "batch": batch,
        "tokens": tokens,
        "accepted": accepted,
        "implementation": name,
        "us": round(time * 1e6, 1),
        "of a copy": round(size / time / copy, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["27b"], choices=list(HEADS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--accepted", nargs="+", type=int, default=[0, 1, 6])
    parser.add_argument("--columns", nargs="+", type=int, default=[triton.DEFAULT.columns])
    parser.add_argument("--warps", nargs="+", type=int, default=[triton.DEFAULT.num_warps])
    parser.add_argument("--reference", action="store_true", help="time plain JAX, too")
    parser.add_argument("--json", default="gated_delta.json", help="where the rows go")
    args = parser.parse_args()
    ways: dict[str, Any] = {"reference": ungrouped.replay} if args.reference else {}
    for columns in args.columns:
        for warps in args.warps:
            config = triton.Config(columns, warps)
            ways[f"triton {columns}x{warps}"] = functools.partial(triton.replay, config=config)
    copy, table = timing.copy_bandwidth(), []
    for model in args.models:
        for batch in args.batches:
            for tokens in args.tokens:
                for accepted in args.accepted:
                    for name, replay in ways.items():
                        table.append(measure(model, batch, tokens, accepted, name, replay, copy))
                        print(" ".join(f"{x}" for x in table[-1].values()), flush=True)
    timing.save(args.json, table, copy_gb_s=round(copy / 1e9))
    print(timing.table(table))


if __name__ == "__main__":
    main()
