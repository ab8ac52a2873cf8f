"""Packed matrices that are read as numbers of 16 bits: routers, heads, and matrices of 8-bit integers.

No kernel multiplies 8-bit integers, and routers and heads are no projections; published files have them all the same.
AutoRound packs routers of Qwen3-30B-A3B and Qwen3-Coder-Next, and its mixed Qwen3-Next-80B-A3B has 8 bits beside 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dflash_jax.spec.quantization import Quantization
from dflash_jax.weights.layouts import Shapes, Stored, groups_of, shape_problems, size_of_groups
from dflash_jax.weights.safetensors import TensorInfo

MIDDLE = 128  # the zero point of symmetric 8-bit numbers
PLACES = 4  # 8-bit numbers in an int32


@dataclass(frozen=True)
class Widened:
    """A packed matrix that is held in the dtype of the model.

    Attributes:
        tensors: its tensors by the last part of their names.
        problems: why its tensors do not fit each other or the configuration, a sentence each, without the full stop.
        read: its numbers [O, I] in float32.
    """

    tensors: Mapping[str, TensorInfo]
    problems: tuple[str, ...]
    read: Callable[[], Float[np.ndarray, "O I"]]


def of_four_bits(stored: Stored) -> Widened:
    """A matrix that could be kept as it is stored."""
    return Widened(stored.tensors, stored.problems, lambda: stored.load().dense())


def of_eight_bits(
    tensors: Mapping[str, TensorInfo], shape: tuple[int, int], config: Quantization | None
) -> Widened | None:
    """A matrix of 8-bit integers in GPTQ's, AutoRound's or compressed-tensors' packing; None if it is none.

    Args:
        tensors: of the matrix, by the last part of their names.
        shape: [O, I].
        config: what the checkpoint says of its matrices.
    """
    outputs, inputs = shape
    if "qweight" in tensors:
        packed, scales, points, index, axis = "qweight", "scales", "qzeros", "g_idx", 0
    else:
        packed, scales, points, index, axis = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", 1
    words = (-(-inputs // PLACES), outputs) if axis == 0 else (outputs, -(-inputs // PLACES))
    if tensors[packed].shape != words:
        return None
    groups, packed_outputs = groups_of(tensors, scales, axis), -(-outputs // PLACES)
    expected: Shapes = {
        packed: words,
        scales: (groups, outputs) if axis == 0 else (outputs, groups),
        points: (groups, packed_outputs) if axis == 0 else (packed_outputs, groups),
        index: (inputs,),
        "weight_shape": (2,),
    }
    optional = (index, "weight_shape", *(() if axis == 0 else (points,)))
    problems = shape_problems(tensors, expected, optional=optional, of="for 8 bits")
    group, problem = size_of_groups(tensors[packed], inputs, groups, config)

    def read() -> Float[np.ndarray, "O I"]:
        def rows(name: str) -> np.ndarray:  # of outputs, packed along the other axis or not
            array = tensors[name].load()
            return np.ascontiguousarray(array.T if axis == 0 else array)

        numbers = rows(packed).view(np.uint8)[:, :inputs].astype(np.float32)
        zeros: np.ndarray | int = MIDDLE
        if points in tensors:
            bytes_of_groups = np.ascontiguousarray(rows(points).T).view(np.uint8)[:, :outputs].T
            zeros = bytes_of_groups.astype(np.float32) + (config.zero_offset if config else 0)
        of_input = tensors[index].load() if index in tensors else np.arange(inputs) // group
        wide_zeros = zeros if isinstance(zeros, int) else zeros[:, of_input]
        return (numbers - wide_zeros) * rows(scales).astype(np.float32)[:, of_input]

    return Widened(tensors, (*problems, *problem), read)
