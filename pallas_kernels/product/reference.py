"""The product in plain jnp: the oracle of the kernel, the path of CPUs, TPUs and many tokens, and differentiable."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(x: Float[Array, "*T D"], weight: Float[Array, "O D"]) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``.

    It is one of two matrices: given more dimensions, XLA transposes the weight in memory first, on CPUs.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot_general(x.reshape(-1, x.shape[-1]), weight, (((1,), (1,)), ((), ())), precision=precision)
    return out.reshape(*x.shape[:-1], len(weight))
