"""Heads with an 8-bit copy where no kernel reads the copy: exact products with the head, and plain jnp for drafts."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.largest_product import Screen, largest, largest_product
from pallas_kernels.largest_product.screen import approximate


def screened_largest(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    screen: Screen,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.screened_largest``."""
    del screen
    return largest_product(x, weight, None, length, limit)


def approximate_largest(
    x: Float[Array, "*T D"], screen: Screen, limit: int | Int[Array, ""] | None = None
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.approximate_largest``."""
    values: Any = approximate(x, screen)
    return largest(values, limit)
