"""Random products of Qwen3.6-27B's shapes with few bits, for benchmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SHAPES = {  # [O, I] of Qwen3.6-27B
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "in_proj": (16384, 5120),
    "qkv": (14336, 5120),
    "out": (5120, 6144),
    "ba": (96, 5120),
}
GROUP = 128
BYTES = 1 << 30  # of different weights in a program: many times the size of L2
KINDS = ("int4", "zeros", "fp8")


def operands(kind: str, shape: tuple[int, int], tokens: int, seed: int) -> tuple[Any, ...]:
    """Random tokens, numbers, scales and zero points; products have a deviation of about 1."""
    outputs, inputs = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, inputs), jnp.bfloat16)
    scales = jax.random.uniform(keys[1], (outputs, inputs // GROUP), jnp.float32, 0.5, 1.5) * inputs**-0.5 / 4
    if kind == "fp8":
        values = (jax.random.normal(keys[2], shape, jnp.bfloat16) * 4).astype(jnp.float8_e4m3fn)
        return x, values, scales.astype(jnp.bfloat16), None
    values = jax.random.bits(keys[2], (outputs, inputs // 4), jnp.uint16)
    zeros = jax.random.randint(keys[3], scales.shape, 1, 17, jnp.int32).astype(jnp.uint8) if kind == "zeros" else None
    return x, values, scales.astype(jnp.float16), zeros
