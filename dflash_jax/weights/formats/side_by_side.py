"""Tensors of a fused parameter that do not have one format: each is held as it is, and multiplied by itself.

Checkpoints leave single layers at 16 bits (`extra_config`, `modules_to_not_convert`, `ignore`), or quantise the query
with another order of inputs than the key. A fused array must not guess one tensor's format from its neighbour's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from dflash_jax.weights.formats.protocol import Limit, Product, Rows, Weight
from pallas_kernels import gated, largest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SideBySide:
    """A weight in parts that lie side by side along an output axis.

    Attributes:
        parts: weights of any formats that multiply plain activations.
        axis: the output axis along which they lie.
        rows: the number of output axes.
    """

    parts: tuple[Weight, ...]
    axis: int = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        first, *_ = shapes = [part.shape for part in self.parts]
        return (*first[: self.axis], sum(shape[self.axis] for shape in shapes), *first[self.axis + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def wants_quantized_rows(self) -> bool:
        """Parts multiply plain activations."""
        return False

    @property
    def needs_kernels(self) -> bool:
        """As soon as one part does."""
        return any(part.needs_kernels for part in self.parts)

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """The products of the parts, side by side."""
        products = [
            part.product(x, dtype, kernels=kernels).reshape(*x.shape[:-1], *part.shape[: self.rows])
            for part in self.parts
        ]
        joined = jnp.concatenate(products, axis=len(x.shape) - 1 + self.axis)
        return joined.reshape(*x.shape[:-1], math.prod(joined.shape[len(x.shape) - 1 :]))

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The product; there are no scales."""
        return Product(self.product(x, kernels=kernels), None)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product in one part."""
        return self.unscaled(x, kernels=kernels)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """silu(gate) * up in x's dtype."""
        return gated(self.product(x, kernels=kernels).reshape(*x.shape[:-1], *self.shape[: self.rows]))

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit, over float32 logits of all tokens."""
        return largest(self.product(x, jnp.float32, kernels=kernels), limit)

    def shard(self, axis: int, name: str) -> SideBySide | None:
        """Specs of all parts; None where one cannot be split, or along the axis on which they lie."""
        specs = [part.shard(axis, name) for part in self.parts]
        whole = [spec for spec in specs if spec is not None]
        return replace(self, parts=tuple(whole)) if len(whole) == len(specs) and axis != self.axis else None
