"""The routed experts of a mixture-of-experts MLP.

Letters beside the project's: X experts, k of them chosen by a token, M the width of an expert, P = T k pairs of a token
and one of its experts.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.experts.shared import Shared
from pallas_kernels.quantized_product.layout import FewBits, places_of
from pallas_kernels.registry import AMPERE_ON, FP8_GPUS, HOPPER

__all__ = ["EXPERTS", "FP8_EXPERTS", "INT4_EXPERTS", "FewBits", "Implementation", "Shared", "experts", "operation_of"]

Implementation = Literal["mosaic", "triton", "reference"]

_REFERENCE = registry.Implementation("reference", "pallas_kernels.experts.reference:experts")


def _triton(gpus: registry.Capability) -> registry.Implementation:
    function = "pallas_kernels.experts.triton:experts"
    return registry.Implementation("triton", function, gpus, refusal="refusal", interprets=True)


EXPERTS = registry.Operation(  # a call is (x, gate_up, down, chosen), and the shared expert if there is one
    "experts",
    (
        registry.Implementation(
            "mosaic", "pallas_kernels.experts.mosaic:experts", HOPPER, slower="slower", refusal="refusal"
        ),
        _triton(AMPERE_ON),
        _REFERENCE,
    ),
)
_MOSAIC_FEW = registry.Implementation(
    "mosaic", "pallas_kernels.experts.mosaic_few:experts", HOPPER, slower="slower", refusal="refusal"
)
INT4_EXPERTS = registry.Operation(  # gate_up, down or both in 4 bits
    "int4_experts", (_MOSAIC_FEW, _triton(AMPERE_ON), _REFERENCE)
)
FP8_EXPERTS = registry.Operation(  # at least one of them in e4m3
    "fp8_experts", (_MOSAIC_FEW, _triton(FP8_GPUS), _REFERENCE)
)


def experts(
    x: Float[Array, "*T D"],
    gate_up: Float[Array, "X 2 M D"] | FewBits,
    down: Float[Array, "X D M"] | FewBits,
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    shared: Shared | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T D"]:
    """Sum over the chosen experts of each token, and the shared one: weight * down(silu(gate(x)) * up(x)).

    Only experts that a token chose are read. What a row gives does not depend on the other rows, except for the order
    of the sums within products, which may change with the number of tokens.

    Args:
      x: the normed input of the MLP; bf16 or f16 (f32, and f16 beside few bits: reference only).
      gate_up: of each expert, the M rows of gate, then those of up; dtype like x, or in few bits, which are never
        rounded to 16 bits. M may be a device's share of the width: then the caller sums over devices, and has a
        ``shard_map`` around the call.
      down: of each expert; likewise.
      chosen: experts of each token, int32, none twice; a number outside 0..X-1 skips the pair, as for padding.
      weights: of these experts, float32; those of skipped pairs are not used.
      shared: an expert that every token sees, of 16 or few bits like the others or not; None is none.
      implementation: ``"mosaic"``, picked on Hopper, in 16 bits from 64 pairs an expert on, in few bits for 8 to 16
        tokens, ``"triton"``, picked on NVIDIA GPUs from sm_80 on, with e4m3 from sm_89, or ``"reference"``; None picks
        the fastest. Only the reference can be differentiated.
      interpret: run the Triton kernels in Pallas' interpreter, on any backend (tests).

    Returns:
      The sums, in the dtype of x; zeros for a token whose pairs are all skipped. Products of gate and
      up are summed in float32 and rounded to the dtype of x before they meet, as are the hidden units. The rest is
      float32 to the end, except that with many pairs an expert the kernels round each expert's part to the dtype of x,
      half the bytes.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: transformers' ``qwen3_5_moe``, which rounds more often.
    """
    _check(x, gate_up, down, chosen, weights)
    if shared is not None:
        _check_shared(x, shared)
    operation = operation_of(gate_up, down)
    call = (x, gate_up, down, chosen, *([] if shared is None else [shared]))
    run = operation.function(implementation, call, interpret=interpret)
    out: Array = run(x, gate_up, down, chosen, weights, shared)
    return out


def operation_of(gate_up: Any, down: Any) -> registry.Operation:
    """The operation that multiplies by such weights."""
    few = [weight for weight in (gate_up, down) if isinstance(weight, FewBits)]
    if not few:
        return EXPERTS
    return INT4_EXPERTS if all(weight.is_packed for weight in few) else FP8_EXPERTS


def _check(x: Any, gate_up: Any, down: Any, chosen: Any, weights: Any) -> None:
    """Raise ValueError for shapes or dtypes that do not belong together."""
    if len(gate_up.shape) != 4 or gate_up.shape[1] != 2:
        raise ValueError(f"gate_up must be [X, 2, M, D]; got {list(gate_up.shape)}")
    X, _, M, D = gate_up.shape
    if x.ndim < 1 or x.shape[-1] != D or down.shape != (X, D, M):
        raise ValueError(
            f"x must be [*T, D] and down [X, D, M] for gate_up {list(gate_up.shape)}; got {list(x.shape)} and "
            f"{list(down.shape)}"
        )
    if chosen.ndim != x.ndim or chosen.shape[:-1] != x.shape[:-1] or weights.shape != chosen.shape:
        raise ValueError(
            f"chosen and weights must be [*T, k] for x {list(x.shape)}; got {list(chosen.shape)} and "
            f"{list(weights.shape)}"
        )
    few = [weight for weight in (gate_up, down) if isinstance(weight, FewBits)]
    for weight in few:
        weight.check()
        if places_of(weight.values) == 1:
            raise ValueError(f"experts in e4m3 must be int16 words of two numbers; got {weight.values.dtype}")
    dtypes = [x.dtype, *(weight.dtype for weight in (gate_up, down) if not isinstance(weight, FewBits))]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "x, gate_up and down must be floating, and of one dtype where they are not in few bits; got "
            + ", ".join(map(str, dtypes))
        )
    if chosen.dtype != jnp.int32 or weights.dtype != jnp.float32:
        raise ValueError(f"chosen must be int32 and weights float32; got {chosen.dtype} and {weights.dtype}")


def _check_shared(x: Any, shared: Shared) -> None:
    """Raise ValueError for shapes that do not belong together."""
    gate_up, down, D = shared.gate_up.shape, shared.down.shape, x.shape[-1]
    if (
        len(gate_up) != 4
        or gate_up[1::2] != (2, D)
        or down != (D, shared.width)
        or shared.weights.shape != x.shape[:-1]
    ):
        raise ValueError(
            f"a shared expert must be [E, 2, I, D], [D, E I] and [*T] for x {list(x.shape)}; got {list(gate_up)}, "
            f"{list(down)} and {list(shared.weights.shape)}"
        )
