"""Activations in fp8, for products with fp8 weights: each token's e4m3 numbers, and the scale that they share."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

from pallas_kernels import registry
from pallas_kernels.registry import FP8_GPUS

__all__ = ["QUANTIZE_GATED", "QUANTIZE_ROWS", "quantize_gated", "quantize_rows"]

Implementation = Literal["triton", "reference"]
Rows = tuple[Float8e4m3fn[Array, "*T D"], Float[Array, "*T"]]


def _operation(name: str) -> registry.Operation:
    kernel = registry.Implementation(
        "triton", f"pallas_kernels.quantize.triton:{name}", FP8_GPUS, refusal="refusal", interprets=True
    )
    plain = registry.Implementation("reference", f"pallas_kernels.quantize.reference:{name}")
    return registry.Operation(name, (kernel, plain))


QUANTIZE_ROWS, QUANTIZE_GATED = _operation("quantize_rows"), _operation("quantize_gated")  # a call is (width of a row,)


def quantize_rows(
    x: Float[Array, "*T D"], *, implementation: Implementation | None = None, interpret: bool = False
) -> Rows:
    """Rows in e4m3, scaled so that the largest number of each row becomes the largest of e4m3.

    Args:
      x: rows of any number of tokens; bf16, f16 or f32.
      implementation: ``"triton"``, which reads x once, or ``"reference"``; None picks Triton on NVIDIA GPUs from sm_89.
        Only the reference can be split by XLA over several devices; the kernel needs a ``shard_map`` around it there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The numbers, and a float32 scale for each row: x = numbers * scales. Rows with NaN or infinities give anything.

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating, [*T, D]; got {x.dtype} and {list(x.shape)}")
    numbers, scales = QUANTIZE_ROWS.function(implementation, (x.shape[-1],), interpret=interpret)(x)
    return numbers, scales


def quantize_gated(
    products: Float[Array, "*T E 2 I"],
    of_tokens: Float[Array, "*T"],
    of_units: Float[Array, "E 2 I"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Rows:
    """The hidden units of an MLP, ``silu(gate) * up``, in e4m3 as `quantize_rows` gives it; F = E I units a token.

    Args:
      products: of gate and up, from fp8 numbers: the real products are ``products * of_tokens * of_units``.
      of_tokens: float32 scales of the activations.
      of_units: float32 scales of the weights.
      implementation: as for ``quantize_rows``.
      interpret: as for ``quantize_rows``.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    units = products.shape[-3:]
    if len(units) < 3 or units[1] != 2 or of_units.shape != units or of_tokens.shape != products.shape[:-3]:
        raise ValueError(
            "products must be [*T, E, 2, I], of_tokens [*T] and of_units [E, 2, I]; "
            f"got {list(products.shape)}, {list(of_tokens.shape)} and {list(of_units.shape)}"
        )
    run = QUANTIZE_GATED.function(implementation, (units[0] * units[2],), interpret=interpret)
    numbers, scales = run(products, of_tokens, of_units)
    return numbers, scales
