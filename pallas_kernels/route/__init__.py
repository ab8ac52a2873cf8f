"""The choice of experts: the largest of a token's logits, and their weights."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import registry
from pallas_kernels.registry import AMPERE_ON

__all__ = ["ROUTE", "Routes", "route"]

Implementation = Literal["triton", "reference"]

ROUTE = registry.Operation(  # a call is (logits,)
    "route",
    (
        registry.Implementation("triton", "pallas_kernels.route.triton:route", AMPERE_ON, interprets=True),
        registry.Implementation("reference", "pallas_kernels.route.reference:route"),
    ),
)


class Routes(NamedTuple):
    """Where tokens go.

    Attributes:
        chosen: experts of each token, int32, the largest logit first and of equals the first; X for padding.
        weights: of these experts, float32.
        opened: how much of the shared expert each token takes, float32; None without one.
    """

    chosen: Int[Array, "*T k"]
    weights: Float[Array, "*T k"]
    opened: Float[Array, "*T"] | None


def route(
    logits: Float[Array, "S *T X"],
    is_token: Bool[Array, "*T"],
    per_token: int,
    *,
    renormalize: bool,
    shared: tuple[Float[Array, "*T D"], Float[Array, " D"]] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Routes:
    """Choose the experts of each token.

    Args:
      logits: of the router, in S parts whose sum they are, float32: rounded to bfloat16, many would tie.
      is_token: whether a row is a token; padding is sent to no expert, which would have to be read for it.
      per_token: k.
      renormalize: whether the weights of a token's experts sum to 1; else those of all experts would.
      shared: the router's input and the gate of a shared expert.
      implementation: ``"triton"``, picked on NVIDIA GPUs from sm_80 on, or ``"reference"``; None picks the fastest.
        Only the reference can be differentiated.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Raises:
      ValueError: shapes that do not belong together; the message prints them.

    Source: transformers' Qwen3MoeSparseMoeBlock and Qwen3_5MoeSparseMoeBlock.
    """
    _check(logits, is_token, per_token, shared)
    run = ROUTE.function(implementation, (logits,), interpret=interpret)
    routes: Routes = run(logits, is_token, per_token, renormalize=renormalize, shared=shared)
    return routes


def _check(logits: Any, is_token: Any, per_token: int, shared: Any) -> None:
    """Raise ValueError for shapes or dtypes that do not belong together."""
    if logits.ndim != is_token.ndim + 2 or logits.shape[1:-1] != is_token.shape or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits must be float32 [S, *T, X] for tokens {list(is_token.shape)}; got {logits.dtype}"
            f"{list(logits.shape)}"
        )
    if not 0 < per_token <= logits.shape[-1]:
        raise ValueError(f"a token must have 1 to {logits.shape[-1]} experts; got {per_token}")
    if shared is not None:
        x, gate = shared
        if x.shape != (*is_token.shape, gate.size) or gate.ndim != 1:
            raise ValueError(
                f"the shared expert's gate must be [D], and its input {[*is_token.shape, 'D']}; got "
                f"{list(gate.shape)} and {list(x.shape)}"
            )
