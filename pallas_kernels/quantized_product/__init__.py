"""The product of activations with a weight in 4 or 8 bits, of which groups of inputs share a scale in each row."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import registry
from pallas_kernels.quantized_product.layout import FewBits
from pallas_kernels.registry import AMPERE_ON, FP8_GPUS, HOPPER

__all__ = [
    "FP8_PRODUCT",
    "INT4_PRODUCT",
    "QUANTIZED_PRODUCT_BESIDE",
    "QUANTIZED_SWIGLU",
    "operation_of",
    "quantized_product",
    "quantized_product_beside",
    "quantized_swiglu",
    "split_quantized_product",
]

Implementation = Literal["mosaic", "mosaic_two_sided", "mosaic_wide", "triton", "reference"]


def _operation(name: str, gpus: registry.Capability, *two_sided: registry.Implementation) -> registry.Operation:
    mosaic = "pallas_kernels.quantized_product.mosaic:quantized_product"
    wide = "pallas_kernels.quantized_product.wide:quantized_product"
    triton = "pallas_kernels.quantized_product.triton:quantized_product"
    return registry.Operation(  # a call is (x, values, scales, zeros, dtype of the result)
        name,
        (
            registry.Implementation("mosaic", mosaic, HOPPER, refusal="refusal"),
            *two_sided,
            registry.Implementation("mosaic_wide", wide, HOPPER, refusal="refusal"),
            registry.Implementation("triton", triton, gpus, refusal="refusal", interprets=True),
            registry.Implementation("reference", "pallas_kernels.quantized_product.reference:quantized_product"),
        ),
    )


_TWO_SIDED = "pallas_kernels.quantized_product.wide:two_sided_product"
INT4_PRODUCT = _operation("int4_product", AMPERE_ON)
FP8_PRODUCT = _operation(  # with scales of groups
    "fp8_product",
    FP8_GPUS,
    registry.Implementation("mosaic_two_sided", _TWO_SIDED, HOPPER, refusal="two_sided_refusal"),
)


QUANTIZED_PRODUCT_BESIDE = registry.Operation(  # a call is (x, values, scales, zeros, the other weight)
    "quantized_product_beside",
    (
        registry.Implementation(
            "mosaic",
            "pallas_kernels.quantized_product.beside:product_beside",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation("apart", "pallas_kernels.quantized_product.apart:product_beside"),
        registry.Implementation(registry.REFERENCE, "pallas_kernels.quantized_product.apart:reference_beside"),
    ),
)


QUANTIZED_SWIGLU = registry.Operation(  # a call is (x, values, scales, zeros, dtype)
    "quantized_swiglu",
    (
        registry.Implementation(
            "mosaic_two_sided",
            "pallas_kernels.quantized_product.swiglu:two_sided_swiglu",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation(
            "mosaic_pieces",
            "pallas_kernels.quantized_product.swiglu_pieces:swiglu",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation("apart", "pallas_kernels.quantized_product.apart:swiglu"),
        registry.Implementation(registry.REFERENCE, "pallas_kernels.quantized_product.apart:reference"),
    ),
)


def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None = None,
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"]:
    """``x @ weight.T`` with weight = (number - zero point) * scale, for any number of tokens, summed in float32.

    The I / G inputs of a group share a scale and a zero point. The weight is never rounded to 16 bits.

    Args:
      x: activations; bf16 (any other float: reference only).
      values: 4-bit numbers, four to a word as ``layout`` says, or e4m3 numbers, which have no zero point.
      scales: bf16, f16 or f32.
      zeros: zero points of 4-bit numbers, 0 to 16; None is 8.
      dtype: of the result; None is x's.
      implementation: on Hopper for groups of 128 inputs ``"mosaic"``, up to 64 tokens, and ``"mosaic_wide"``, beyond,
        for which ``"mosaic_two_sided"`` takes e4m3 weights and rounds activations to e4m3, too;
        ``"triton"``, for groups of a multiple of 32 inputs; or ``"reference"``, which leaves it to XLA. None picks the
        first that can, Triton on NVIDIA GPUs from sm_80, with e4m3 from sm_89. Only the reference can be split by XLA
        over several devices; the kernels need a ``shard_map`` around them there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, values, scales, zeros)
    call = (x, values, scales, zeros, dtype or x.dtype)
    out: Array = operation_of(values).function(implementation, call, interpret=interpret)(*call)
    return out


def split_quantized_product(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None = None,
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """``quantized_product`` for a caller that adds it to something: S float32 parts where the inputs are split.

    A weight of few rows does not fill the device otherwise. Args and errors are ``quantized_product``'s.
    """
    call = (x, values, scales, zeros, x.dtype)
    picked = operation_of(values).pick(None, call)
    if picked.name == registry.REFERENCE:
        return quantized_product(x, values, scales, zeros)
    _check(x, values, scales, zeros)
    parts: Array = picked.load()(*call, may_split=True)
    return parts


def quantized_product_beside(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    other: Float[Array, "P I"],
    *,
    implementation: Literal["mosaic", "apart", "reference"] | None = None,
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """``quantized_product`` in the dtype of x, and ``product`` with another weight of few rows.

    Args:
      x: as for ``quantized_product``.
      values: likewise.
      scales: likewise.
      zeros: likewise.
      other: the other weight, such as that of gates, in the dtype of x.
      implementation: on Hopper, for up to 64 tokens, ``"mosaic"`` multiplies the other weight on multiprocessors that
        the first product leaves idle, ``"apart"`` is two products, and ``"reference"`` leaves them to XLA; None picks
        the fastest that can.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, values, scales, zeros)
    if other.ndim != 2 or other.shape[1] != x.shape[-1] or other.dtype != x.dtype:
        raise ValueError(
            f"The other weight must be [P, {x.shape[-1]}] in {x.dtype}; got {list(other.shape)} in {other.dtype}"
        )
    call = (x, values, scales, zeros, other)
    products: tuple[Array, Array] = QUANTIZED_PRODUCT_BESIDE.function(implementation, call)(*call)
    return products


def quantized_swiglu(
    x: Float[Array, "*T D"],
    values: UInt16[Array, "E 2 I packed"] | Float8e4m3fn[Array, "E 2 I D"],
    scales: Float[Array, "E 2 I G"],
    zeros: UInt8[Array, "E 2 I G"] | None = None,
    *,
    implementation: Literal["mosaic_two_sided", "mosaic_pieces", "apart", "reference"] | None = None,
) -> Float[Array, "*T F"]:
    """``silu(x @ gate.T) * (x @ up.T)`` for any number of tokens, with gate and up in few bits, in the dtype of x.

    Args:
      x: the normed input of the MLP.
      values: E parts of the MLP's width F = E I, as `quantized_product` takes them; in each first the rows of gate.
      scales: likewise.
      zeros: likewise.
      implementation: on Hopper, for e4m3, ``"mosaic_two_sided"`` finishes the hidden units within the product of more
        than 64 tokens, ``"mosaic_pieces"`` within that of fewer, each activation as the sum of two numbers in e4m3;
        ``"apart"`` is `quantized_product`, then the activation. None picks the fastest that can.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: SwiGLU (arXiv 2002.05202).
    """
    weight = FewBits(values, scales, zeros)
    weight.check()
    if len(weight.shape) != 4 or weight.shape[1] != 2 or x.shape[-1] != weight.shape[3]:
        raise ValueError(f"x must be [*T, D] and the weight [E, 2, I, D]; got {list(x.shape)} and {list(weight.shape)}")
    call = (x, values, scales, zeros, x.dtype)
    hidden: Array = QUANTIZED_SWIGLU.function(implementation, call)(*call)
    return hidden


def operation_of(values: Any) -> registry.Operation:
    """The operation that multiplies by weights with such values."""
    return INT4_PRODUCT if values.dtype == jnp.uint16 else FP8_PRODUCT


def _check(x: Any, values: Any, scales: Any, zeros: Any) -> None:
    weight = FewBits(values, scales, zeros)
    weight.check()
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be [*T, I] and the weight [O, I]; got {list(x.shape)} and {list(weight.shape)}")
