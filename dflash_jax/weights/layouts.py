"""Quantised matrices as checkpoints store them: which tensors each has, their shapes, and what they hold.

A layout reads its tensors as a `Matrix`, whose rows are the outputs and whose numbers are still packed: nothing is
dequantised. Layouts: GPTQ's (AutoRound's, too), AWQ's, compressed-tensors' `pack-quantized`, and fp8 with scales of the
whole, of rows or of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec.quantization import Quantization
from dflash_jax.weights import packing
from dflash_jax.weights.safetensors import TensorInfo

E4M3 = np.dtype(jnp.float8_e4m3fn)
INT32 = np.dtype(np.int32)
ROUNDED_GROUP = 128  # inputs that share a scale where matrices are quantised at load
MIDDLE = 8  # the zero point of symmetric 4-bit numbers
USUAL_BLOCK = (128, 128)  # rows and columns that share a scale in DeepSeek's and Qwen's files
SCALE_SUFFIXES = ("_scale", "_scale_inv")  # the second is DeepSeek's and Qwen's name of a factor, not of its inverse

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix [O, I]: (number - zero point) * scale.

    Attributes:
        values: 4-bit numbers as rows of pairs (`packing`), or e4m3 numbers [O, I].
        scales: [O, G], in the dtype of the file; I / G inputs share one.
        zeros: zero points [O, G] of 4-bit numbers, 0 to 16.
        order: which input each column multiplies; None is its own number.
    """

    values: UInt8[np.ndarray, "O pairs"] | np.ndarray
    scales: Float[np.ndarray, "O G"]
    zeros: UInt8[np.ndarray, "O G"] | None
    order: Int[np.ndarray, " I"] | None

    @property
    def inputs(self) -> int:
        """I, the number of columns."""
        return int(self.values.shape[1]) * (2 if self.zeros is not None else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[1]

    def joins(self, other: Matrix) -> bool:
        """Whether the rows of both can stand in one matrix."""
        is_same_kind = (self.values.dtype, self.scales.dtype) == (other.values.dtype, other.scales.dtype)
        mine, others = (np.zeros(0) if order is None else order for order in (self.order, other.order))
        return is_same_kind and np.array_equal(mine, others)

    def dense(self) -> Float[np.ndarray, "O I"]:
        """The numbers that it stands for, in float32, a column for each input."""
        scales = np.repeat(self.scales.astype(np.float32), self.group, axis=1)
        if self.zeros is None:
            numbers = self.values.astype(np.float32)
        else:
            zeros = np.repeat(self.zeros.astype(np.float32), self.group, axis=1)
            numbers = packing.to_numbers(self.values).astype(np.float32) - zeros
        columns = slice(None) if self.order is None else np.argsort(self.order)
        return (numbers * scales)[:, columns]

    def regrouped(self, group: int) -> Matrix:
        """With a scale for each `group` inputs, a divisor of the present number: scales are repeated."""
        times = self.group // group
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=1)
        return replace(self, scales=np.repeat(self.scales, times, axis=1), zeros=zeros)


@dataclass(frozen=True)
class Stored:
    """A quantised matrix in a checkpoint.

    Attributes:
        tensors: its tensors by the last part of their names.
        shape: [O, I].
        problems: why its tensors do not fit each other or the configuration, a sentence each, without the full stop.
        load: reads it.
    """

    tensors: Mapping[str, TensorInfo]
    shape: tuple[int, int]
    problems: tuple[str, ...]
    load: Callable[[], Matrix]

    @property
    def is_fp8(self) -> bool:
        """Whether its numbers are e4m3, not packed."""
        return "weight" in self.tensors


def packed_by_groups(tensors: Mapping[str, TensorInfo], shape: tuple[int, int], config: Quantization | None) -> Stored:
    """A matrix of GPTQ's or AWQ's names: `qweight`, `qzeros`, `scales`, `g_idx`."""
    outputs, inputs = shape
    if config is None or config.packing is None:
        method = None if config is None else config.method
        sentence = f"is packed, but config.json has quant_method {method!r}, which says not how; restore its fields"
        return Stored(tensors, shape, (_problem(tensors["qweight"], sentence),), lambda: _unreachable())
    is_awq, groups = config.packing == "awq", groups_of(tensors, "scales", 0)
    expected: Shapes = {
        "qweight": (inputs, -(-outputs // 8)) if is_awq else (-(-inputs // 8), outputs),
        "qzeros": (groups, -(-outputs // 8)),
        "scales": (groups, outputs),
        "g_idx": (inputs,),
    }
    problems = shape_problems(
        tensors, expected, optional=("g_idx",), of=f"for 4 bits in {config.packing.upper()}'s packing"
    )
    group, problem = size_of_groups(tensors["qweight"], inputs, groups, config)
    unpack = packing.awq_to_numbers if is_awq else packing.words_to_numbers

    def load() -> Matrix:
        words = tensors["qweight"].load()
        pairs = packing.from_awq(words) if is_awq else packing.from_gptq(words)
        zeros = unpack(tensors["qzeros"].load())[:, :outputs].T + np.uint8(config.zero_offset)
        _check_symmetry(tensors["qzeros"], zeros, config)
        scales = np.ascontiguousarray(tensors["scales"].load().T)
        return _ordered(Matrix(pairs[:outputs, : inputs // 2], scales, zeros, None), group, tensors.get("g_idx"))

    return Stored(tensors, shape, (*problems, *problem), load)


def compressed(tensors: Mapping[str, TensorInfo], shape: tuple[int, int], config: Quantization | None) -> Stored:
    """A matrix of compressed-tensors' names: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx`."""
    outputs, inputs = shape
    groups = groups_of(tensors, "weight_scale", 1)
    expected: Shapes = {
        "weight_packed": (outputs, -(-inputs // 8)),
        "weight_scale": (outputs, groups),
        "weight_zero_point": (-(-outputs // 8), groups),
        "weight_g_idx": (inputs,),
        "weight_shape": (2,),
    }
    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")
    problems = shape_problems(tensors, expected, optional=optional, of="for 4 bits in compressed-tensors")
    group, problem = size_of_groups(tensors["weight_packed"], inputs, groups, config)

    def load() -> Matrix:
        if (said := tensors.get("weight_shape")) is not None and said.load().tolist() != list(shape):
            raise CheckpointError(
                f"{said.file}: {said.name!r} says {said.load().tolist()} of a weight {list(shape)}; download it again."
            )
        pairs = packing.from_compressed(tensors["weight_packed"].load(), inputs)
        scales = tensors["weight_scale"].load()
        zeros = np.full(scales.shape, MIDDLE, np.uint8)
        if (points := tensors.get("weight_zero_point")) is not None:
            zeros = packing.words_to_numbers(points.load().T)[:, :outputs].T
            _check_symmetry(points, zeros, config)
        return _ordered(Matrix(pairs, scales, zeros, None), group, tensors.get("weight_g_idx"))

    return Stored(tensors, shape, (*problems, *problem), load)


def fp8(weight: TensorInfo, scale: TensorInfo, shape: tuple[int, int], block: tuple[int, int] | None) -> Stored:
    """A matrix in e4m3 with scales."""
    misfit = _misfit(scale, shape, block)

    def load() -> Matrix:
        scales, group = row_scales(scale.load(), shape, block, scale)
        return _evened(Matrix(weight.load(), scales, None, None), group)

    return Stored({"weight": weight, "scale": scale}, shape, (misfit,) if misfit else (), load)


def rounded(weight: Float[np.ndarray, "O I"]) -> Matrix:
    """A matrix that is not quantised, rounded to e4m3 with a float32 scale for each row's groups of 128 inputs.

    The largest number of a group becomes the largest e4m3 number. Fewer inputs are a group where 128 divides them not.
    """
    group = math.gcd(weight.shape[1], ROUNDED_GROUP)
    groups = weight.astype(np.float32).reshape(len(weight), -1, group)
    largest = np.abs(groups).max(axis=2)
    scales = np.maximum(largest / np.float32(jnp.finfo(E4M3).max), np.finfo(np.float32).tiny)  # for groups of zeros
    return Matrix((groups / scales[..., None]).astype(E4M3).reshape(weight.shape), scales, None, None)


def rounded_int4(weight: Float[np.ndarray, "O I"]) -> Matrix:
    """A matrix that is not quantised, rounded to 4 bits with a float16 scale and a zero point for each 128 inputs.

    The range of a group, 0 included, is divided into 15 equal steps. Groups are smaller where 128 does not divide the
    inputs.
    """
    outputs, inputs = weight.shape
    group = math.gcd(inputs, ROUNDED_GROUP)
    values = np.empty((outputs, inputs // 2), np.uint8)
    scales = np.empty((outputs, inputs // group), np.float16)
    zeros = np.empty(scales.shape, np.uint8)

    def round_rows(rows: slice) -> None:
        groups = weight[rows].astype(np.float32).reshape(-1, inputs // group, group)
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scales[rows] = np.maximum((high - low) / 15, np.finfo(np.float16).tiny)
        steps = scales[rows].astype(np.float32)
        zeros[rows] = np.clip(np.rint(-low / steps), 0, 15)
        numbers = np.rint(groups / steps[..., None]) + zeros[rows][..., None]
        values[rows] = packing.to_pairs(np.clip(numbers, 0, 15).astype(np.uint8).reshape(len(groups), inputs))

    packing.by_rows(round_rows, outputs)
    return Matrix(values, scales, zeros, None)


def row_scales(
    scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None, info: TensorInfo
) -> tuple[np.ndarray, int]:
    """Scales of the whole tensor, of each row or of each block as scales of each row [O, G].

    Returns:
        The scales, and the number of inputs that share one; the last ones of a row may be fewer.

    Raises:
        CheckpointError: they fit neither.
    """
    rows, inputs = shape[0], math.prod(shape[1:])
    if misfit := _misfit(info, shape, block):
        raise CheckpointError(f"{misfit}.")
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), (rows, 1)), inputs
    if scale.size == rows and scale.shape[0] == rows:
        return scale.reshape(rows, 1), inputs
    block = block or USUAL_BLOCK
    return np.repeat(scale, block[0], axis=0)[:rows], min(block[1], inputs)


def _misfit(scale: TensorInfo, shape: tuple[int, ...], block: tuple[int, int] | None) -> str | None:
    """Why scales are neither those of the whole, nor of rows, nor of blocks; None if they are.

    Blocks are DeepSeek's where the configuration has none: that of a model in int4 says nothing of matrices in fp8.
    """
    rows, inputs = shape[0], math.prod(shape[1:])
    is_of_rows = math.prod(scale.shape) == 1 or (math.prod(scale.shape) == rows and scale.shape[0] == rows)
    sides = block or (USUAL_BLOCK if scale.name.endswith("_scale_inv") else None)
    blocks = None if sides is None or len(shape) != 2 else (-(-rows // sides[0]), -(-inputs // sides[1]))
    if is_of_rows or scale.shape == blocks:
        return None
    return _problem(
        scale,
        f"of shape {list(scale.shape)} fits neither the whole, nor the rows, nor the blocks {sides} of the weight "
        f"{list(shape)}; check weight_block_size in config.json",
    )


def dequantized(array: np.ndarray, scale: TensorInfo, block: tuple[int, int] | None) -> Float[np.ndarray, "..."]:
    """A tensor of numbers times its scales, in float32."""
    scales, group = row_scales(scale.load().astype(np.float32), array.shape, block, scale)
    matrix = array.reshape(len(array), -1).astype(np.float32)
    return (matrix * np.repeat(scales, group, axis=1)[:, : matrix.shape[1]]).reshape(array.shape)


def _problem(info: TensorInfo, sentence: str) -> str:
    return f"{info.file}: tensor {info.name!r} {sentence}"


def _unreachable() -> Any:
    raise AssertionError("a matrix with problems is never loaded")


def groups_of(tensors: Mapping[str, TensorInfo], name: str, axis: int) -> int:
    """The number of groups, which the scales show; 1 where they are absent or no matrix, which is said elsewhere."""
    info = tensors.get(name)
    return info.shape[axis] if info is not None and len(info.shape) == 2 else 1


def shape_problems(
    tensors: Mapping[str, TensorInfo], expected: Shapes, *, optional: tuple[str, ...], of: str
) -> tuple[str, ...]:
    """What is wrong with the tensors of a matrix, whose expected shapes are `of` a number of bits and a packing."""
    problems = []
    some = next(iter(tensors.values()))
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is None:
            if name not in optional:
                base = some.name.rpartition(".")[0]
                problems.append(f"{some.file}: tensor {f'{base}.{name}'!r} of shape {list(shape)} is missing")
            continue
        wants_floats = name.endswith(("scale", "scales"))
        if info.shape != shape:
            problems.append(_problem(info, f"should have shape {list(shape)} {of} and has {list(info.shape)}"))
        elif jnp.issubdtype(info.dtype, jnp.floating) != wants_floats or (
            not wants_floats and name != "weight_shape" and info.dtype != INT32
        ):
            wanted = "floats" if wants_floats else "int32"
            problems.append(_problem(info, f"should hold {wanted} and holds {info.dtype}"))
    return tuple(problems)


def size_of_groups(
    info: TensorInfo, inputs: int, groups: int, config: Quantization | None
) -> tuple[int, tuple[str, ...]]:
    """How many inputs share a scale, and what is wrong: the file's number of groups must be one of the configuration's.

    The last group may be smaller, so that the number of groups alone does not always tell.
    """
    sizes = [inputs if size == -1 else size for size in (config.group_sizes if config else ())]
    fitting = [size for size in sizes if -(-inputs // size) == groups]
    if not sizes and inputs % groups == 0:
        fitting = [inputs // groups]
    if inputs % 2 or not fitting:
        said = f"and config.json says group_size {sizes or 'nothing'}; make them agree"
        is_odd = f"has {inputs} inputs; 4-bit weights need an even number"
        sentence = is_odd if inputs % 2 else f"has {groups} scales for {inputs} inputs, {said}"
        return inputs, (_problem(info, sentence),)
    return min(fitting[0], inputs), ()


def _check_symmetry(info: TensorInfo, zeros: np.ndarray, config: Quantization | None) -> None:
    """A symmetric checkpoint has the zero point 8: another one shows that the version of the packing is wrong."""
    if config is not None and config.is_symmetric and (zeros != MIDDLE).any():
        other = int(zeros[zeros != MIDDLE][0])
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} holds the zero point {other}, and config.json says symmetric, which is "
            "8; correct checkpoint_format, packing_format or sym in config.json."
        )


def _ordered(matrix: Matrix, group: int, index: TensorInfo | None) -> Matrix:
    """With columns sorted by their group, where a file has a group for each input (act-order)."""
    if index is None:
        return _evened(matrix, group)
    of_input = index.load()
    order, usual = np.argsort(of_input, kind="stable").astype(np.int32), np.arange(matrix.inputs) // group
    if np.array_equal(of_input, usual):
        return _evened(matrix, group)
    if not np.array_equal(of_input[order], usual):
        raise CheckpointError(
            f"{index.file}: tensor {index.name!r} gives groups of other sizes than {group}; quantise the model again."
        )
    pairs = packing.to_pairs(packing.to_numbers(matrix.values)[:, order])
    return _evened(replace(matrix, values=pairs, order=order), group)


def _evened(matrix: Matrix, group: int) -> Matrix:
    """With groups that divide the inputs: a last one that is smaller makes all of them smaller."""
    even = math.gcd(group, matrix.inputs)

    def repeated(of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, group // even, axis=1)[:, : matrix.inputs // even]

    zeros = None if matrix.zeros is None else repeated(matrix.zeros)
    return replace(matrix, scales=repeated(matrix.scales), zeros=zeros)
