"""The gated RMS norm behind a recurrence of Gated DeltaNet."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.registry import AMPERE_ON

__all__ = ["GATED_NORM", "gated_norm"]

Activation = Literal["silu", "sigmoid"]
Implementation = Literal["triton", "reference"]

GATED_NORM = registry.Operation(  # a call is (x,)
    "gated_norm",
    (
        registry.Implementation(
            "triton", "pallas_kernels.gated_norm.triton:gated_norm", AMPERE_ON, refusal="refusal", interprets=True
        ),
        registry.Implementation("reference", "pallas_kernels.gated_norm.reference:gated_norm"),
    ),
)


def gated_norm(
    x: Float[Array, "*T HV dv"],
    channels: Float[Array, "*T HK _"],
    weight: Float[Array, " dv"],
    *,
    eps: float,
    activation: Activation,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T HK I"]:
    """RMS-norm each head and multiply it by the activation of its gate, in float32.

    Args:
      x: outputs of the recurrence, of HV = r HK heads.
      channels: of each key head; the last I = r dv are the gates of its r heads, side by side.
      weight: of the norm, which all heads share.
      eps: epsilon of the norm.
      activation: of the gates.
      implementation: ``"triton"``, picked on NVIDIA GPUs from sm_80 on, or ``"reference"``; None picks the fastest.
        Only the reference can be differentiated.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The heads in the dtype of x, those of a key head side by side. The normed head is rounded to that dtype before it
      is multiplied by the weight, as transformers does.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: transformers' `Qwen3_5RMSNormGated`.
    """
    (*outer, HV, dv), (*others, HK, width) = x.shape, channels.shape
    if outer != others or HV % HK or width < HV // HK * dv or weight.shape != (dv,):
        raise ValueError(
            f"channels must be [*T, HK, HV / HK dv or more] and weight [dv] for x {list(x.shape)}; got "
            f"{list(channels.shape)} and {list(weight.shape)}"
        )
    run: Any = GATED_NORM.function(implementation, (x,), interpret=interpret)
    out: Array = run(x, channels, weight, eps=eps, activation=activation)
    return out
