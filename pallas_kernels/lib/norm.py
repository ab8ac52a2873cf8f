"""RMS norm in plain jnp: the definition that kernels follow, and differentiable."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm over the last axis, computed in float32; the result has the dtype of x."""
    wide = x.astype(jnp.float32)
    return weighted(wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps), weight, x.dtype)


def weighted(unit: Float[Array, "*B D"], weight: Float[Array, " D"], dtype: DTypeLike) -> Float[Array, "*B D"]:
    """Multiply normed float32 numbers by the norm's weight; the result has the given dtype.

    A weight of that dtype multiplies numbers that are rounded first, as in Llama. A wider one multiplies before the
    only rounding: norms that multiply by 1 + w (Qwen3.5) hold 1 + w in float32.
    """
    if jnp.promote_types(weight.dtype, dtype) == dtype:
        unit = unit.astype(dtype).astype(jnp.float32)
    return (weight.astype(jnp.float32) * unit).astype(dtype)
