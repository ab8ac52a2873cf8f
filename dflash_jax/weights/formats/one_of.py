"""One of several weights, by a number that the program computes: that of a layer in a loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from dflash_jax.weights.formats.protocol import Limit, Product, Rows, Weight
from pallas_kernels import gated, largest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneOf:
    """The weight `weights[index]`.

    The program branches, and multiplies by the weight where it lies. A slice of stacked weights would be copied first:
    48 MB in each round of the embedded pair, as much as the round reads.

    Attributes:
        weights: of one shape and format, which multiplies plain activations.
        index: which of them.
    """

    weights: tuple[Weight, ...]
    index: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each weight."""
        return self.weights[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.weights[0].nbytes

    @property
    def wants_quantized_rows(self) -> bool:
        """Its weights multiply plain activations."""
        return False

    @property
    def needs_kernels(self) -> bool:
        """As each weight does."""
        return self.weights[0].needs_kernels

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T, in the branch of the weight."""

        def multiply(weight: Weight, x: Rows) -> Array:
            return weight.product(x, dtype, kernels=kernels)

        branches: list[Callable[[Any], Any]] = [partial(multiply, weight) for weight in self.weights]
        out: Array = lax.switch(self.index, branches, x)
        return out

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The product; branches leave no scales."""
        return Product(self.product(x, kernels=kernels), None)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product in one part."""
        return self.unscaled(x, kernels=kernels)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """silu(gate) * up in x's dtype, behind the branches, so that it is compiled once."""
        _, pair, units, _ = self.shape
        return gated(self.product(x, kernels=kernels).reshape(*x.shape[:-1], -1, pair, units))

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit, over float32 logits of all tokens."""
        return largest(self.product(x, jnp.float32, kernels=kernels), limit)

    def shard(self, axis: int, name: str) -> None:
        """It is never split: layers run in a loop on one device."""
