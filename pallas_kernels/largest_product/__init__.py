"""The argmax of a model's head: the row of a matrix that has the largest product with a vector."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.largest_product.reference import largest
from pallas_kernels.registry import HOPPER

__all__ = ["LARGEST_PRODUCT", "largest", "largest_product"]

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


def _check(x: Any, weight: Any, scales: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [V, D]; got {list(x.shape)} and {list(weight.shape)}")
    if scales is not None and (scales.shape != weight.shape[:1] or scales.dtype != jnp.float32):
        raise ValueError(
            f"scales must be float32 and [V], V = {len(weight)}; got {scales.dtype} and {list(scales.shape)}"
        )
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
