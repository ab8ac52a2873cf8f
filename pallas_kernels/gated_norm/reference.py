"""The gated norm in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def gated_norm(
    x: Float[Array, "*T HV dv"],
    channels: Float[Array, "*T HK _"],
    weight: Float[Array, " dv"],
    *,
    eps: float,
    activation: str,
) -> Float[Array, "*T HK I"]:
    """See ``pallas_kernels.gated_norm``."""
    gates = channels[..., channels.shape[-1] - x.shape[-2] // channels.shape[-2] * x.shape[-1] :]
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = weight * unit.astype(x.dtype)
    opened = ACTIVATIONS[activation](gates.reshape(x.shape).astype(jnp.float32))
    return (normed.astype(jnp.float32) * opened).astype(x.dtype).reshape(gates.shape)
