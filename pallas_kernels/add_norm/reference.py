"""Addition and norm in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.lib.norm import rms_norm
from pallas_kernels.quantize.reference import quantize_rows


def add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"] | Float[Array, "S *T D"],
    weight: Float[Array, " D"],
    eps: float,
    y_scales: tuple[Float[Array, "*T"], Float[Array, " D"]] | None = None,
    quantize: bool = False,
) -> tuple[Float[Array, "*T D"], Any]:
    """See ``pallas_kernels.add_norm``."""
    is_plain = y.ndim == x.ndim and y_scales is None
    if y.ndim > x.ndim:
        y = y.sum(axis=0, dtype=jnp.float32)
    if y_scales is not None:
        y = y.astype(jnp.float32) * y_scales[0][..., None] * y_scales[1]
    total = x + (y if is_plain else y.astype(x.dtype))
    normed = rms_norm(total, weight, eps)
    return total, quantize_rows(normed) if quantize else normed
