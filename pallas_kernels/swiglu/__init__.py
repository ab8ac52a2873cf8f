"""The first half of an MLP: the products with gate and up, and what becomes of them, ``silu(gate) * up``."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.swiglu import mosaic, reference, triton
from pallas_kernels.swiglu.reference import gated

__all__ = ["gated", "swiglu"]

Implementation = Literal["mosaic", "triton", "reference"]


def swiglu(
    x: Float[Array, "*T D"],
    weight: Float[Array, "E 2 I D"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T F"]:
    """``silu(x @ gate.T) * (x @ up.T)`` of any number of tokens (any leading axes).

    Args:
      x: what goes into the MLP, normed; bf16 or f16 (f32: reference only).
      weight: in each of E parts of the MLP's width F = E I, first the rows of gate and then those of up; like x.
      implementation: ``"mosaic"``, picked for 64, 128, 256 and from 512 tokens on, or ``"triton"``, for up to 16, where
        the products never leave the chip, or ``"reference"``, which leaves them to XLA; None picks the fastest. Only
        the reference can be differentiated, and split by XLA over several devices; the kernels want a ``shard_map``
        around them there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The hidden units. Products are summed in float32 and rounded to the dtype of x before they meet.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: SwiGLU (arXiv 2002.05202).
    """
    _check(x, weight)
    match implementation or _fastest(x, weight, interpret):
        case "mosaic":
            return mosaic.swiglu(x, weight)
        case "triton":
            return triton.swiglu(x, weight, interpret=interpret)
        case "reference":
            return reference.swiglu(x, weight)
        case other:
            raise ValueError(f"implementation must be 'mosaic', 'triton', 'reference' or None; got {other!r}")


def _fastest(x: Any, weight: Any, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    if capability is None or capability[0] != 9:
        return "reference"
    if mosaic.refusal(x, weight) is None and mosaic.is_fastest(x, weight):
        return "mosaic"
    return "triton" if triton.refusal(x, weight) is None and triton.is_fastest(x, weight) else "reference"


def _check(x: Any, weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 4 or weight.shape[1] != 2 or weight.shape[3] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [E, 2, I, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
