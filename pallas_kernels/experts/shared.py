"""The expert that sees every token: what it is, and its output by the kernels of products."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.product import product
from pallas_kernels.quantized_product import quantized_product
from pallas_kernels.quantized_product.layout import FewBits
from pallas_kernels.swiglu import gated, swiglu


class Shared(NamedTuple):
    """A shared expert.

    Attributes:
        gate_up: [E, 2, I, D]; gate and up of E parts of its width F = E I.
        down: [D, F].
        weights: how much of it each token takes, float32.
    """

    gate_up: Float[Array, "E 2 I D"] | FewBits
    down: Float[Array, "D F"] | FewBits
    weights: Float[Array, "*T"]

    @property
    def width(self) -> int:
        """F."""
        parts, _, units, _ = self.gate_up.shape
        return int(parts * units)


def output(x: Float[Array, "*T D"], shared: Shared, *, kernels: bool) -> Float[Array, "*T D"]:
    """The shared expert's output, weighted, float32; without kernels XLA multiplies."""
    gate_up, implementation = shared.gate_up, None if kernels else "reference"
    if isinstance(gate_up, FewBits) or not kernels:
        hidden = gated(_product(x, gate_up, x.dtype, implementation).reshape(*x.shape[:-1], *gate_up.shape[:-1]))
    else:
        hidden = swiglu(x, gate_up)
    return shared.weights[..., None] * _product(hidden, shared.down, jnp.float32, implementation)


def _product(x: Array, weight: Array | FewBits, dtype: Any, implementation: Any) -> Array:
    """X @ weight.T, of a weight with any number of output axes."""
    matrix: Any = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)
    if isinstance(matrix, FewBits):
        values, scales, zeros = matrix
        return quantized_product(x, values, scales, zeros, dtype, implementation=implementation)
    return product(x, matrix, dtype, implementation=implementation)
