"""The product of activations with a weight, for few tokens by kernels of our own."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat, registry
from pallas_kernels.lib.measured import is_large, tokens_of
from pallas_kernels.registry import HOPPER

__all__ = ["PRODUCT", "PRODUCT_BESIDE", "product", "product_beside", "split_product"]

Implementation = Literal["mosaic", "narrow", "weight_first", "triton", "reference"]
TILE = 128  # rows of x and of a weight in the tiles for which XLA splits the inputs

PRODUCT = registry.Operation(  # a call is (x, weight, dtype of the result)
    "product",
    (
        registry.Implementation(
            "mosaic", "pallas_kernels.product.mosaic:product", HOPPER, slower="slower", refusal="refusal"
        ),
        registry.Implementation(  # these run on older GPUs too, but were measured on Hopper alone
            "narrow",
            "pallas_kernels.product.narrow:product",
            HOPPER,
            slower="slower",
            refusal="refusal",
            interprets=True,
        ),
        registry.Implementation(
            "weight_first",
            "pallas_kernels.product.weight_first:product",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation(
            "triton",
            "pallas_kernels.product.triton:product",
            HOPPER,
            slower="slower",
            refusal="refusal",
            interprets=True,
        ),
        registry.Implementation("reference", "pallas_kernels.product.reference:product"),
    ),
)

PRODUCT_BESIDE = registry.Operation(  # a call is (x, weight, the other weight)
    "product_beside",
    (
        registry.Implementation(
            "weight_first",
            "pallas_kernels.product.weight_first:product_beside",
            HOPPER,
            slower="slower_beside",
            refusal="refusal_beside",
        ),
        registry.Implementation("apart", "pallas_kernels.product.apart:product_beside"),
        registry.Implementation(registry.REFERENCE, "pallas_kernels.product.apart:reference"),
    ),
)


def product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"]:
    """``x @ weight.T`` for any number of tokens (any leading axes), summed in float32.

    Args:
      x: activations; bf16, f16 or, except for Triton, e4m3 (f32: reference only, which keeps it float32 on every
        device, without TF32).
      weight: dtype like x.
      dtype: of the result, which Mosaic gives in bf16, f16 or f32; None is x's.
      implementation: ``"weight_first"``, for up to 64 tokens, ``"triton"``, for up to 16, ``"mosaic"``, picked for 64
        to 256, ``"narrow"``, for weights of a few hundred rows, or ``"reference"``, which leaves it to XLA; None picks
        the fastest. Only the reference can be differentiated, and split by XLA over several devices; kernels need a
        ``shard_map`` around them there.
      interpret: run a Triton kernel (``"triton"``, ``"narrow"``) in Pallas' interpreter, on any backend (tests).

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, weight)
    dtype = dtype or x.dtype
    out: Array = PRODUCT.function(implementation, (x, weight, dtype), interpret=interpret)(x, weight, dtype)
    return out


def split_product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """``product`` for a caller that adds it to something: S float32 parts where the product would be split itself.

    XLA sums its parts in a kernel of its own; `add_norm` sums them on the way. Args and errors are ``product``'s.
    """
    _check(x, weight)
    picked = PRODUCT.pick(None, (x, weight, dtype or x.dtype)).name
    if picked == "narrow":
        from pallas_kernels.product import narrow

        return narrow.parts(x, weight)
    if picked == "reference" and _on_hopper():
        from pallas_kernels.product import reference, triton

        if (splits := triton.splits(x, weight)) > 1:
            return triton.parts(x, weight, splits)
        if (splits := parts_of(x, weight)) > 1:
            return reference.split_product(x, weight, splits)
    return product(x, weight, dtype)


def product_beside(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    other: Float[Array, "P D"],
    *,
    implementation: Literal["weight_first", "apart", "reference"] | None = None,
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """``product`` with a weight, and with another of few rows.

    Args:
      x: as for ``product``.
      weight: of many rows.
      other: of few rows, such as those of gates; dtype like x.
      implementation: ``"weight_first"``, one kernel where the first product leaves multiprocessors idle, ``"apart"``,
        two products, or ``"reference"``, which leaves them to XLA; None picks the fastest. Only the reference can be
        differentiated.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, weight)
    _check(x, other)
    products: tuple[Array, Array] = PRODUCT_BESIDE.function(implementation, (x, weight, other))(x, weight, other)
    return products


def _on_hopper() -> bool:
    return HOPPER.refusal(registry.Device.default()) is None


def parts_of(x: Any, weight: Any) -> int:
    """The parts into which XLA splits this product: two where an sm_90 has room for two sets of tiles, not for three.

    Only products of two full rows of tiles were measured (BENCH.md); others count as one part.
    """
    if not _on_hopper() or x.dtype == jnp.float32 or weight.shape[1] % 256 or tokens_of(x) != 2 * TILE:
        return 1
    tiles = 2 * -(-len(weight) // TILE)
    return 2 if is_large(weight) and 2 * tiles <= _compat.sm_count() < 3 * tiles else 1


def _check(x: Any, weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [O, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
