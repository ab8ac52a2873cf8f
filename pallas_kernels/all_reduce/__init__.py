"""Sums over devices inside a ``shard_map``: of what each device has of a layer's output, few rows at a time."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.add_norm import add_norm, check
from pallas_kernels.all_reduce import mosaic
from pallas_kernels.all_reduce.peers import Peers, reach_each_other

Implementation = Literal["mosaic", "library"]

__all__ = ["Peers", "all_reduce", "all_reduce_add_norm", "reach_each_other"]


def all_reduce(
    y: Float[Array, "*T D"], axis: str, peers: Peers | None, *, implementation: Implementation | None = None
) -> Float[Array, "*T D"]:
    """The sum of every device's ``y``, on every device.

    Args:
      y: any number of rows (any leading axes); f32, bf16 or f16.
      axis: of the mesh, over whose devices is summed.
      peers: mailboxes of these devices, which the Mosaic kernel needs; inside a ``shard_map`` that splits its arrays
        over the axis. Calls that share them must depend on each other's results, so that they cannot overlap.
      implementation: ``"mosaic"``, or ``"library"``: XLA's, which is NCCL on GPUs. None picks Mosaic for up to 256 rows
        where there are mailboxes.

    Raises:
      ValueError: Mosaic without mailboxes.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: one shot and two shots as in vLLM's and TensorRT-LLM's all-reduce; data that are their own flag as there.
    """
    if _is_mosaic(y, peers, implementation):
        assert peers is not None
        return mosaic.all_reduce(y, peers)
    return jax.lax.psum(y, axis)


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
      x: the residual stream, the same on every device.
      y: a device's part of what a block adds to it.
      weight: of the norm.
      eps: of the norm.
      axis: as of ``all_reduce``, like what follows.
      peers: mailboxes.
      implementation: the library's is followed by ``add_norm``.

    Raises:
      ValueError: Mosaic without mailboxes, or shapes that do not belong together.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    check(x, y, weight)
    if _is_mosaic(y, peers, implementation):
        assert peers is not None
        return mosaic.all_reduce_add_norm(x, y, weight, eps, peers)
    return add_norm(x, jax.lax.psum(y, axis), weight, eps)


def _is_mosaic(y: Any, peers: Peers | None, implementation: Implementation | None) -> bool:
    if implementation not in ("mosaic", "library", None):
        raise ValueError(f"implementation must be 'mosaic', 'library' or None; got {implementation!r}")
    if not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError(f"y must be floating; got {y.dtype}")
    if implementation == "mosaic" and peers is None:
        raise ValueError("the Mosaic all-reduce needs mailboxes: peers=Peers.of(mesh, row_bytes)")
    if implementation is None:
        capability = _compat.compute_capability()
        is_able = capability is not None and capability >= (9, 0)
        return is_able and peers is not None and y.size > 0 and mosaic.refusal(y, peers) is None
    return implementation == "mosaic"
