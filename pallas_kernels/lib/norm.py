"""RMS norm in plain jnp: the definition that kernels follow, and differentiable."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * scaled.astype(x.dtype)
