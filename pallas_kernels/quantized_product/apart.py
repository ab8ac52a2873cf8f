"""Hidden units from gate and up in few bits as two operations: the product, then the activation."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

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
