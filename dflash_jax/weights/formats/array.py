"""Plain arrays as weights: float32, bfloat16 or float16, in the checkpoint's order [out, in]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from dflash_jax.weights.formats.protocol import Limit, Product, Rows, plain
from pallas_kernels import gated, largest, largest_product, product, product_beside, split_product, swiglu


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ArrayWeight:
    """A plain array [*O, *I]; `weight_of` makes it where a weight is used, parameters hold the array itself."""

    values: Float[Array, "*O_and_I"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.values.nbytes

    @property
    def wants_quantized_rows(self) -> bool:
        """Plain weights multiply plain activations."""
        return False

    @property
    def needs_kernels(self) -> bool:
        """XLA multiplies plain arrays well."""
        return False

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T; float32 stays float32 on every device (no TF32)."""
        return product(
            plain(x, "a plain array"), self._matrix(x), dtype, implementation=None if kernels else "reference"
        )

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The product; there are no scales."""
        return Product(self.product(x, kernels=kernels), None)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product, in parts where XLA would compute such and sum them in another kernel."""
        return (
            Product(split_product(plain(x, "a plain array"), self._matrix(x)), None)
            if kernels
            else self.unscaled(x, kernels=False)
        )

    def product_beside(self, x: Rows, other: Float[Array, "P I"]) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
        """Both products, in one kernel where that is faster."""
        return product_beside(plain(x, "a plain array"), self._matrix(x), other)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """silu(gate) * up in x's dtype."""
        if kernels:
            return swiglu(plain(x, "a plain array"), self.values)
        return gated(self.product(x).reshape(*x.shape[:-1], *self.shape[:-1]))

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit; the kernel keeps no logits."""
        if kernels:
            return largest_product(plain(x, "a plain array"), self.values, length=length, limit=limit)
        return largest(self.product(x, jnp.float32), limit)

    def shard(self, axis: int, name: str) -> ArrayWeight:
        """The spec that splits one axis of the array."""
        spec: Any = PartitionSpec(*[None] * axis, name)
        return ArrayWeight(spec)

    @property
    def operand(self) -> Float[Array, "*O I"]:
        """The array, for `pallas_kernels.experts`."""
        return self.values

    def _matrix(self, x: Rows) -> Float[Array, "O I"]:
        return self.values.reshape(-1, x.shape[-1])
