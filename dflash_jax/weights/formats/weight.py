"""Products of activations with weights of any format."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.protocol import QuantizedRows, Rows, Stack, Weight


def weight_of(leaf: Array | Weight) -> Weight:
    """The weight that stands in the parameters; a plain array is wrapped."""
    return leaf if isinstance(leaf, Weight) else ArrayWeight(leaf)


def stack_of(leaf: Array | Stack) -> Stack:
    """The matrices of a layer's experts that stand in the parameters; a plain array is wrapped."""
    return leaf if isinstance(leaf, Stack) else ArrayWeight(leaf)


def flat_rows(x: Float[Array, "B T *I"] | QuantizedRows) -> Rows:
    """Activations as one row of inputs for each token, [B, T, I], as formats take them."""
    return x if isinstance(x, QuantizedRows) else x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


def project(
    x: Float[Array, "B T *I"] | QuantizedRows,
    weight: Array | Weight,
    bias: Float[Array, "*O"] | None = None,
    *,
    kernels: bool = False,
) -> Float[Array, "B T *O"]:
    """X @ weight.T + bias for a weight [*O, *I], in x's dtype, summed in float32.

    Args:
        x: activations.
        weight: of any format.
        bias: added to the product.
        kernels: whether Pallas kernels may compute it, as for `Weight`.

    Raises:
        TypeError: x is quantised and the weight's format multiplies plain activations only.
    """
    outer = weight.shape[: len(weight.shape) - len(x.shape[2:])]
    out = weight_of(weight).product(flat_rows(x), kernels=kernels).reshape(*x.shape[:2], *outer)
    return out if bias is None else out + bias


def logits_of(hidden: Float[Array, "B T D"], head: Float[Array, "V D"] | Weight) -> Float[Array, "B T V"]:
    """float32 logits, summed in float32. They can be differentiated, and split by XLA."""
    return weight_of(head).product(hidden, jnp.float32)
