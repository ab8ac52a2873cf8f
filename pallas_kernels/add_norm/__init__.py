"""What stands between two blocks of a pre-norm layer: the residual addition, and the RMS norm of the sum."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.add_norm import reference, triton

Implementation = Literal["triton", "reference"]
Scales = tuple[Float[Array, "*T"], Float[Array, " D"]]


def add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"] | Float[Array, "S *T D"],
    weight: Float[Array, " D"],
    eps: float,
    y_scales: Scales | None = None,
    *,
    quantize: bool = False,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*T D"], Any]:
    """``x + y`` and its RMS norm, of any number of tokens (any leading axes).

    Args:
      x: the residual stream; bf16, f16 or f32.
      y: what a block adds to it; or S parts of that, which are summed in float32 and rounded to x's dtype first.
      weight: of the norm.
      eps: of the norm, added to the mean of the squares.
      y_scales: float32, by which y is multiplied before it is rounded to x's dtype, of tokens and of columns: y is a
        product of fp8 numbers.
      quantize: whether the norm is wanted as ``quantize_rows`` gives it, for products of fp8 numbers.
      implementation: ``"triton"`` or ``"reference"``; None picks Triton on NVIDIA GPUs from sm_89. Only the reference
        can be differentiated, and split by XLA over several devices; the kernel wants a ``shard_map`` around it there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The sum, and ``rms_norm(sum, weight, eps)``: rounded where that rounds, first of all to the dtype of the sum; to
      be quantised, its numbers and their scales.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    added = jax.ShapeDtypeStruct(y.shape[1:], y.dtype) if y.ndim == x.ndim + 1 else y
    check(x, added, weight, y_scales)
    match implementation or _fastest(x, interpret):
        case "triton":
            return triton.add_norm(x, y, weight, eps, y_scales, quantize, interpret=interpret)
        case "reference":
            return reference.add_norm(x, y, weight, eps, y_scales, quantize)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")


def _fastest(x: jax.Array, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    able = capability is not None and capability >= (8, 9) and triton.refusal(x) is None
    return "triton" if able else "reference"


def check(x: Any, y: Any, weight: Any, y_scales: Any = None) -> None:
    """Raise ValueError for shapes or dtypes that do not belong together."""
    if x.ndim < 1 or y.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            "x and y must be alike, [*T, D], and weight [D]; "
            f"got {list(x.shape)}, {list(y.shape)} and {list(weight.shape)}"
        )
    if y_scales is not None and [s.shape for s in y_scales] != [x.shape[:-1], x.shape[-1:]]:
        raise ValueError(f"y_scales must be [*T] and [D]; got {' and '.join(str(list(s.shape)) for s in y_scales)}")
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, y, weight)):
        raise ValueError(f"x, y and weight must be floating; got {x.dtype}, {y.dtype} and {weight.dtype}")
