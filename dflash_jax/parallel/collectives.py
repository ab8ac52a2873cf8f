"""What devices that share a model must tell each other: parts of sums, and who has the likeliest token.

All of it goes through the kernels' all-reduce, so that a program of ours leaves nothing for XLA to reduce between
devices: the library's collectives would cut it into pieces that the host launches one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.weights.formats.fp8 import Quantized, QuantizedRows
from dflash_jax.weights.formats.transposed import Transposed
from dflash_jax.weights.formats.weight import Weight, logits_of, project
from pallas_kernels import (
    Peers,
    add_norm,
    all_reduce,
    all_reduce_add_norm,
    gated,
    largest,
    largest_product,
    quantize_rows,
    split_product,
    swiglu,
)

ROW = 128  # float32 numbers: the least that the kernel sums


@dataclass(frozen=True)
class Devices:
    """Those that share a model, by axis `tp` of their mesh, and the mailboxes that they have on GPUs."""

    mesh: Mesh
    peers: Peers | None = None

    def share(self, length: int) -> bool:
        """Whether an axis of this length is split over them."""
        return self.mesh.size > 1 and length % self.mesh.size == 0


def project_add_norm(
    x: Float[Array, "B T D"],
    inputs: Float[Array, "B T *I"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, " D"] | None,
    norm: Float[Array, " D"],
    eps: float,
    devices: Devices | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
    """X plus the projected inputs, and the same normed; quantised, too, where all that follows is, on one device.

    Args:
        x: the residual stream.
        inputs: heads, or the hidden units of an MLP; split over the devices where their number divides.
        weight: [D, *I], split likewise.
        bias: of the projection.
        norm: weight of the norm.
        eps: of the norm.
        devices: run kernels, which serve and know no gradients; None gives what can be trained, and split by XLA.
    """
    if devices is not None and isinstance(weight, Quantized) and weight.is_whole and bias is None:
        tokens = inputs if isinstance(inputs, QuantizedRows) else inputs.reshape(*x.shape[:2], -1)
        y, of_token, of_output = weight.raw_product(tokens, x.dtype, is_added=True)
        added, (values, scales) = add_norm(x, y, norm, eps, (of_token, of_output), quantize=True)
        return added, QuantizedRows(values, scales, x.dtype)
    assert not isinstance(inputs, QuantizedRows)
    if devices is None:
        return add_norm(x, project(inputs, weight, bias), norm, eps, implementation="reference")
    if devices.mesh.size == 1:
        if bias is None and isinstance(weight, Array):
            width = math.prod(inputs.shape[2:])
            y = split_product(inputs.reshape(*x.shape[:2], width), weight.reshape(len(weight), width))
        else:
            y = project(inputs, weight, bias, alone=True)
        return add_norm(x, y, norm, eps)
    is_split = devices.share(inputs.shape[2])

    leaves, form = jax.tree.flatten(weight)  # a weight may be several arrays

    def on_each(x, inputs, leaves, bias, norm, peers):
        weight = jax.tree.unflatten(form, leaves)
        if not is_split:
            return add_norm(x, project(inputs, weight, bias), norm, eps)
        y = project(inputs, weight)
        if bias is not None:
            y = jnp.where(lax.axis_index("tp") == 0, y + bias, y)
        return all_reduce_add_norm(x, y, norm, eps, "tp", peers)

    whole, split = PartitionSpec(), PartitionSpec("tp")
    of_leaves = [PartitionSpec(None, "tp") if is_split and leaf.ndim > 1 else whole for leaf in leaves]
    of_inputs = PartitionSpec(None, None, "tp") if is_split else whole
    in_specs = (whole, of_inputs, of_leaves, whole, whole, split)
    function = jax.shard_map(on_each, mesh=devices.mesh, in_specs=in_specs, out_specs=whole, check_vma=False)
    added, normed = function(x, inputs, leaves, bias, norm, devices.peers)
    return added, normed


def project_swiglu(
    x: Float[Array, "B T D"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, "E 2 I"] | None,
    devices: Devices | None,
) -> Float[Array, "B T F"] | QuantizedRows:
    """The hidden units of an MLP, split over the devices where their parts are; of one device's quantised MLP so, too.

    Args:
        x: what goes into it, normed.
        weight: of gate and up, [E, 2, I, D].
        bias: of both.
        devices: as for `project_add_norm`.
    """
    if devices is not None and isinstance(weight, Quantized) and weight.is_whole and bias is None:
        return weight.gated_product(x)
    if devices is None or bias is not None or isinstance(weight, Quantized | Transposed):
        return gated(project(x, weight, bias))
    assert not isinstance(x, QuantizedRows)
    if devices.mesh.size == 1:
        return swiglu(x, weight)
    is_split, whole = devices.share(len(weight)), PartitionSpec()
    in_specs = (whole, PartitionSpec("tp") if is_split else whole)
    out_specs = PartitionSpec(None, None, "tp") if is_split else whole
    function = jax.shard_map(swiglu, mesh=devices.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    hidden: Array = function(x, weight)
    return hidden


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "B T"], devices: Devices | None) -> Float[Array, "B T D"]:
    """Rows of a table that is split over the devices where its length divides."""
    if devices is None or not devices.share(len(table)):
        return table[tokens]

    def on_each(table, tokens, peers):
        own = tokens - lax.axis_index("tp") * len(table)
        is_own = (own >= 0) & (own < len(table))
        rows = table.at[own].get(mode="clip")
        return all_reduce(jnp.where(is_own[..., None], rows, 0), "tp", peers)

    whole, split = PartitionSpec(), PartitionSpec("tp")
    function = jax.shard_map(
        on_each, mesh=devices.mesh, in_specs=(split, whole, split), out_specs=whole, check_vma=False
    )
    rows: Array = function(table, tokens, devices.peers)
    return rows


def likeliest(logits: Float[Array, "B T V"], devices: Devices | None) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The token of the largest float32 logit of each row, the first of several, and that logit; NaN is the largest."""
    if devices is None or not devices.share(logits.shape[-1]):
        return largest(logits)

    def on_each(logits: Array, peers: Peers | None) -> tuple[Array, Array]:
        return _over_all(*largest(logits), logits.shape[-1], peers)

    specs = (PartitionSpec(None, None, "tp"), PartitionSpec("tp"))
    function = jax.shard_map(on_each, mesh=devices.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    token, value = function(logits, devices.peers)
    return token, value


def likeliest_product(
    hidden: Float[Array, "B T D"] | QuantizedRows,
    head: Weight,
    devices: Devices | None,
    length: Int[Array, ""] | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The same of the logits that a head [V, D] gives, which need not be kept; of an fp8 head the logits are scaled.

    Args:
        hidden: after the last norm.
        head: split over the devices where its length divides.
        devices: as for `project_add_norm`.
        length: of the B * T rows the first so many are wanted; what is found for the others is anything.
    """
    if isinstance(hidden, QuantizedRows):
        assert isinstance(head, Quantized)
        return largest_product(hidden.values, head.values, head.scales, length)
    if devices is None or isinstance(head, Transposed):
        return likeliest(logits_of(hidden, head), devices)
    is_split, whole = devices.share(head.shape[0]), PartitionSpec()
    leaves, form = jax.tree.flatten(head)

    def on_each(hidden, leaves, length, peers):
        head = jax.tree.unflatten(form, leaves)
        if isinstance(head, Quantized):
            found = largest_product(quantize_rows(hidden)[0], head.values, head.scales, length)
        else:
            found = largest_product(hidden, head, length=length)
        return _over_all(*found, head.shape[0], peers) if is_split else found

    if devices.mesh.size == 1:
        return on_each(hidden, leaves, length, None)
    in_specs = (whole, PartitionSpec("tp") if is_split else whole, whole, PartitionSpec("tp"))
    function = jax.shard_map(on_each, mesh=devices.mesh, in_specs=in_specs, out_specs=whole, check_vma=False)
    token, value = function(hidden, leaves, length, devices.peers)
    return token, value


def _over_all(
    token: Int[Array, "B T"], value: Float[Array, "B T"], size: int, peers: Peers | None
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """What all devices of axis `tp` found in parts of that size: each has a place in a sum, where others have zeros."""
    rank, devices = lax.axis_index("tp"), lax.axis_size("tp")
    own = jnp.stack([(rank * size + token).astype(jnp.float32), value])  # exact below 2**24
    width = -(-2 * devices // ROW) * ROW
    row = jnp.zeros((*value.shape, width), jnp.float32)
    row = lax.dynamic_update_slice_in_dim(row, jnp.moveaxis(own, 0, -1), 2 * rank, axis=-1)
    found = all_reduce(row, "tp", peers)[..., : 2 * devices]
    best, value = largest(found[..., 1::2])
    return jnp.take_along_axis(found[..., ::2], best[..., None], axis=-1)[..., 0].astype(jnp.int32), value
