"""The mesh: which devices share a model, and which axes of arrays are split over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dflash_jax.base.errors import ConfigError
from pallas_kernels import Peers
from pallas_kernels.all_reduce import reach_each_other

AXIS = "tp"  # the mesh axis of tensor parallelism
WHOLE, SPLIT_FIRST = PartitionSpec(), PartitionSpec(AXIS)

# Axes that may be split: query heads, kv heads, parts of the mlp width, all of it, vocabulary, heads of Gated DeltaNet,
# the width of each expert, which leaves no device idle whatever the router chooses, and that of the shared expert.
SPLIT = ("N", "K", "E", "F", "V", "HK", "M", "SE", "SF")

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Mesh:
    """Tensor parallelism over devices of this process; hashable, so that compiled steps can be keyed by it.

    On a mesh of one device nothing is split, and `on_each` gives the function itself: programs for one device contain
    neither `shard_map` nor collectives.

    Attributes:
        devices: JAX's mesh, with the one axis `AXIS`.
    """

    devices: jax.sharding.Mesh

    @staticmethod
    def of(tensor_parallel_size: int) -> Mesh:
        """The first `tensor_parallel_size` devices.

        Raises:
            ConfigError: JAX sees fewer devices.
        """
        devices = jax.devices()
        if tensor_parallel_size > len(devices):
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} but JAX sees {len(devices)} {devices[0].platform} "
                "device(s); lower it or make more devices visible."
            )
        return Mesh(
            jax.make_mesh(
                (tensor_parallel_size,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size]
            )
        )

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices.size

    @property
    def platform(self) -> str:
        """JAX's name of the kind of the devices: "cpu", "gpu" or "tpu"."""
        return str(self.devices.devices.flat[0].platform)

    @property
    def is_accelerator(self) -> bool:
        """Whether the devices are GPUs or TPUs."""
        return self.platform != "cpu"

    @property
    def is_cpu(self) -> bool:
        """Whether the one device is a CPU; several CPU devices (tests have them) stand for accelerators."""
        return self.size == 1 and not self.is_accelerator

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that lies whole on every device."""
        return NamedSharding(self.devices, WHOLE)

    def share(self, length: int) -> bool:
        """Whether an axis of this length is split: there are several devices and it divides evenly."""
        return self.size > 1 and length % self.size == 0

    def place(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an array: split along its first axis that may be split and divides evenly, else whole.

        Args:
            axes: the letter of each axis.
            shape: its length.
        """
        spec: list[str | None] = [None] * len(axes)
        for i, (letter, length) in enumerate(zip(axes, shape, strict=True)):
            if letter in SPLIT and length % self.size == 0:
                spec[i] = AXIS
                break
        return NamedSharding(self.devices, PartitionSpec(*spec))

    def replicate(self, tree: Tree) -> Tree:
        """Put a tree of arrays whole on every device."""
        return jax.device_put(tree, self.whole)

    def peers(self, row_bytes: int) -> Peers | None:
        """Mailboxes for rows of up to `row_bytes` bytes; None unless several devices reach each other's memory."""
        devices = list(self.devices.devices.flat)
        return Peers.of(self.devices, row_bytes) if len(devices) > 1 and reach_each_other(devices) else None

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function as each device runs it on its own part of the arguments; on one device, the function itself."""
        if self.size == 1:
            return function
        return jax.shard_map(function, mesh=self.devices, in_specs=in_specs, out_specs=out_specs, check_vma=False)
