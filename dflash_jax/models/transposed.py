"""Matrices with their inputs first, for CPUs: the other way round XLA turns each over again in every step.

Products of a few rows, which is what rounds have, take a quarter less time so; those of one row or of many the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

PROJECTIONS = ("qkv_proj", "q_proj", "kv_proj", "o_proj", "gate_up_proj", "down_proj", "fc")


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
        """X @ weight.T in x's dtype; float32 stays float32."""
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot_general(x, self.values, (((1,), (0,)), ((), ())), precision=precision)


def inputs_first(weight: np.ndarray, rows: int) -> np.ndarray:
    """The matrix [inputs, output rows] of a weight whose first `rows` axes are those of its output rows."""
    return np.ascontiguousarray(weight.reshape(int(np.prod(weight.shape[:rows])), -1).T)
