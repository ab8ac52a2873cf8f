"""The first half of an MLP in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def swiglu(x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"]) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    parts, _, units, width = weight.shape
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    products = lax.dot_general(
        x.reshape(-1, width), weight.reshape(-1, width), (((1,), (1,)), ((), ())), precision=precision
    )
    return gated(products.reshape(*x.shape[:-1], parts, 2, units))


def gated(products: Float[Array, "*T E 2 I"]) -> Float[Array, "*T F"]:
    """Hidden units of an MLP from the products of its gate and of its other projection: silu(gate) * up, F = E I."""
    hidden = jax.nn.silu(products[..., 0, :]) * products[..., 1, :]
    return hidden.reshape(*products.shape[:-3], -1)
