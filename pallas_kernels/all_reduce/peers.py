"""Memory of each device that all devices of a process write to, and where it lies."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from pallas_kernels.all_reduce.words import EMPTY, THREADS

ONE_SHOT_ROWS = 32  # up to so many, every device sends every row to every other; a second hop would cost more
MOST_ROWS = 256  # of one call; what is longer is the library's, which wins then
TURNS = 3  # copies of each mailbox: of this call, of the one before, which is emptied, and an empty one
_GRAIN = 16 * THREADS  # bytes that the threads of a row write at a time: rows of mailboxes are a multiple of it
_HEADER = 4 * 2 * MOST_ROWS  # bytes: whose turn it is, for each row of both kinds of calls


def reach_each_other(devices: Sequence[jax.Device]) -> bool:
    """Whether they are NVIDIA GPUs of this process whose memory each of them can read and write.

    JAX opens it to all of them where CUDA says that it can be.
    """
    if any(d.platform != "gpu" or d.process_index != jax.process_index() for d in devices):
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    numbers = [d.local_hardware_id for d in devices]
    answer = ctypes.c_int(0)
    for one, other in itertools.permutations(numbers, 2):
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), one, other) != 0 or not answer.value:
            return False
    return True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Peers:
    """The mailboxes of all devices.

    On each device lie, behind a word for each row that counts turns, mailboxes of ``row_bytes`` for each row, turn and
    sender: those of calls of few rows, then those of calls of more, which have one sender more (the sum's).

    Attributes:
        table: of each of W devices its rank, and the addresses of the memory of all, low words and high words.
        memory: of each device; nobody reads it as an array, it is here to stay.
        row_bytes: of the longest row.
    """

    table: UInt32[Array, "W 2*W+1"]
    memory: UInt32[Array, "W _"]
    row_bytes: int = field(metadata={"static": True})

    @staticmethod
    def of(mesh: Mesh, row_bytes: int) -> Peers:
        """Mailboxes on the devices of a mesh with one axis, all of one process and able to reach each other's memory.

        Args:
            mesh: of W devices.
            row_bytes: of the longest row that will be sent.
        """
        row_bytes = -(-row_bytes // _GRAIN) * _GRAIN
        size, (axis,) = mesh.size, mesh.axis_names
        split = NamedSharding(mesh, PartitionSpec(axis))
        words = Peers.bytes_of(size, row_bytes) // 4

        def empty() -> Array:
            return jnp.full((size, words), EMPTY, jnp.uint32).at[:, : _HEADER // 4].set(0)

        memory = jax.block_until_ready(jax.jit(empty, out_shardings=split)())
        shards = sorted(memory.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        addresses = np.array([shard.data.unsafe_buffer_pointer() for shard in shards], np.uint64)
        low, high = (addresses & 0xFFFFFFFF).astype(np.uint32), (addresses >> 32).astype(np.uint32)
        table = np.stack([np.concatenate([[rank], low, high]).astype(np.uint32) for rank in range(size)])
        return Peers(jax.device_put(table, split), memory, row_bytes)

    @staticmethod
    def bytes_of(devices: int, row_bytes: int) -> int:
        """About what the mailboxes take of the memory of each device."""
        rows = ONE_SHOT_ROWS * devices + MOST_ROWS * (devices + 1)
        return _HEADER + TURNS * rows * row_bytes

    @property
    def header_bytes(self) -> int:
        """In front of the mailboxes."""
        return _HEADER
