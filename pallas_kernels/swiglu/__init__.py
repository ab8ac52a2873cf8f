"""The first half of an MLP: the products with gate and up, and what becomes of them, ``silu(gate) * up``."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.swiglu import mosaic, reference
from pallas_kernels.swiglu.reference import gated

__all__ = ["gated", "swiglu"]

Implementation = Literal["mosaic", "reference"]


def swiglu(
    x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"], *, implementation: Implementation | None = None
) -> Float[Array, "*T F"]:
    """``silu(x @ gate.T) * (x @ up.T)`` of any number of tokens (any leading axes).

    Args:
      x: what goes into the MLP, normed; bf16 or f16 (f32: reference only).
      weight: in each of E parts of the MLP's width F = E I, first the rows of gate and then those of up; like x.
      implementation: ``"mosaic"``, where the products never leave the chip, or ``"reference"``, which leaves them to
        XLA; None picks the faster. Only the reference can be differentiated, and split by XLA over several devices;
        the kernel wants a ``shard_map`` around it there.

    Returns:
      The hidden units. Products are summed in float32 and rounded to the dtype of x before they meet.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: SwiGLU (arXiv 2002.05202).
    """
    _check(x, weight)
    match implementation or _fastest(x, weight):
        case "mosaic":
            return mosaic.swiglu(x, weight)
        case "reference":
            return reference.swiglu(x, weight)
        case other:
            raise ValueError(f"implementation must be 'mosaic', 'reference' or None; got {other!r}")


def _fastest(x: Any, weight: Any) -> Implementation:
    capability = _compat.compute_capability()
    able = capability is not None and capability[0] == 9 and mosaic.refusal(x, weight) is None
    return "mosaic" if able and mosaic.is_fastest(x, weight) else "reference"


def _check(x: Any, weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 4 or weight.shape[1] != 2 or weight.shape[3] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [E, 2, I, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")
