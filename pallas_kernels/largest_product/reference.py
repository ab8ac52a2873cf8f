"""The largest product in plain jnp: the oracle of the kernel, and the path of CPUs and TPUs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.product.reference import product

PART = 64  # numbers whose maximum is found first, on CPUs


def largest_product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    scales: Float[Array, " V"] | None = None,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.largest_product``; every token gets a result."""
    del length
    products = product(x, weight, jnp.float32)
    return largest(products if scales is None else products * scales, limit)


def largest(
    values: Float[Array, "*T V"], limit: int | Int[Array, ""] | None = None
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """The first argmax of the last axis, and the maximum; NaN counts as the largest.

    Args:
      values: any numbers.
      limit: only the first ``limit`` of each row count; where there are none the maximum is -inf. None is all.
    """
    if limit is not None:
        values = jnp.where(jnp.arange(values.shape[-1]) < limit, values, -jnp.inf)
    index = lax.platform_dependent(values, cpu=_argmax_by_parts, default=_argmax)
    return index, jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def _argmax(values: Float[Array, "*T V"]) -> Int[Array, "*T"]:
    return values.argmax(axis=-1).astype(jnp.int32)


def _argmax_by_parts(values: Float[Array, "*T V"]) -> Int[Array, "*T"]:
    """The first argmax by way of the maxima of parts: on CPUs XLA computes a maximum several times faster."""
    if values.shape[-1] % PART:
        return _argmax(values)
    parts = values.reshape(*values.shape[:-1], -1, PART)
    first = _argmax(parts.max(axis=-1))[..., None]
    return first[..., 0] * PART + _argmax(jnp.take_along_axis(parts, first[..., None], axis=-2)[..., 0, :])
