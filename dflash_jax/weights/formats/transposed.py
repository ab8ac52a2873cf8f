"""Weights stored as [inputs, outputs], for CPUs: XLA's CPU products of few rows, as rounds have, are faster so.

Two to sixteen rows took 15 to 37 % less time (JAX 0.10.2, two cores); one row, and 64 or more, took the same. In
bfloat16, which drafters may use, eight and sixteen rows take 40 % less again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from dflash_jax.weights.formats.protocol import Limit, Product, Rows, plain
from pallas_kernels import gated, largest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A weight stored as the matrix [I, O], on one device.

    Attributes:
        values: the matrix.
        shape: shape of the weight, [*O, *I].
    """

    values: Float[Array, "I O"]
    shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.values.nbytes

    @property
    def wants_quantized_rows(self) -> bool:
        """Inputs are plain: CPUs have no fp8 products."""
        return False

    @property
    def needs_kernels(self) -> bool:
        """XLA multiplies it, on CPUs."""
        return False

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T; x is rounded to the dtype of the matrix, and no kernel is needed."""
        precision = lax.Precision.HIGHEST if self.values.dtype == jnp.float32 else None
        x = plain(x, "a transposed array")
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.astype(self.values.dtype)
        if len(rows) == 1 and precision is None:
            # XLA has no bfloat16 product for a single row and takes ten times as long as for two.
            rows = jnp.concatenate([rows, rows])
        dimensions = (((1,), (0,)), ((), ()))
        out = lax.dot_general(rows, self.values, dimensions, precision=precision, preferred_element_type=jnp.float32)
        return out[: len(flat)].astype(x.dtype if dtype is None else dtype).reshape(*x.shape[:-1], -1)

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The product; there are no scales."""
        return Product(self.product(x), None)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product in one part."""
        return Product(self.product(x), None)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """silu(gate) * up in x's dtype."""
        return gated(self.product(x).reshape(*x.shape[:-1], *self.shape[:-1]))

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit, over float32 logits of all tokens."""
        return largest(self.product(x, jnp.float32), limit)

    def shard(self, axis: int, name: str) -> None:
        """It is never split: several devices, which stand for accelerators, hold plain arrays."""


def narrowed(params: Mapping[str, Any], target: Mapping[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """A drafter's parameters with matrices and head in another dtype, all `Transposed`.

    Args:
        params: the drafter's parameters, whose projections are `Transposed`.
        target: the target's parameters; a drafter without a head gets a copy of theirs as `lm_head`.
        dtype: dtype that products are computed in; they are summed in float32.
    """

    def narrow(leaf: Any) -> Any:
        return Transposed(leaf.values.astype(dtype), leaf.shape) if isinstance(leaf, Transposed) else leaf

    small = jax.tree.map(narrow, dict(params), is_leaf=lambda leaf: isinstance(leaf, Transposed))
    head = params.get("lm_head", target.get("lm_head", target["embed_tokens"]))
    return small | {"lm_head": Transposed(jnp.asarray(head.T, dtype), head.shape)}


def inputs_first(weight: np.ndarray, rows: int) -> np.ndarray:
    """The matrix [inputs, outputs] of a weight whose first `rows` axes are its output axes."""
    return np.ascontiguousarray(weight.reshape(int(np.prod(weight.shape[:rows])), -1).T)
