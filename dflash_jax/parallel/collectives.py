"""What devices that share a model tell each other: table rows, and the argmax over a split vocabulary.

All sums over devices go through the kernels' all-reduce, so that XLA has nothing to reduce: its collectives would cut
the program into pieces that the host launches one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.parallel.mesh import AXIS, SPLIT_FIRST, WHOLE, Mesh
from pallas_kernels import Peers, all_reduce, largest

ROW = 128  # float32 numbers: the all-reduce kernel sums no fewer


@dataclass(frozen=True)
class Devices:
    """Where layers run.

    Attributes:
        mesh: the devices that share the model. None leaves all placement to XLA and uses no Pallas kernel, so that
            programs can be differentiated and sharded automatically: training runs so.
        peers: mailboxes for the all-reduce kernel, on GPUs that reach each other's memory.
    """

    mesh: Mesh | None = None
    peers: Peers | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether Pallas kernels may run, on several devices inside `on_each`."""
        return self.mesh is not None

    @property
    def is_single(self) -> bool:
        """Whether Pallas kernels may run anywhere: there is one device, and nothing is differentiated."""
        return self.mesh is not None and self.mesh.size == 1

    @property
    def is_cpu(self) -> bool:
        """Whether one CPU runs the layers: XLA compiles every kernel of a program by itself there."""
        return self.mesh is not None and self.mesh.size == 1 and self.mesh.platform == "cpu"

    @property
    def implementation(self) -> Literal["reference"] | None:
        """The implementation of kernels that is asked for; None lets each kernel choose the fastest."""
        return None if self.has_kernels else "reference"

    def share(self, length: int) -> bool:
        """Whether an axis of this length is split over the devices."""
        return self.mesh is not None and self.mesh.share(length)

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`Mesh.on_each`; without a mesh the function itself."""
        return function if self.mesh is None else self.mesh.on_each(function, in_specs, out_specs)


AUTOMATIC = Devices()  # placement by XLA, no kernels


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], devices: Devices = AUTOMATIC
) -> Float[Array, "B T D"]:
    """Rows of a table, which is split over the devices where V divides evenly."""
    if not devices.share(len(table)):
        return table[tokens]

    def on_each(table, tokens, peers):
        local = tokens - lax.axis_index(AXIS) * len(table)
        is_here = (local >= 0) & (local < len(table))
        rows = table.at[local].get(mode="clip")
        return all_reduce(jnp.where(is_here[..., None], rows, 0), AXIS, peers)

    rows: Array = devices.on_each(on_each, (SPLIT_FIRST, WHOLE, SPLIT_FIRST), WHOLE)(table, tokens, devices.peers)
    return rows


def likeliest(
    logits: Float[Array, "B T V"], devices: Devices = AUTOMATIC
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Argmax of float32 logits, the first of equals, and its logit; NaN counts as the largest."""
    if not devices.share(logits.shape[-1]):
        return largest(logits)

    def on_each(logits: Array, peers: Peers | None) -> tuple[Array, Array]:
        return argmax_over_devices(*largest(logits), logits.shape[-1], peers)

    specs = (PartitionSpec(None, None, AXIS), SPLIT_FIRST)
    token, value = devices.on_each(on_each, specs, WHOLE)(logits, devices.peers)
    return token, value


def highest(logits: Float[Array, "B T V"], devices: Devices = AUTOMATIC) -> Float[Array, "B T"]:
    """The largest of the float32 logits of each row; NaN counts as the largest."""
    return likeliest(logits, devices)[1] if devices.share(logits.shape[-1]) else logits.max(axis=-1)


def argmax_over_devices(
    token: Int[Array, "B T"], value: Float[Array, "B T"], size: int, peers: Peers | None
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Argmax over a split vocabulary, of each device's argmax and logit in its own part; runs inside `on_each`.

    Each device writes its two numbers to a place of its own in a row of zeros, so that one all-reduce gathers them.

    Args:
        token: argmax within the device's part, int32.
        value: its logit, float32.
        size: tokens in each part.
        peers: mailboxes.
    """
    rank, devices = lax.axis_index(AXIS), lax.axis_size(AXIS)
    pair = jnp.stack([(rank * size + token).astype(jnp.float32), value])  # token ids below 2**24 are exact
    width = -(-2 * devices // ROW) * ROW
    row = jnp.zeros((*value.shape, width), jnp.float32)
    row = lax.dynamic_update_slice_in_dim(row, jnp.moveaxis(pair, 0, -1), 2 * rank, axis=-1)
    pairs = all_reduce(row, AXIS, peers)[..., : 2 * devices]
    best, value = largest(pairs[..., 1::2])
    return jnp.take_along_axis(pairs[..., ::2], best[..., None], axis=-1)[..., 0].astype(jnp.int32), value
