"""Weights in few bits, of which groups of inputs share a scale in each row, as int4 and fp8 checkpoints have them.

A checkpoint's blocks of 128 x 128 are kept as 128 inputs of each row: rows of such a weight are moved, joined with
those of other tensors and split over devices like rows of any other, at 2 bytes of scales for each 128 of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, Int, Int16, UInt8, UInt16

from dflash_jax.weights.formats.protocol import Limit, Product, Rows, plain
from pallas_kernels import (
    largest,
    product,
    quantized_product,
    quantized_product_beside,
    quantized_swiglu,
    split_quantized_product,
)
from pallas_kernels.experts import FewBits
from pallas_kernels.quantized_product.layout import places_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Grouped:
    """A weight [*O, *I] as a matrix of few bits, multiplied as it is stored.

    Attributes:
        values: e4m3 numbers, two to a word in stacks of experts, or 4-bit ones, four to a word
            (`pallas_kernels.quantized_product.layout`).
        scales: of each row and group of inputs, in the dtype of the checkpoint; the number of groups says their size.
        zeros: zero points of 4-bit numbers; None is 8.
        order: which input each column of the matrix multiplies, where that is not its own number (GPTQ's act-order).
        inner: lengths of the axes of *I behind the first.
    """

    values: UInt16[Array, "*O packed"] | Int16[Array, "*O pairs"] | Float8e4m3fn[Array, "*O I"]
    scales: Float[Array, "*O G"]
    zeros: UInt8[Array, "*O G"] | None = None
    order: Int[Array, " I"] | None = None
    inner: tuple[int, ...] = field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [*O, *I]."""
        inputs = self.values.shape[-1] * places_of(self.values)
        return (*self.values.shape[:-1], inputs // math.prod(self.inner), *self.inner)

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales, zero points and order."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def wants_quantized_rows(self) -> bool:
        """Activations stay as they are: only the weight is quantised."""
        return False

    @property
    def needs_kernels(self) -> bool:
        """XLA would write the widened weight to memory before each product."""
        return True

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T; values are widened inside of the product, and never rounded to 16 bits."""
        return quantized_product(*self._operands(x), dtype, implementation=None if kernels else "reference")

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The scaled product: scales of groups do not factor out."""
        return Product(self.product(x, kernels=kernels), None)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product, in parts where kernels split the inputs."""
        return (
            Product(split_quantized_product(*self._operands(x)), None) if kernels else self.unscaled(x, kernels=False)
        )

    def product_beside(self, x: Rows, other: Float[Array, "P I"]) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
        """Both products, in one kernel where that is faster; the other weight has the order of x."""
        if self.order is None:
            return quantized_product_beside(*self._operands(x), other)
        return self.product(x, kernels=True), product(plain(x, "a plain array"), other)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """silu(gate) * up in x's dtype."""
        x = self._ordered(x)
        implementation: Literal["reference"] | None = None if kernels else "reference"
        return quantized_swiglu(x, self.values, self.scales, self.zeros, implementation=implementation)

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit, over float32 logits of all tokens."""
        return largest(self.product(x, "float32", kernels=kernels), limit)

    def shard(self, axis: int, name: str) -> Self | None:
        """Specs that split an output axis, or the first input axis, which the loader has made a multiple of a group.

        Inputs that were reordered lie anywhere, so such a weight is not split along them.
        """
        rows = self.values.ndim - 1
        if axis > rows or (axis == rows and self.order is not None):
            return None
        spec: Any = PartitionSpec(*[None] * axis, name)
        zeros, order = None if self.zeros is None else spec, None if self.order is None else PartitionSpec()
        specs: dict[str, Any] = {"values": spec, "scales": spec, "zeros": zeros, "order": order}
        return replace(self, **specs)

    @property
    def operand(self) -> FewBits:
        """The arrays, for `pallas_kernels.experts`; stacks of experts have no order of inputs."""
        return FewBits(self.values, self.scales, self.zeros)

    def _operands(self, x: Rows) -> tuple[Array, Array, Array, Array | None]:
        """The activations in the order of the columns, and the arrays of the weight as matrices."""
        values, scales, zeros = jax.tree.map(
            lambda array: array.reshape(-1, array.shape[-1]), (self.values, self.scales, self.zeros)
        )
        return self._ordered(x), values, scales, zeros

    def _ordered(self, x: Rows) -> Array:
        """The activations in the order of the columns."""
        x = plain(x, "a weight with scales of groups, which multiplies plain activations")
        return x if self.order is None else x[..., self.order]
