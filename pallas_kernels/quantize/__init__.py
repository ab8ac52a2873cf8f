"""Activations in fp8, for products with fp8 weights: of each token e4m3 numbers, and the scale that they share."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from pallas_kernels import _compat
from pallas_kernels.quantize import reference, triton

__all__ = ["quantize_gated", "quantize_rows"]

Implementation = Literal["triton", "reference"]
Rows = tuple[Float8e4m3fn[Array, "*T D"], Float[Array, "*T"]]


def quantize_rows(
    x: Float[Array, "*T D"], *, implementation: Implementation | None = None, interpret: bool = False
) -> Rows:
    """Rows in e4m3, the largest number of each as the largest of e4m3.

    Args:
      x: rows, of any number of tokens; bf16, f16 or f32.
      implementation: ``"triton"``, which reads x once, or ``"reference"``; None picks Triton on NVIDIA GPUs from sm_89.
        Only the reference can be split by XLA over several devices; the kernel wants a ``shard_map`` around it there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The numbers, and a float32 scale for each row: x = numbers * scales. Of rows with NaN or infinities anything.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating, [*T, D]; got {x.dtype} and {list(x.shape)}")
    match implementation or _fastest(x.shape[-1], interpret):
        case "triton":
            return triton.quantize_rows(x, interpret=interpret)
        case "reference":
            return reference.quantize_rows(x)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")


def quantize_gated(
    products: Float[Array, "*T E 2 I"],
    of_tokens: Float[Array, "*T"],
    of_units: Float[Array, "E 2 I"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Rows:
    """The same of the hidden units of an MLP, ``silu(gate) * up``, F = E I of a token.

    Args:
      products: of gate and up, as fp8 numbers give them: the real ones are ``products * of_tokens * of_units``.
      of_tokens: float32 scales of what went in.
      of_units: float32 scales of the weights.
      implementation: as for ``quantize_rows``.
      interpret: likewise.
    """
    units = products.shape[-3:]
    if len(units) < 3 or units[1] != 2 or of_units.shape != units or of_tokens.shape != products.shape[:-3]:
        raise ValueError(
            "products must be [*T, E, 2, I], of_tokens [*T] and of_units [E, 2, I]; "
            f"got {list(products.shape)}, {list(of_tokens.shape)} and {list(of_units.shape)}"
        )
    match implementation or _fastest(units[0] * units[2], interpret):
        case "triton":
            return triton.quantize_gated(products, of_tokens, of_units, interpret=interpret)
        case "reference":
            return reference.quantize_gated(products, of_tokens, of_units)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")


def _fastest(width: int, interpret: bool) -> Any:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    able = capability is not None and capability >= (8, 9) and triton.refusal(width) is None
    return "triton" if able else "reference"
