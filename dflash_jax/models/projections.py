"""Matrix products of layers on the devices that share a model, with what follows each in the same kernel.

The weight's format decides how it multiplies (`weights.formats.protocol.Weight`), the mesh what is split. On one device
`Devices.on_each` calls the function as it is; on several, each device multiplies its own part of the weight.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.parallel.collectives import Devices, argmax_over_devices
from dflash_jax.parallel.mesh import AXIS, SPLIT_FIRST, WHOLE
from dflash_jax.weights.formats.protocol import QuantizedRows, Rows, Weight
from dflash_jax.weights.formats.weight import flat_rows, project, project_both, weight_of
from pallas_kernels import add_norm, all_reduce_add_norm, gated


def project_add_norm(
    x: Float[Array, "B T D"],
    inputs: Float[Array, "B T *I"] | QuantizedRows,
    weight: Array | Weight,
    bias: Float[Array, " D"] | None,
    norm: Float[Array, " D"],
    eps: float,
    devices: Devices,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
    """Add the projection to the residual stream, then RMS-norm it.

    On one device, weights that want quantised rows get the normed output quantised.

    Args:
        x: residual stream.
        inputs: attention heads [B, T, N, H], or the hidden units of an MLP [B, T, F]; N or F is split over the devices
            where it divides evenly.
        weight: [D, *I], split likewise.
        bias: bias of the projection.
        norm: weight of the norm.
        eps: epsilon of the norm.
        devices: where it runs.

    Returns:
        The new residual stream, and its norm.
    """
    weight = weight_of(weight)
    parts = weight.shard(1, AXIS) if devices.share(inputs.shape[2]) else None
    quantize = bias is None and devices.is_single and weight.wants_quantized_rows

    def on_each(x, inputs, weight, bias, norm, peers):
        y, scales = _product(inputs, weight, bias, is_part=parts is not None, devices=devices)
        if parts is not None:
            return all_reduce_add_norm(x, y, norm, eps, AXIS, peers)
        added, normed = add_norm(x, y, norm, eps, scales, quantize=quantize, implementation=devices.implementation)
        return added, QuantizedRows(normed[0], normed[1], x.dtype) if quantize else normed

    specs = (WHOLE, WHOLE, WHOLE) if parts is None else (WHOLE, PartitionSpec(None, None, AXIS), parts)
    function = devices.on_each(on_each, (*specs, WHOLE, WHOLE, SPLIT_FIRST), WHOLE)
    added, normed = function(x, inputs, weight, bias, norm, devices.peers)
    return added, normed


def _product(
    inputs: Float[Array, "B T *I"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, " D"] | None,
    *,
    is_part: bool,
    devices: Devices,
) -> tuple[Array, tuple[Array, Array] | None]:
    """The product for `add_norm` and its scales; of the parts of a sum, the first device's alone has the bias."""
    kernels = devices.is_single or (devices.has_kernels and weight.needs_kernels)
    if bias is None and kernels and not devices.is_single:  # the all-reduce takes a product in one part
        return weight.unscaled(flat_rows(inputs), kernels=True)
    if bias is None:
        return weight.split(flat_rows(inputs), kernels=kernels)
    y = project(inputs, weight, kernels=kernels)
    return jnp.where(lax.axis_index(AXIS) == 0, y + bias, y) if is_part else y + bias, None


def project_heads(
    x: Float[Array, "B T D"] | QuantizedRows,
    weight: Array | Weight,
    bias: Float[Array, "K J H"] | None,
    devices: Devices,
    *,
    is_narrow: bool = False,
) -> Float[Array, "B T K *J"]:
    """Project to heads, which are split over the devices where K divides evenly.

    Args:
        x: normed input.
        weight: [K, *J, D].
        bias: bias of the projection.
        devices: where it runs.
        is_narrow: whether the weight has so few rows that kernels multiply it faster than XLA on several devices, too.
    """
    weight = weight_of(weight)
    if devices.is_single or not (devices.has_kernels and (weight.needs_kernels or is_narrow)):
        return project(x, weight, bias, kernels=devices.is_single)
    parts = weight.shard(0, AXIS) if devices.share(weight.shape[0]) else None

    def on_each(x: Rows, weight: Weight, bias: Array | None) -> Array:
        return project(x, weight, bias, kernels=True)

    in_specs = (WHOLE, WHOLE, WHOLE) if parts is None else (WHOLE, parts, SPLIT_FIRST)
    out_specs = WHOLE if parts is None else PartitionSpec(None, None, AXIS)
    heads: Array = devices.on_each(on_each, in_specs, out_specs)(x, weight, bias)
    return heads


def project_beside(
    x: Float[Array, "B T D"] | QuantizedRows, weight: Array | Weight, narrow: Array | Weight, devices: Devices
) -> tuple[Float[Array, "B T K *J"], Float[Array, "B T K *L"]]:
    """`project_heads` by a weight [K, *J, D], and by another of few rows [K, *L, D], in one kernel where it can be."""
    weight, narrow = weight_of(weight), weight_of(narrow)
    if not (devices.is_single or (devices.has_kernels and weight.needs_kernels)):
        return project_heads(x, weight, None, devices), project_heads(x, narrow, None, devices, is_narrow=True)
    matrices = weight, narrow
    parts = [matrix.shard(0, AXIS) if devices.share(matrix.shape[0]) else None for matrix in matrices]
    in_specs = (WHOLE, *(WHOLE if part is None else part for part in parts))
    out_specs = tuple(WHOLE if part is None else PartitionSpec(None, None, AXIS) for part in parts)
    projected: tuple[Array, Array] = devices.on_each(project_both, in_specs, out_specs)(x, *matrices)
    return projected


def project_whole(
    x: Float[Array, "B T C"] | QuantizedRows, weight: Array | Weight, devices: Devices
) -> Float[Array, "B T D"]:
    """Project by a weight [D, C] that no device holds a part of: each device that has kernels multiplies all of it."""
    weight = weight_of(weight)
    if not (devices.has_kernels and weight.needs_kernels):
        return project(x, weight)

    def on_each(x: Rows, weight: Weight) -> Array:
        return project(x, weight, kernels=True)

    projected: Array = devices.on_each(on_each, (WHOLE, WHOLE), WHOLE)(x, weight)
    return projected


def project_swiglu(
    x: Float[Array, "B T D"] | QuantizedRows,
    weight: Array | Weight,
    bias: Float[Array, "E 2 I"] | None,
    devices: Devices,
) -> Float[Array, "B T F"] | QuantizedRows:
    """Hidden units of an MLP, silu(gate) * up, split over the devices where E divides evenly.

    Weights that want quantised rows give them quantised on one device.

    Args:
        x: normed input.
        weight: gate and up, [E, 2, I, D] with F = E I.
        bias: bias of both.
        devices: where it runs.
    """
    weight = weight_of(weight)
    parts = weight.shard(0, AXIS) if devices.share(weight.shape[0]) else None

    def on_each(x: Rows, weight: Weight, bias: Array | None) -> Rows:
        if bias is not None:
            return gated(project(x, weight, bias))
        return weight.gated(x, kernels=devices.has_kernels)

    in_specs = (WHOLE, WHOLE, WHOLE) if parts is None else (WHOLE, parts, SPLIT_FIRST)
    out_specs = WHOLE if parts is None else PartitionSpec(None, None, AXIS)
    hidden: Array | QuantizedRows = devices.on_each(on_each, in_specs, out_specs)(x, weight, bias)
    return hidden


def likeliest_product(
    hidden: Float[Array, "B T D"] | QuantizedRows,
    head: Array | Weight,
    devices: Devices,
    length: Int[Array, ""] | None = None,
    limit: int | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Argmax of a head's logits, and its logit, where possible without keeping the logits.

    With an fp8 head, kernels give the logit without the scale of its token.

    Args:
        hidden: final hidden states, normed.
        head: [V, D], split over the devices where V divides evenly.
        devices: where it runs.
        length: only the first `length` of the B * T rows are wanted, int32; results of the others are undefined.
        limit: only the first `limit` rows of the head count, the others are padding; None is all.
    """
    head = weight_of(head)
    parts = head.shard(0, AXIS) if devices.share(head.shape[0]) else None

    def on_each(hidden, head, length, peers):
        here = limit if limit is None or parts is None else limit - lax.axis_index(AXIS) * head.shape[0]
        token, value = head.largest(hidden, length, here, kernels=devices.has_kernels)
        return (token, value) if parts is None else argmax_over_devices(token, value, head.shape[0], peers)

    in_specs = (WHOLE, WHOLE if parts is None else parts, WHOLE, SPLIT_FIRST)
    token, value = devices.on_each(on_each, in_specs, WHOLE)(hidden, head, length, devices.peers)
    return token, value
