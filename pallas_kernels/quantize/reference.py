"""Activations in fp8, in plain jnp: the oracle of the kernels, and the path of CPUs and TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from pallas_kernels._compat import max_finite

E4M3 = jnp.float8_e4m3fn
LARGEST = max_finite(E4M3)
SMALLEST = 1e-30  # lower bound of a row's largest number, so that a row of zeros has a scale too


def quantize_rows(x: Float[Array, "*T D"]) -> tuple[Float8e4m3fn[Array, "*T D"], Float[Array, "*T"]]:
    """See ``pallas_kernels.quantize_rows``."""
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=-1), SMALLEST) / LARGEST
    return jnp.clip(wide / scales[..., None], -LARGEST, LARGEST).astype(E4M3), scales


def quantize_gated(
    products: Float[Array, "*T E 2 I"], of_tokens: Float[Array, "*T"], of_units: Float[Array, "E 2 I"]
) -> tuple[Float8e4m3fn[Array, "*T F"], Float[Array, "*T"]]:
    """See ``pallas_kernels.quantize_gated``."""
    real = products.astype(jnp.float32) * of_tokens[..., None, None, None] * of_units
    hidden = jax.nn.silu(real[..., 0, :]) * real[..., 1, :]
    return quantize_rows(hidden.reshape(*of_tokens.shape, of_units.size // 2))
