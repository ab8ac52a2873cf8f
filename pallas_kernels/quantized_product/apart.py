"""What kernels for weights in few bits do in one, as two operations."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels.product import product
from pallas_kernels.quantized_product import quantized_product
from pallas_kernels.swiglu import gated


def swiglu(
    x: Float[Array, "*T D"],
    values: UInt16[Array, "E 2 I packed"] | Float8e4m3fn[Array, "E 2 I D"],
    scales: Float[Array, "E 2 I G"],
    zeros: UInt8[Array, "E 2 I G"] | None,
    dtype: DTypeLike,
    *,
    implementation: Literal["reference"] | None = None,
) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.quantized_swiglu``; ``implementation`` is the product's."""
    weight = (values, scales, zeros)
    matrix, of_groups, points = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)
    products = quantized_product(x, matrix, of_groups, points, dtype, implementation=implementation)
    return gated(products.reshape(*x.shape[:-1], *values.shape[:-1]))


reference = functools.partial(swiglu, implementation="reference")


def product_beside(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    other: Float[Array, "P I"],
    *,
    implementation: Literal["reference"] | None = None,
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """See ``pallas_kernels.quantized_product_beside``; ``implementation`` is that of both products."""
    first = quantized_product(x, values, scales, zeros, implementation=implementation)
    return first, product(x, other, implementation=implementation)


reference_beside = functools.partial(product_beside, implementation="reference")
