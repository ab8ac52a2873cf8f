"""The first half of an MLP in plain jnp: the oracle of the kernels, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.product.reference import product


def swiglu(x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"]) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    products = product(x, weight.reshape(-1, weight.shape[-1]))
    return gated(products.reshape(*x.shape[:-1], *weight.shape[:-1]))


def gated(products: Float[Array, "*T E 2 I"]) -> Float[Array, "*T F"]:
    """Hidden units of an MLP from the products of gate and up: silu(gate) * up, F = E I."""
    hidden = jax.nn.silu(products[..., 0, :]) * products[..., 1, :]
    return hidden.reshape(*products.shape[:-3], hidden.shape[-2] * hidden.shape[-1])
