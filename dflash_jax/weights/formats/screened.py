"""A head with an 8-bit copy beside it: drafts come from the copy, and the target's argmax by way of it, exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.protocol import Limit, QuantizedRows, Rows, plain
from pallas_kernels import Screen, approximate_largest, screened_largest
from pallas_kernels.largest_product import SCREENED_LARGEST, WHOLE
from pallas_kernels.registry import Device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScreenedHead(ArrayWeight):
    """A head [V, D] as a plain array, and its 8-bit copy.

    Attributes:
        values: the head.
        screen: the copy.
        is_exact: the argmax is that of the head; else, for drafts, that of the copy.
    """

    screen: Screen
    is_exact: bool = field(default=True, metadata={"static": True})

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit; that of the copy lacks the scale of rows in fp8, which no argmax depends on."""
        if not self.is_exact:
            rows = x.values.astype(self.values.dtype) if isinstance(x, QuantizedRows) else x
            return approximate_largest(rows, self.screen, limit, implementation=None if kernels else "reference")
        if not kernels:
            return super().largest(x, length, limit, kernels=False)
        return screened_largest(plain(x, "a plain array"), self.values, self.screen, length, limit)

    def shard(self, axis: int, name: str) -> ScreenedHead:
        """The specs that split one axis; only rows can be split."""
        spec: Any = PartitionSpec(*[None] * axis, name)
        screen = Screen._make((spec, PartitionSpec(None, *spec)))
        return replace(self, values=spec, screen=screen)


def shapes_of_screen(rows: int, width: int) -> Screen:
    """Shapes of the copy of a head."""
    struct = jax.ShapeDtypeStruct
    return Screen._make((struct((rows, width), jnp.int8), struct((3, rows), jnp.float32)))


def is_worth_it(rows: int, width: int, dtype: Any, device: Device) -> bool:
    """Whether kernels of a device read the copy of a head, for few tokens, rather than the head.

    Args:
        rows: of the head, on this device.
        width: of the head.
        dtype: of the head.
        device: the kind of device.
    """
    struct = jax.ShapeDtypeStruct
    call = struct((1, width), dtype), struct((rows, width), dtype), shapes_of_screen(rows, width)
    return SCREENED_LARGEST.choose(call, device).name != WHOLE
