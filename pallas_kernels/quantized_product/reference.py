"""The product with a weight in few bits in plain jnp: the oracle of the kernels, and the path of CPUs and TPUs.

The weight's numbers times their scales are exact in float32 wherever the scales have 16 bits, and the product is
float32's on every device (no TF32), so the result is that of the weight as its file defines it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, Int16, UInt8, UInt16

from pallas_kernels.quantized_product.layout import PLACES, PLACES_E4M3, span_of

WIDENED = 1 << 24  # numbers of a weight that are widened at a time: 64 MiB in float32
MIDDLE = 8  # the zero point of weights that have none of their own


def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    dtype: DTypeLike,
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.quantized_product``."""
    rows, outputs = x.reshape(-1, x.shape[-1]).astype(jnp.float32), len(values)
    blocks = -(-outputs * x.shape[-1] // WIDENED)
    while outputs % blocks:  # blocks of one size, for `lax.map`
        blocks += 1

    def multiply(block: tuple[Array, Array, Array | None]) -> Array:
        return lax.dot_general(widened(*block), rows, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

    weight = (values, scales, zeros)
    if blocks == 1:
        products = multiply(weight)
    else:
        products = lax.map(multiply, jax.tree.map(lambda part: part.reshape(blocks, -1, part.shape[-1]), weight))
    return products.reshape(outputs, -1).T.astype(dtype).reshape(*x.shape[:-1], outputs)


def widened(
    values: UInt16[Array, "O packed"] | Int16[Array, "O pairs"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
) -> Float[Array, "O I"]:
    """The weight in float32: (number - zero point) * scale."""
    outputs, groups = scales.shape
    if values.dtype == jnp.uint16:
        words = values.reshape(outputs, -1, span_of(values, scales) // PLACES)
        places = [(words >> (4 * place)) & 15 for place in range(PLACES)]
        numbers = jnp.stack(places, axis=2).reshape(outputs, groups, -1).astype(jnp.float32)
        numbers = numbers - (MIDDLE if zeros is None else zeros.astype(jnp.float32)[..., None])
    elif values.dtype == jnp.int16:
        words = values.reshape(outputs, -1, span_of(values, scales) // PLACES_E4M3)
        first = (words >> 8 & 0x80) | (words >> 4 & 0x7F)
        second = (words >> 4 & 0x80) | (words >> 8 & 0x70) | (words & 0x0F)
        bits = jnp.stack([first, second], axis=2).astype(jnp.uint8)
        numbers = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).reshape(outputs, groups, -1).astype(jnp.float32)
    else:
        numbers = values.reshape(outputs, groups, -1).astype(jnp.float32)
    return (numbers * scales.astype(jnp.float32)[..., None]).reshape(outputs, -1)
