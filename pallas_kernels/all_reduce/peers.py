"""Memory of each device that all devices of a process write to, and its addresses."""

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

THREADS = 128  # of the warpgroup that takes a row
EMPTY = 0xFFFFFFFF  # fills empty mailboxes, and nobody sends it: so memory itself tells what has arrived
ONE_SHOT_ROWS = 32  # of one call; up to so many every device sends every row to every other: a second hop costs more
PAIR = 2  # so many devices send as many bytes in one shot as in two, so it is one for all rows
MAX_ROWS = 256  # of one call; with more NCCL is faster
TURNS = 3  # copies of each mailbox: one for this call, one for the call before, which this call empties, and one empty
_GRAIN = 16 * THREADS  # bytes that the threads of a row write at a time; rows of mailboxes are a multiple of it
_HEADER = 4 * 2 * MAX_ROWS  # bytes: a counter of turns for each row of one-shot and of two-shot calls


def one_shot_rows(devices: int) -> int:
    """Rows up to which a call of so many devices takes one shot."""
    return MAX_ROWS if devices == PAIR else ONE_SHOT_ROWS


def reach_each_other(devices: Sequence[jax.Device]) -> bool:
    """Whether the devices are NVIDIA GPUs of this process that can read and write each other's memory.

    JAX gives them access wherever CUDA says that it is possible.
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

    The memory of each device holds a word for each row that counts turns, and then a mailbox of ``row_bytes`` for each
    row, turn and sender: first those of one-shot calls, then those of two-shot calls, which have one sender more, for
    the sum.

    Attributes:
        table: for each of W devices its rank, and the addresses of all devices' memory: W low words, W high words.
        memory: of each device; nobody reads the array, but it must stay alive.
        row_bytes: size of the longest row.
    """

    table: UInt32[Array, "W 2*W+1"]
    memory: UInt32[Array, "W _"]
    row_bytes: int = field(metadata={"static": True})

    @staticmethod
    def of(mesh: Mesh, row_bytes: int) -> Peers:
        """Mailboxes on the devices of a mesh with one axis, for which `reach_each_other` must hold.

        Args:
            mesh: of W devices.
            row_bytes: size of the longest row that will be sent.
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
        """Bytes of each device's memory that the mailboxes take; ``row_bytes`` is not rounded up here."""
        rows_of_two_shots = MAX_ROWS if one_shot_rows(devices) < MAX_ROWS else 0
        rows = one_shot_rows(devices) * devices + rows_of_two_shots * (devices + 1)
        return _HEADER + TURNS * rows * row_bytes

    @property
    def header_bytes(self) -> int:
        """Size of the counters in front of the mailboxes."""
        return _HEADER
