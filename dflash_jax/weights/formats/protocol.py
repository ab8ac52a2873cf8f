"""What every weight format provides, and the two kinds of activations that weights multiply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable

import jax
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, Int

from pallas_kernels.experts import FewBits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedRows:
    """Activations in fp8; the real values are `values * scales[..., None]`.

    Attributes:
        values: one row of I numbers for each token.
        scales: float32, one for each token.
        dtype: dtype of the activations before they were quantised; products have it unless another is asked for.
    """

    values: Float8e4m3fn[Array, "*T I"]
    scales: Float[Array, "*T"]
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activations, [*T, I]."""
        return self.values.shape


Rows = Array | QuantizedRows
Limit = int | Int[Array, ""] | None  # how many rows of a head count, those behind are padding; None is all


class Product(NamedTuple):
    """A product that the next kernel finishes: it sums the parts and applies the scales.

    Attributes:
        values: the product, or S parts whose sum is the product.
        scales: float32 factors for each token and for each output; None where `values` needs none.
    """

    values: Float[Array, "*T O"] | Float[Array, "S *T O"]
    scales: tuple[Float[Array, "*T"], Float[Array, "*O"]] | None


@runtime_checkable
class Weight(Protocol):
    """A matrix of shape [*O, *I]: it maps I inputs to O outputs. Layers know weights by this protocol alone.

    A new format (int4, block-wise fp8, ...) is one file in this folder with a class that
      - is a pytree (`jax.tree_util.register_dataclass`): its arrays are leaves, everything else is static, so that
        parameters can be flattened, placed, donated and compiled for;
      - has the members below; a method without a faster kernel of its own may be built on `product`;
      - comes with a function that makes it of the checkpoint's tensors or of loaded arrays, and takes the placement of
        arrays as an argument (`fp8.quantize_draft` and `transposed.narrowed` are the examples).
    Plain arrays in the parameters are weights, too: `weight.weight_of` wraps them where they are used.

    Activations `x` are [*T, I], flat along I. `kernels` says that Pallas kernels may compute the product: XLA can
    neither split them over devices nor differentiate them, so training and arrays that XLA shards pass False.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [*O, *I], whatever the layout of the stored arrays."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays, scales included."""
        ...

    @property
    def wants_quantized_rows(self) -> bool:
        """Whether weights of this format want their inputs as `QuantizedRows`.

        All matrices of a model have one format, so a layer asks the weight that it multiplies by whether to quantise
        the result for the next one.
        """
        ...

    @property
    def needs_kernels(self) -> bool:
        """Whether XLA multiplies it slowly: then each of several devices multiplies its part by kernels of its own.

        XLA splits and overlaps products with plain arrays by itself.
        """
        ...

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T in `dtype` (default: that of x), summed in float32.

        Raises:
            TypeError: x is quantised and this format multiplies plain activations only.
        """
        ...

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The product of x's dtype in one part, with scales left to the next kernel where the format has some."""
        ...

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """Like `unscaled`, but the product may come in S parts, for a kernel that adds it to something anyway."""
        ...

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """Hidden units silu(gate) * up, [*T, F], of a weight [E, 2, F / E, D] that holds gate and up."""
        ...

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax over the outputs, and its float32 logit, for a head [V, D].

        Args:
            x: final hidden states.
            length: only the first `length` tokens are wanted; the results of the others are undefined. None is all.
            limit: only the first `limit` outputs count; where it is not positive the logit is -inf.
            kernels: whether Pallas kernels may do it. With quantised rows the logit lacks the token's scale.
        """
        ...

    def shard(self, axis: int, name: str) -> Self | None:
        """A copy with a `PartitionSpec` for each array: axis `axis` of the weight split over mesh axis `name`.

        None if the format cannot be split; the weight then lies whole on every device.
        """
        ...


@runtime_checkable
class Stack(Protocol):
    """The matrices of all experts of a layer, [X, 2, M, D] or [X, D, M], as `pallas_kernels.experts` multiplies them.

    A format whose stacks experts may have is a `Weight` with this one member more.
    """

    @property
    def operand(self) -> Array | FewBits:
        """What the kernels take."""
        ...

    def shard(self, axis: int, name: str) -> Self | None:
        """As for `Weight`."""
        ...


@runtime_checkable
class Accompanied(Protocol):
    """A `Weight` with one member more, since its kernels can multiply a plain matrix of few rows in the same launch."""

    def product_beside(self, x: Rows, other: Float[Array, "P I"]) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
        """The product, by kernels, and ``x @ other.T``, both in the dtype of x.

        Raises:
            TypeError: x is quantised and this format multiplies plain activations only.
        """
        ...


def plain(x: Rows, weight: str) -> Array:
    """Activations for a weight that multiplies plain arrays only.

    Args:
        x: activations.
        weight: what the weight is, for the error.

    Raises:
        TypeError: x is quantised.
    """
    if isinstance(x, QuantizedRows):
        raise TypeError(f"Rows in fp8 are multiplied by a weight in fp8; this is {weight}.")
    array: Array = x
    return array
