"""Products of activations with weights, in whatever form the weights are held."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.weights.formats.fp8 import Quantized, QuantizedRows
from dflash_jax.weights.formats.transposed import Transposed
from pallas_kernels import product

Weight = Array | Quantized | Transposed


def project(
    x: Float[Array, "B T *I"] | QuantizedRows, weight: Weight, bias: Array | None = None, *, alone: bool = False
) -> Float[Array, "B T *O"]:
    """X @ weight.T for a weight [*O, *I], giving x's dtype; float32 stays float32 on every device (no TF32).

    `alone` says that it is on one device and will not be differentiated, so that kernels may do it.
    """
    inner = x.shape[2:]
    outer = weight.shape[: -len(inner)]
    tokens = x if isinstance(x, QuantizedRows) else x.reshape(*x.shape[:2], math.prod(inner))
    if isinstance(weight, Quantized):
        out = weight.product(tokens, x.dtype)
    elif isinstance(tokens, QuantizedRows):
        raise TypeError(f"Rows in fp8 are multiplied by a weight in fp8; this is {type(weight).__name__}.")
    elif isinstance(weight, Transposed):
        out = weight.product(tokens.reshape(-1, tokens.shape[-1])).astype(x.dtype)
    else:
        out = product(tokens, weight.reshape(-1, tokens.shape[-1]), implementation=None if alone else "reference")
    out = out.reshape(*x.shape[:2], *outer)
    return out if bias is None else out + bias


def logits_of(
    hidden: Float[Array, "B T D"], weight: Float[Array, "V D"] | Quantized | Transposed
) -> Float[Array, "B T V"]:
    """Logits in float32, accumulated in float32, for a head [V, D]."""
    if isinstance(weight, Quantized | Transposed):
        return weight.product(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)
    return product(hidden, weight, jnp.float32, implementation="reference")
