"""Addition and norm in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.rotary import rms_norm


def add_norm(
    x: Float[Array, "*T D"], y: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """See ``pallas_kernels.add_norm``."""
    total = x + y
    return total, rms_norm(total, weight, eps)
