"""The first half of an MLP: the products with gate and up, and the hidden units ``silu(gate) * up``."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from pallas_kernels import registry
from pallas_kernels.registry import HOPPER
from pallas_kernels.swiglu.reference import gated

__all__ = ["FP8_SWIGLU", "SWIGLU", "fp8_swiglu", "gated", "swiglu"]

Implementation = Literal["mosaic", "weight_first", "triton", "reference"]

SWIGLU = registry.Operation(  # a call is (x, weight)
    "swiglu",
    (
        registry.Implementation(
            "mosaic", "pallas_kernels.swiglu.mosaic:swiglu", HOPPER, slower="slower", refusal="refusal"
        ),
        registry.Implementation(
            "weight_first",
            "pallas_kernels.swiglu.weight_first:swiglu",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation(  # it runs on older GPUs too, but was measured on Hopper alone
            "triton",
            "pallas_kernels.swiglu.triton:swiglu",
            HOPPER,
            slower="slower",
            refusal="refusal",
            interprets=True,
        ),
        registry.Implementation("reference", "pallas_kernels.swiglu.reference:swiglu"),
    ),
)

FP8_SWIGLU = registry.Operation(  # a call is (x, weight)
    "fp8_swiglu",
    (
        registry.Implementation(
            "weight_first",
            "pallas_kernels.swiglu.weight_first:fp8_swiglu",
            HOPPER,
            slower="slower",
            refusal="fp8_refusal",
        ),
        registry.Implementation("apart", "pallas_kernels.swiglu.apart:fp8_swiglu"),
    ),
)


def swiglu(
    x: Float[Array, "*T D"],
    weight: Float[Array, "E 2 I D"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T F"]:
    """``silu(x @ gate.T) * (x @ up.T)`` for any number of tokens (any leading axes).

    Args:
      x: the normed input of the MLP; bf16 or f16 (f32: reference only).
      weight: E parts of the MLP's width F = E I; in each first the rows of gate, then those of up; dtype like x.
      implementation: ``"mosaic"``, picked for 64, 128, 256 and from 512 tokens on, ``"weight_first"``, for up to 64, or
        ``"triton"``, for up to 16, where the products never leave the chip, or ``"reference"``, which leaves them to
        XLA; None picks the fastest. Only the reference can be differentiated, and split by XLA over several devices;
        the kernels need a ``shard_map`` around them there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The hidden units. Products are summed in float32 and rounded to the dtype of x before they meet.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: SwiGLU (arXiv 2002.05202).
    """
    _check(x, weight)
    out: Array = SWIGLU.function(implementation, (x, weight), interpret=interpret)(x, weight)
    return out


def fp8_swiglu(
    x: Float8e4m3fn[Array, "*T D"],
    of_tokens: Float[Array, "*T"],
    weight: Float8e4m3fn[Array, "E 2 I D"],
    of_units: Float[Array, "E 2 I"],
    dtype: DTypeLike,
    *,
    implementation: Literal["weight_first", "apart"] | None = None,
) -> tuple[Float8e4m3fn[Array, "*T F"], Float[Array, "*T"]]:
    """The hidden units of an MLP in fp8, in e4m3 as `quantize_rows` gives them; F = E I units a token.

    Args:
      x: the normed input of the MLP in e4m3.
      of_tokens: its float32 scales.
      weight: as for ``swiglu``, in e4m3.
      of_units: its float32 scales.
      dtype: in which results of one kernel are kept for the next: bf16, or f32 where products would overflow f16.
      implementation: ``"weight_first"``, for up to 64 tokens on Hopper, whose product finishes hidden units, or
        ``"apart"``, a product and `quantize_gated`; None picks the faster one.

    Returns:
      The numbers, and a float32 scale for each token.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    _check(x, weight)
    if of_tokens.shape != x.shape[:-1] or of_units.shape != weight.shape[:-1]:
        raise ValueError(
            f"of_tokens must be {list(x.shape[:-1])} and of_units {list(weight.shape[:-1])}; "
            f"got {list(of_tokens.shape)} and {list(of_units.shape)}"
        )
    run = FP8_SWIGLU.function(implementation, (x, weight))
    numbers, scales = run(x, of_tokens, weight, of_units, dtype)
    return numbers, scales


def _check(x: Any, weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 4 or weight.shape[1] != 2 or weight.shape[3] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [E, 2, I, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
