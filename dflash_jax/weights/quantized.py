"""Parameters made of quantised matrices: found among a checkpoint's tensors, joined or stacked, and put on devices."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.spec.quantization import Quantization
from dflash_jax.weights import packing
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.layouts import (
    E4M3,
    MIDDLE,
    SCALE_SUFFIXES,
    Matrix,
    Stored,
    compressed,
    fp8,
    packed_by_groups,
)
from dflash_jax.weights.parameters import Parameter, output_axes
from dflash_jax.weights.safetensors import TensorInfo
from dflash_jax.weights.tables import checkpoint_shape
from dflash_jax.weights.widened import Widened, of_eight_bits, of_four_bits
from pallas_kernels.quantized_product.layout import PLACES, PLACES_E4M3, span_of_group

Placement = Callable[[tuple[str, ...], tuple[int, ...]], Sharding | None]

Layout = Callable[[Mapping[str, TensorInfo], tuple[int, int], Quantization | None], Stored]


class _Packed(NamedTuple):
    """A packed matrix: how it is laid out, and its tensors by the last part of their names."""

    layout: Layout
    tensors: dict[str, TensorInfo]


# The tensor that shows a matrix to be packed, how such a matrix is read, and the other tensors that it may have.
PACKED: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "qweight": (packed_by_groups, ("qzeros", "scales", "g_idx")),
    "weight_packed": (compressed, ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")),
}

# Numbers of an fp8 matrix, 16 MiB in float32, up to which CPUs hold it in the dtype of the model. They have no fp8
# arithmetic: the embedded pair takes a fifth of the time so that it takes where each product widens its weight anew.
WIDENED = 1 << 22


def find_quantized(
    tensors: Mapping[str, TensorInfo],
    parameters: Iterable[Parameter],
    table: Mapping[str, str],
    config: TargetConfig | DraftConfig,
    *,
    on_cpu: bool,
) -> dict[str, Stored]:
    """The quantised matrices of a target, by the names that their tensors have in checkpoints that are not quantised.

    Each is what the file holds under its own name, whatever stands beside it or in the configuration. A drafter's are
    not kept so: it is trained and exported, and `--draft-quantization` makes it fp8 again. Nor are small ones in fp8 on
    CPUs (`WIDENED`), except experts, which are many, nor experts in fp8 among others that are not.
    """
    if isinstance(config, DraftConfig):
        return {}
    stored: dict[str, Stored] = {}
    for parameter in parameters:
        if not parameter.is_projection and not parameter.is_stacked:
            continue
        matrices = {}
        for name in parameter.parts:
            rows, *inputs = checkpoint_shape(table[name], config)
            matrix = _stored(tensors, name, (rows, math.prod(inputs)), config)
            if matrix is not None:
                matrices[name] = matrix
        if parameter.is_stacked:
            stored |= _of_one_format(parameter, matrices)
        else:
            stored |= {name: m for name, m in matrices.items() if not (on_cpu and m.is_fp8 and _size(m) <= WIDENED)}
    return stored


def find_widened(
    tensors: Mapping[str, TensorInfo],
    table: Mapping[str, str],
    kept: Mapping[str, Stored],
    config: TargetConfig | DraftConfig,
) -> dict[str, Widened]:
    """The packed matrices of a target that are not kept packed, by the names that they have at 16 bits."""
    if isinstance(config, DraftConfig):
        return {}
    widened: dict[str, Widened] = {}
    for name, axes in table.items():
        packed = None if name in tensors or name in kept else _packed(tensors, name)
        if packed is not None:
            rows, *inputs = checkpoint_shape(axes, config)
            arguments = packed.tensors, (rows, math.prod(inputs)), config.quantization
            widened[name] = of_eight_bits(*arguments) or of_four_bits(packed.layout(*arguments))
    return widened


def _packed(tensors: Mapping[str, TensorInfo], name: str) -> _Packed | None:
    """The packed matrix of this name; None if there is none."""
    base = name.removesuffix(".weight")
    for first, (layout, others) in PACKED.items():
        parts = {suffix: tensors[f"{base}.{suffix}"] for suffix in (first, *others) if f"{base}.{suffix}" in tensors}
        if first in parts:
            return _Packed(layout, parts)
    return None


def _size(matrix: Stored) -> int:
    return math.prod(matrix.shape)


def _of_one_format(parameter: Parameter, matrices: dict[str, Stored]) -> dict[str, Stored]:
    """The matrices of a layer's experts if all are quantised alike; of several formats, with the problem said."""
    packed = [name for name, matrix in matrices.items() if not matrix.is_fp8]
    if not packed:
        return matrices if len(matrices) == len(parameter.parts) else {}
    others = [name for name in parameter.parts if name not in packed]
    if others:
        first = matrices[packed[0]]
        info = next(iter(first.tensors.values()))
        problem = f"{info.file}: tensor {info.name!r} is packed, and {others[0]!r} is not, which must have its format"
        matrices[packed[0]] = replace(first, problems=(*first.problems, problem))
    return matrices


def _stored(
    tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, int], config: TargetConfig
) -> Stored | None:
    """The quantised matrix of this name; None if there is none."""
    info = tensors.get(name)
    if info is None:
        packed = _packed(tensors, name)
        if packed is None or of_eight_bits(packed.tensors, shape, config.quantization) is not None:
            return None
        return packed.layout(packed.tensors, shape, config.quantization)
    scale = next((tensors[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in tensors), None)
    if scale is None or info.dtype != E4M3 or info.shape != shape:
        return None
    return fp8(info, scale, shape, config.weight_block_size)


def uniform(parameter: Parameter, matrices: Mapping[str, Matrix]) -> list[Parameter]:
    """The parameter in as few pieces as hold one format each: neighbours that are not quantised, or that join."""
    pieces: list[list[str]] = []
    for name in parameter.parts:
        mine, before = matrices.get(name), matrices.get(pieces[-1][-1]) if pieces else None
        joins = mine is before if mine is None or before is None else mine.joins(before)
        if pieces and joins:
            pieces[-1].append(name)
        else:
            pieces.append([name])
    return [replace(parameter, parts={name: parameter.parts[name] for name in piece}) for piece in pieces]


def grouped(parameter: Parameter, matrices: Mapping[str, Matrix], place: Placement) -> Grouped:
    """A parameter of quantised matrices of one kind.

    Args:
        parameter: with the parts that are to be held, which all are among `matrices`.
        matrices: by the names of tensors; others are left out.
        place: gives the sharding of an array by its axes and shape.

    Raises:
        CheckpointError: its groups cannot be split as the devices split it.
    """
    mine = {name: matrices[name] for name in parameter.parts}
    rows, first = output_axes(parameter.axes), next(iter(mine.values()))
    sharding, devices = placed(place(parameter.axes, parameter.shape), rows, can_split=first.order is None)
    is_packed = first.zeros is not None
    group = _shared_group(mine, devices, PLACES if is_packed else 1)
    evened = {name: matrix.regrouped(group) for name, matrix in mine.items()}

    def joined(part: str) -> np.ndarray:
        return parameter.join_rows({name: getattr(matrix, part) for name, matrix in evened.items()}, rows)

    def put(array: np.ndarray) -> jax.Array:
        return jax.device_put(array, sharding)

    values, zeros = joined("values"), joined("zeros") if is_packed else None
    return Grouped(
        put(packing.to_words(values, span_of_group(group)) if is_packed else values),
        put(joined("scales")),
        zeros=None if zeros is None or (zeros == MIDDLE).all() else put(zeros),
        order=None if first.order is None else jax.device_put(first.order, _whole(sharding)),
        inner=parameter.shape[rows + 1 :],
    )


def stacked(parameter: Parameter, loaders: Mapping[str, Callable[[], Matrix]], place: Placement) -> Grouped:
    """The matrices of all experts of a layer, each read and packed by itself: never two copies of all in memory.

    Where devices split the inputs of a group, its scales are repeated for the parts.

    Args:
        parameter: [*leading, O, I] of `prod(leading)` matrices.
        loaders: reads each, by its name in errors; in the order of the stack.
        place: gives the sharding of an array by its axes and shape.

    Raises:
        CheckpointError: they are not of one kind, have an order of inputs, or cannot be split as the devices do.
    """
    *leading, outputs, inputs = parameter.shape
    rows = len(leading) + 1
    sharding, devices = placed(place(parameter.axes, parameter.shape), rows)
    names = list(loaders)
    first = loaders[names[0]]()
    is_packed = first.zeros is not None
    places, dtype, pack = (
        (PLACES, np.uint16, packing.to_words) if is_packed else (PLACES_E4M3, np.int16, packing.to_words_of_two)
    )
    group = _shared_group({names[0]: first}, devices, places)
    values = np.empty((len(names), outputs, inputs // places), dtype)
    scales = np.empty((len(names), outputs, inputs // group), first.scales.dtype)
    zeros = np.empty(scales.shape, np.uint8) if is_packed else None

    def fill(i: int) -> None:
        matrix = loaders[names[i]]() if i else first
        if matrix.order is not None or not matrix.joins(first) or matrix.group != first.group:
            raise CheckpointError(
                f"{names[i]} has another order of inputs, group size or dtype than experts of a layer can have beside "
                f"{names[0]}; quantise the model with desc_act=false and one format for all experts."
            )
        part = matrix.regrouped(group)
        values[i] = pack(part.values, span_of_group(group))
        scales[i] = part.scales
        if zeros is not None and part.zeros is not None:
            zeros[i] = part.zeros

    with ThreadPoolExecutor() as pool:  # NumPy lets go of the interpreter while it copies
        collections.deque(pool.map(fill, range(len(names))), maxlen=0)

    def put(array: np.ndarray) -> jax.Array:
        # Whoever does not wait reads on while transfers hold the arrays before: the host's memory would not do.
        return jax.block_until_ready(jax.device_put(array.reshape(*leading, outputs, -1), sharding))

    asymmetric = None if zeros is None or (zeros == MIDDLE).all() else put(zeros)
    return Grouped(put(values), put(scales), zeros=asymmetric)


def _shared_group(matrices: Mapping[str, Matrix], devices: int, places: int) -> int:
    """Inputs that share a scale in all matrices, on so many devices that split the inputs; `places` share a word.

    Raises:
        CheckpointError: kernels cannot unpack groups of so many.
    """
    first = next(iter(matrices.values()))
    group = math.gcd(first.inputs // devices, *(matrix.group for matrix in matrices.values()))
    if group % places:
        raise CheckpointError(
            f"{next(iter(matrices))}: {devices} devices get groups of {group} inputs, and {16 // places}-bit weights "
            f"need a multiple of {places}; lower tensor_parallel_size or pick a checkpoint with other groups."
        )
    return group


def placed(sharding: Sharding | None, rows: int, *, can_split: bool = True) -> tuple[Sharding | None, int]:
    """The sharding of [*O, ...] for a weight [*O, *I], and over how many devices the inputs are split.

    Args:
        sharding: of an array [*O, *I].
        rows: the number of axes of *O.
        can_split: whether inputs may be split.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding, 1
    axes: list[Any] = [*sharding.spec, *[None] * (rows + 1)][: rows + 1]
    if not can_split:
        axes[rows] = None
    devices = 1 if axes[rows] is None else sharding.mesh.shape[axes[rows]]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes)), devices


def _whole(sharding: Sharding | None) -> Sharding | None:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
