"""The product of activations with a weight, for few tokens by a kernel of our own."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.product import reference, triton

__all__ = ["product"]

Implementation = Literal["triton", "reference"]


def product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"]:
    """``x @ weight.T`` of any number of tokens (any leading axes), summed in float32, in x's dtype.

    Args:
      x: what goes in; bf16 or f16 (f32: reference only, which keeps it float32 on every device, without TF32).
      weight: like x.
      implementation: ``"triton"``, for up to 16 tokens, or ``"reference"``, which leaves it to XLA; None picks the
        faster. Only the reference can be differentiated, and split by XLA over several devices; the kernel wants a
        ``shard_map`` around it there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [O, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
    match implementation or _fastest(x, weight, interpret):
        case "triton":
            return triton.product(x, weight, interpret=interpret)
        case "reference":
            return reference.product(x, weight)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")


def _fastest(x: Any, weight: Any, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    able = capability is not None and capability[0] == 9 and triton.refusal(x, weight) is None
    return "triton" if able and triton.is_fastest(x, weight) else "reference"
