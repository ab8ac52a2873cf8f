"""Addition and norm in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rotary import rms_norm


def add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    eps: float,
    y_scales: tuple[Float[Array, "*T"], Float[Array, " D"]] | None = None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """See ``pallas_kernels.add_norm``."""
    if y_scales is not None:
        y = (y.astype(jnp.float32) * y_scales[0][..., None] * y_scales[1]).astype(y.dtype)
    total = x + y
    return total, rms_norm(total, weight, eps)
