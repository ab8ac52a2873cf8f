"""The residual addition between two blocks of a pre-norm layer, and the RMS norm of the sum."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.registry import FP8_GPUS

Implementation = Literal["triton", "reference"]
Scales = tuple[Float[Array, "*T"], Float[Array, " D"]]

ADD_NORM = registry.Operation(  # a call is (x,)
    "add_norm",
    (
        registry.Implementation(
            "triton", "pallas_kernels.add_norm.triton:add_norm", FP8_GPUS, refusal="refusal", interprets=True
        ),
        registry.Implementation("reference", "pallas_kernels.add_norm.reference:add_norm"),
    ),
)


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
    """``x + y`` and its RMS norm, for any number of tokens (any leading axes).

    Args:
      x: the residual stream; bf16, f16 or f32.
      y: the output of a block; or S parts of it, which are summed in float32 and rounded to x's dtype first.
      weight: of the norm.
      eps: of the norm, added to the mean of the squares.
      y_scales: float32 scales of tokens and of columns, for a y that is a product of fp8 numbers; y is multiplied by
        both before it is rounded to x's dtype.
      quantize: return the norm as ``quantize_rows`` does, for products of fp8 numbers.
      implementation: ``"triton"`` or ``"reference"``; None picks Triton on NVIDIA GPUs from sm_89. Only the reference
        can be differentiated, and split by XLA over several devices; the kernel needs a ``shard_map`` around it there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The sum, and ``rms_norm(sum, weight, eps)`` with the roundings of that function, the first of which is to the
      dtype of the sum; with ``quantize`` its e4m3 numbers and their scales.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    added = jax.ShapeDtypeStruct(y.shape[1:], y.dtype) if y.ndim == x.ndim + 1 else y
    check(x, added, weight, y_scales)
    run = ADD_NORM.function(implementation, (x,), interpret=interpret)
    total, normed = run(x, y, weight, eps, y_scales, quantize)
    return total, normed


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
