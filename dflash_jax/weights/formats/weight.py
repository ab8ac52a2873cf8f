"""Products of activations with weights of any format."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.formats.protocol import Accompanied, QuantizedRows, Rows, Stack, Weight
from pallas_kernels import split_product
from pallas_kernels.experts import FewBits


def weight_of(leaf: Array | Weight) -> Weight:
    """The weight that stands in the parameters; a plain array is wrapped."""
    return leaf if isinstance(leaf, Weight) else ArrayWeight(leaf)


def stack_of(leaf: Array | Stack) -> Stack:
    """The matrices of a layer's experts that stand in the parameters; a plain array is wrapped."""
    return leaf if isinstance(leaf, Stack) else ArrayWeight(leaf)


def operand_of(weight: Weight) -> Array | FewBits | None:
    """The arrays of a weight for a kernel that multiplies it itself; None if it must be asked for products."""
    is_reordered = isinstance(weight, Grouped) and weight.order is not None
    return weight.operand if isinstance(weight, Stack) and not is_reordered else None


def in_parts(x: Float[Array, "*T D"], weight: Float[Array, "O D"] | Weight, *, kernels: bool) -> Float[Array, "S *T O"]:
    """Float32 parts whose sum is the product; a kernel leaves several of a weight of few rows, such as a router."""
    weight = weight_of(weight)
    if not (kernels and isinstance(weight, ArrayWeight)):
        return weight.product(x, jnp.float32, kernels=kernels)[None]
    parts = split_product(x, weight.values, jnp.float32)
    return parts if parts.ndim > x.ndim else parts[None]


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


def project_both(
    x: Float[Array, "B T D"] | QuantizedRows, weight: Array | Weight, other: Array | Weight
) -> tuple[Float[Array, "B T *O"], Float[Array, "B T *P"]]:
    """`project` with kernels by a weight [*O, D], and by another of few rows [*P, D]; in one where that is faster."""
    wide, narrow = weight_of(weight), weight_of(other)
    if isinstance(wide, Accompanied) and isinstance(narrow, ArrayWeight):
        first, second = wide.product_beside(flat_rows(x), narrow.values.reshape(-1, x.shape[-1]))
        outer = x.shape[:2]
        return first.reshape(*outer, *weight.shape[:-1]), second.reshape(*outer, *other.shape[:-1])
    return project(x, weight, kernels=True), project(x, other, kernels=True)


def logits_of(hidden: Float[Array, "B T D"], head: Float[Array, "V D"] | Weight) -> Float[Array, "B T V"]:
    """float32 logits, summed in float32. They can be differentiated, and split by XLA."""
    return weight_of(head).product(hidden, jnp.float32)
