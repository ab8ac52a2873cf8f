"""The argmax of a model's head: the row of a matrix that has the largest product with a vector."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.largest_product.reference import largest
from pallas_kernels.largest_product.screen import Screen, screen_of
from pallas_kernels.registry import HOPPER

__all__ = [
    "APPROXIMATE_LARGEST",
    "LARGEST_PRODUCT",
    "SCREENED_LARGEST",
    "WHOLE",
    "Screen",
    "approximate_largest",
    "largest",
    "largest_product",
    "screen_of",
    "screened_largest",
]

Implementation = Literal["mosaic", "reference"]

LARGEST_PRODUCT = registry.Operation(  # a call is (x, weight)
    "largest_product",
    (
        registry.Implementation(
            "mosaic",
            "pallas_kernels.largest_product.mosaic:largest_product",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation("reference", "pallas_kernels.largest_product.reference:largest_product"),
    ),
)
WHOLE = "whole"  # the name of exact products with a whole head
SCREENED_LARGEST = registry.Operation(  # a call is (x, weight, screen)
    "screened_largest",
    (
        registry.Implementation(
            "mosaic",
            "pallas_kernels.largest_product.screened:screened_largest",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation(WHOLE, "pallas_kernels.largest_product.whole:screened_largest"),
    ),
)
APPROXIMATE_LARGEST = registry.Operation(  # a call is (x, screen)
    "approximate_largest",
    (
        registry.Implementation(
            "mosaic",
            "pallas_kernels.largest_product.screened:approximate_largest",
            HOPPER,
            refusal="approximate_refusal",
        ),
        registry.Implementation("reference", "pallas_kernels.largest_product.whole:approximate_largest"),
    ),
)


def largest_product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    scales: Float[Array, " V"] | None = None,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """The argmax and the maximum of ``x @ weight.T * scales``, for any number of tokens.

    Args:
      x: final hidden states; bf16, f16 or float8_e4m3fn (f32: reference only).
      weight: the head; dtype like x.
      scales: float32 scales of the rows of an fp8 head; None is 1.
      length: int32; only the first ``length`` tokens of the array need a result, the others may get anything; None
        is all.
      limit: only the first ``limit`` rows of the weight count, those behind are padding; int32, and where it is not
        positive the product is -inf. None is all.
      implementation: ``"mosaic"``, where products never leave the chip, or ``"reference"``, which leaves them to XLA;
        None picks the faster.

    Returns:
      The first row (int32) of the largest product, and that product (float32). For a token with a product that is NaN
      the product is NaN, and the row any row.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, weight, scales)
    run = LARGEST_PRODUCT.function(implementation, (x, weight))
    index, value = run(x, weight, scales, length, limit)
    return index, value


def screened_largest(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    screen: Screen,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
    *,
    implementation: Literal["mosaic", "whole"] | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """The argmax and the maximum of ``x @ weight.T``, exact, of a head that has an 8-bit copy beside it.

    Few tokens read the copy, whose bounds leave some rows of the weight, and those (``screen``): half of the bytes.

    Args:
      x: final hidden states, bf16 or f16 (f32: ``"whole"`` only).
      weight: the head; dtype like x.
      screen: what ``screen_of`` makes of the weight.
      length: as for ``largest_product``.
      limit: as for ``largest_product``.
      implementation: ``"mosaic"``, which goes by the copy, or ``"whole"``, which is ``largest_product``; None picks the
        faster.

    Returns:
      As for ``largest_product``.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, weight, None)
    if screen.values.shape != weight.shape:
        raise ValueError(f"the screen must be of this weight, {list(weight.shape)}; it is {list(screen.values.shape)}")
    run = SCREENED_LARGEST.function(implementation, (x, weight, screen))
    index, value = run(x, weight, screen, length, limit)
    return index, value


def approximate_largest(
    x: Float[Array, "*T D"],
    screen: Screen,
    limit: int | Int[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """The argmax and the maximum of products with a head's 8-bit copy, for drafts.

    Args:
      x: final hidden states, bf16 or f16 (f32: ``"reference"`` only).
      screen: the copy.
      limit: as for ``largest_product``.
      implementation: ``"mosaic"``, which rounds more than 64 tokens to 8 bits, or ``"reference"``; None picks.

    Returns:
      As for ``largest_product``.

    Raises:
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    run = APPROXIMATE_LARGEST.function(implementation, (x, screen))
    index, value = run(x, screen, limit)
    return index, value


def _check(x: Any, weight: Any, scales: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [V, D]; got {list(x.shape)} and {list(weight.shape)}")
    if scales is not None and (scales.shape != weight.shape[:1] or scales.dtype != jnp.float32):
        raise ValueError(
            f"scales must be float32 and [V], V = {len(weight)}; got {scales.dtype} and {list(scales.shape)}"
        )
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
