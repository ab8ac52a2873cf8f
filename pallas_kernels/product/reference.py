"""The product in plain jnp: the oracle of the kernels, the path of CPUs, TPUs and many tokens, and differentiable."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float


def product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``.

    x is reshaped to a matrix, since with more dimensions XLA transposes the weight in memory first, on CPUs. One row is
    doubled where the result is wider than x, since for a single row XLA widens the weight in memory first, unless a
    Triton kernel of its own does it (the head of an 8B on an H200: 1,491 us for one row, 301 for two).
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    rows, dimensions = x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ()))
    wider = None if dtype == x.dtype else dtype
    if len(rows) == 1 and wider is not None:
        rows = jnp.concatenate([rows, rows])
    out = lax.dot_general(rows, weight, dimensions, precision=precision, preferred_element_type=wider)
    return out[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], len(weight))


def split_product(x: Float[Array, "*T D"], weight: Float[Array, "O D"], splits: int) -> Float[Array, "S *T O"]:
    """The product in ``splits`` float32 parts, each over a part of the inputs."""
    rows, columns = x.reshape(-1, splits, x.shape[-1] // splits), weight.reshape(len(weight), splits, -1)
    dimensions = (((2,), (2,)), ((1,), (1,)))
    parts = lax.dot_general(rows, columns, dimensions, preferred_element_type=jnp.float32)
    return parts.reshape(splits, *x.shape[:-1], len(weight))
