"""Matrices with their inputs first, for CPUs: XLA multiplies few rows, which is what rounds have, by them faster there.

Two to sixteen rows took 15 to 37 % less time (JAX 0.10.2, two cores), one row and 64 or more the same. In bfloat16,
which a drafter may have, eight and sixteen rows take 40 % less again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A weight as the matrix [inputs, output rows]; stands where the array stood.

    Attributes:
        values: the matrix.
        shape: of the weight.
    """

    values: Float[Array, "I O"]
    shape: tuple[int, ...] = field(metadata={"static": True})

    def product(self, x: Float[Array, "M I"]) -> Float[Array, "M O"]:
        """X @ weight.T in float32, or x's dtype; x is rounded to the dtype of the matrix."""
        precision = lax.Precision.HIGHEST if self.values.dtype == jnp.float32 else None
        rows = x.astype(self.values.dtype)
        if len(rows) == 1 and precision is None:  # XLA has no product for it, and takes ten times as long as for two
            rows = jnp.concatenate([rows, rows])
        dimensions = (((1,), (0,)), ((), ()))
        out = lax.dot_general(rows, self.values, dimensions, precision=precision, preferred_element_type=jnp.float32)
        return out[: len(x)]


def narrowed(params: Mapping[str, Any], target: Mapping[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """A drafter's parameters with its matrices in another dtype, and with a copy of the head for itself.

    Args:
        params: of the drafter, whose projections are `Transposed`.
        target: the target's parameters, of whose head a drafter without one gets a copy as `lm_head`.
        dtype: what its products are computed in, summed in float32.
    """

    def narrow(leaf: Any) -> Any:
        return Transposed(leaf.values.astype(dtype), leaf.shape) if isinstance(leaf, Transposed) else leaf

    found = jax.tree.map(narrow, dict(params), is_leaf=lambda leaf: isinstance(leaf, Transposed))
    head = params.get("lm_head", target.get("lm_head", target["embed_tokens"]))
    return found | {"lm_head": Transposed(jnp.asarray(head.T, dtype), head.shape)}


def inputs_first(weight: np.ndarray, rows: int) -> np.ndarray:
    """The matrix [inputs, output rows] of a weight whose first `rows` axes are those of its output rows."""
    return np.ascontiguousarray(weight.reshape(int(np.prod(weight.shape[:rows])), -1).T)
