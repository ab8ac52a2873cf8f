"""Where arrays live: which of their letters are split over the devices of axis `tp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dflash_jax.base.errors import ConfigError
from pallas_kernels import Peers
from pallas_kernels.all_reduce import reach_each_other

SPLIT = ("N", "K", "E", "F", "V")  # query heads, kv heads, parts of the mlp width, all of it, vocabulary
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Mesh:
    """Tensor parallelism over the first devices of this process."""

    mesh: jax.sharding.Mesh

    @staticmethod
    def of(tensor_parallel_size: int) -> Mesh:
        """A mesh of that many devices.

        Raises:
            ConfigError: there are fewer devices.
        """
        devices = jax.devices()
        if tensor_parallel_size > len(devices):
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} but JAX sees {len(devices)} {devices[0].platform} "
                "device(s); lower it or make more devices visible."
            )
        return Mesh(
            jax.make_mesh(
                (tensor_parallel_size,), ("tp",), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size]
            )
        )

    @property
    def is_accelerator(self) -> bool:
        """Whether its devices are not the host's own processors."""
        return self.mesh.devices.flat[0].platform != "cpu"

    @property
    def is_cpu(self) -> bool:
        """Whether the host's processors are its one device; several, as tests have them, stand for accelerators."""
        return self.mesh.size == 1 and not self.is_accelerator

    def place(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Split an array on its first letter that can be split evenly; else keep it whole on every device."""
        size = self.mesh.size
        spec: list[str | None] = [None] * len(axes)
        for i, (letter, length) in enumerate(zip(axes, shape, strict=True)):
            if letter in SPLIT and length % size == 0:
                spec[i] = "tp"
                break
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def peers(self, row_bytes: int) -> Peers | None:
        """Mailboxes for rows of so many bytes, where several devices can reach each other's memory."""
        devices = list(self.mesh.devices.flat)
        return Peers.of(self.mesh, row_bytes) if len(devices) > 1 and reach_each_other(devices) else None

    def replicate(self, tree: Tree) -> Tree:
        """Put a tree of arrays whole on every device."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
