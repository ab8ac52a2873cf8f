"""The likeliest token of a model's head: the row of a matrix that has the largest product with a vector."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.largest_product import mosaic, reference
from pallas_kernels.largest_product.reference import largest

__all__ = ["largest", "largest_product"]

Implementation = Literal["mosaic", "reference"]


def largest_product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    scales: Float[Array, " V"] | None = None,
    length: Int[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """``x @ weight.T * scales``, of which the largest: where it is and what it is; of any number of tokens.

    Args:
      x: final hidden states; bf16, f16 or float8_e4m3fn (f32: reference only).
      weight: the head; like x.
      scales: float32, of the rows of an fp8 head; None is 1.
      length: int32: so many of the tokens, the first in the array, are wanted; what is found for the others is
        anything; None is all.
      implementation: ``"mosaic"``, where products never leave the chip, or ``"reference"``, which leaves them to XLA;
        None picks the faster.

    Returns:
      The first row (int32) of the largest product, and that product (float32). Where any product of a token is NaN,
      that is NaN, and the row any of them all.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    _check(x, weight, scales)
    match implementation or _fastest(x, weight):
        case "mosaic":
            return mosaic.largest_product(x, weight, scales, length)
        case "reference":
            return reference.largest_product(x, weight, scales)
        case other:
            raise ValueError(f"implementation must be 'mosaic', 'reference' or None; got {other!r}")


def _fastest(x: Any, weight: Any) -> Implementation:
    capability = _compat.compute_capability()
    able = capability is not None and capability[0] == 9 and mosaic.refusal(x, weight) is None
    return "mosaic" if able and mosaic.is_fastest(x, weight) else "reference"


def _check(x: Any, weight: Any, scales: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [V, D]; got {list(x.shape)} and {list(weight.shape)}")
    if scales is not None and (scales.shape != weight.shape[:1] or scales.dtype != jnp.float32):
        raise ValueError(
            f"scales must be float32 and [V], V = {len(weight)}; got {scales.dtype} and {list(scales.shape)}"
        )
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
