"""Products with two weights as two operations."""

from __future__ import annotations

import functools
from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.product import product


def product_beside(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    other: Float[Array, "P D"],
    *,
    implementation: Literal["reference"] | None = None,
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """See ``pallas_kernels.product_beside``; ``implementation`` is that of both products."""
    return product(x, weight, implementation=implementation), product(x, other, implementation=implementation)


reference = functools.partial(product_beside, implementation="reference")
