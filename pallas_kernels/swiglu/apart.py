"""Hidden units in fp8 by two operations."""

from __future__ import annotations

from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from pallas_kernels.product import product
from pallas_kernels.quantize import quantize_gated


def fp8_swiglu(
    x: Float8e4m3fn[Array, "*T D"],
    of_tokens: Float[Array, "*T"],
    weight: Float8e4m3fn[Array, "E 2 I D"],
    of_units: Float[Array, "E 2 I"],
    dtype: DTypeLike,
) -> tuple[Float8e4m3fn[Array, "*T F"], Float[Array, "*T"]]:
    """See ``pallas_kernels.fp8_swiglu``."""
    products = product(x, weight.reshape(-1, x.shape[-1]), dtype)
    return quantize_gated(products.reshape(*x.shape[:-1], *of_units.shape), of_tokens, of_units)
