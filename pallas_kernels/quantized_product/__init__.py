"""The product of activations with a weight in 4 or 8 bits, of which groups of inputs share a scale in each row."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8

from pallas_kernels import registry

__all__ = ["QUANTIZED_PRODUCT", "quantized_product"]

Implementation = Literal["reference"]

QUANTIZED_PRODUCT = registry.Operation(  # a call is (x, values, scales, zeros, dtype of the result)
    "quantized_product",
    (registry.Implementation("reference", "pallas_kernels.quantized_product.reference:quantized_product"),),
)


def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt8[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None = None,
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*T O"]:
    """``x @ weight.T`` with weight = (number - zero point) * scale, for any number of tokens, summed in float32.

    The I / G inputs of a group share a scale and a zero point. The weight is never rounded to 16 bits.

    Args:
      x: activations; any float.
      values: 4-bit numbers, two to a byte as ``layout`` says, or e4m3 numbers, which have no zero point.
      scales: bf16, f16 or f32.
      zeros: zero points of 4-bit numbers, 0 to 16; None is 8.
      dtype: of the result; None is x's.
      implementation: ``"reference"`` leaves it to XLA, which may split it over several devices; None picks the fastest.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
    """
    _check(x, values, scales, zeros)
    call = (x, values, scales, zeros, dtype or x.dtype)
    out: Array = QUANTIZED_PRODUCT.function(implementation, call)(*call)
    return out


def _check(x: Any, values: Any, scales: Any, zeros: Any) -> None:
    if values.dtype not in (jnp.uint8, jnp.float8_e4m3fn) or (zeros is not None and values.dtype != jnp.uint8):
        raise ValueError(
            f"values must be uint8, or e4m3 without zeros; got {values.dtype} {'with' if zeros is not None else ''}"
        )
    inputs = x.shape[-1] // (2 if values.dtype == jnp.uint8 else 1)
    outputs, groups = scales.shape if scales.ndim == 2 else (None, 1)
    if values.shape != (outputs, inputs) or x.shape[-1] % groups or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"x [*T, I], values [O, I] or [O, I / 2] and scales [O, G] in floats must fit, G dividing I; got "
            f"{list(x.shape)}, {list(values.shape)} and {scales.dtype}{list(scales.shape)}"
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != jnp.uint8):
        raise ValueError(f"zeros must be uint8 {list(scales.shape)}; got {zeros.dtype}{list(zeros.shape)}")
