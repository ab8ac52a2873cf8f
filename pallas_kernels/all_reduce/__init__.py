"""Sums over devices inside a ``shard_map``, for the few rows of a layer's output that each device has a part of."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.add_norm import add_norm, check
from pallas_kernels.all_reduce.peers import Peers, reach_each_other
from pallas_kernels.registry import HOPPER_ON

Implementation = Literal["mosaic", "library"]

__all__ = ["ALL_REDUCE", "ALL_REDUCE_ADD_NORM", "Peers", "all_reduce", "all_reduce_add_norm", "reach_each_other"]


def _operation(name: str) -> registry.Operation:
    kernel = registry.Implementation(
        "mosaic", f"pallas_kernels.all_reduce.mosaic:{name}", HOPPER_ON, slower="slower", refusal="refusal"
    )
    return registry.Operation(name, (kernel, registry.Implementation("library", "jax.lax:psum")))


ALL_REDUCE, ALL_REDUCE_ADD_NORM = _operation("all_reduce"), _operation("all_reduce_add_norm")  # a call is (y, peers)


def all_reduce(
    y: Float[Array, "*T D"], axis: str, peers: Peers | None, *, implementation: Implementation | None = None
) -> Float[Array, "*T D"]:
    """The sum of every device's ``y``, on every device.

    Args:
      y: any number of rows (any leading axes); f32, bf16 or f16.
      axis: of the mesh; the sum is over its devices.
      peers: mailboxes of these devices, which the Mosaic kernel needs; inside a ``shard_map`` that splits its arrays
        over the axis. Calls that share them must depend on each other's results, so that they cannot overlap.
      implementation: ``"mosaic"``, or ``"library"``: XLA's, which is NCCL on GPUs. None picks Mosaic for up to 256 rows
        where there are mailboxes.

    Raises:
      ValueError: Mosaic without mailboxes, or rows that are not floating.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: one shot and two shots, and data that are their own flag, as in vLLM's and TensorRT-LLM's all-reduce.
    """
    chosen = _pick(ALL_REDUCE, y, peers, implementation)
    if chosen.name == "library":
        return jax.lax.psum(y, axis)
    total: Array = chosen.load()(y, peers)
    return total


def all_reduce_add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    eps: float,
    axis: str,
    peers: Peers | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """``add_norm`` of x and the sum of every device's ``y``: ``(x + sum, rms_norm(x + sum, weight, eps))``.

    Args:
      x: the residual stream, equal on every device.
      y: this device's part of a block's output.
      weight: of the norm.
      eps: of the norm.
      axis: as for ``all_reduce``.
      peers: as for ``all_reduce``.
      implementation: as for ``all_reduce``; the library's is followed by ``add_norm``.

    Raises:
      ValueError: Mosaic without mailboxes, or shapes that do not belong together.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.
    """
    check(x, y, weight)
    chosen = _pick(ALL_REDUCE_ADD_NORM, y, peers, implementation)
    if chosen.name == "library":
        return add_norm(x, jax.lax.psum(y, axis), weight, eps)
    total, normed = chosen.load()(x, y, weight, eps, peers)
    return total, normed


def _pick(
    operation: registry.Operation, y: Any, peers: Peers | None, implementation: Implementation | None
) -> registry.Implementation:
    if not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError(f"y must be floating; got {y.dtype}")
    if implementation == "mosaic" and peers is None:
        raise ValueError("the Mosaic all-reduce needs mailboxes: peers=Peers.of(mesh, row_bytes)")
    return operation.pick(implementation, (y, peers))
