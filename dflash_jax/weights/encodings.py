"""Quantised matrices as checkpoints store them: the tensors of a matrix, and what config.json says of all.

`layouts` reads what is written here. Sources: compressed-tensors' pack-quantized and float-quantized, which vLLM and
SGLang multiply packed; the fp8 blocks of DeepSeek's and Qwen's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float

from dflash_jax.base.errors import ConfigError
from dflash_jax.weights import packing
from dflash_jax.weights.export import FP8_LARGEST, FP8_QUANTIZATION, quantize_rows
from dflash_jax.weights.gptq import gptq, nearest
from dflash_jax.weights.layouts import E4M3, MIDDLE, Matrix

BLOCK = 128  # rows and columns of an fp8 matrix that share a scale: other engines' kernels have no other size


class Encoding(Protocol):
    """A layout of quantised matrices."""

    def configuration(self, wide: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint.

        Args:
            wide: names of the modules that stay at 16 bits.
        """
        ...

    def tensors(
        self, name: str, weight: Float[np.ndarray, "O I"], moment: Float[Array, "I I"] | None
    ) -> dict[str, np.ndarray]:
        """The tensors of a matrix by the last part of their names (`weight_scale`).

        Args:
            name: of the matrix, for errors.
            weight: float32.
            moment: mean of x x^T over the inputs x that errors are to be small for; None rounds to the nearest.

        Raises:
            ConfigError: the layout cannot express a matrix of this shape.
            CheckpointError: its inputs are not finite.
        """
        ...

    def dense(self, tensors: Mapping[str, np.ndarray]) -> Float[np.ndarray, "O I"]:
        """The float32 matrix that the tensors stand for."""
        ...


@dataclass(frozen=True)
class Int4(Encoding):
    """compressed-tensors' pack-quantized in 4 bits.

    Attributes:
        group: inputs that share a scale.
        symmetric: whether all zero points are 8, which is not stored then.
    """

    group: int
    symmetric: bool

    def configuration(self, wide: Sequence[str]) -> dict[str, Any]:
        """The format of all linear layers but the wide ones."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": self.group,
            "symmetric": self.symmetric,
            "dynamic": False,
            "actorder": None,
        }
        return _compressed_tensors("pack-quantized", weights, wide)

    def tensors(
        self, name: str, weight: Float[np.ndarray, "O I"], moment: Float[Array, "I I"] | None
    ) -> dict[str, np.ndarray]:
        """Numbers from 0 to 15, eight to an int32, scales in bfloat16, and the zero points of asymmetric ones."""
        inputs = weight.shape[1]
        if inputs % self.group or self.group % 8:
            raise ConfigError(
                f"{name} has {inputs} inputs, which groups of {self.group} do not divide; give a multiple of 8 that "
                "does, for example --group-size 64 or 32."
            )
        if moment is None:
            matrix = nearest(weight, self.group, symmetric=self.symmetric)
        else:
            matrix = gptq(weight, moment, self.group, symmetric=self.symmetric, name=name)
        return packed(matrix, symmetric=self.symmetric)

    def dense(self, tensors: Mapping[str, np.ndarray]) -> Float[np.ndarray, "O I"]:
        """(number - zero point) * scale."""
        scales = tensors["weight_scale"]
        zeros = np.full(scales.shape, MIDDLE, np.uint8)
        if not self.symmetric:
            zeros = packing.words_to_numbers(tensors["weight_zero_point"].T)[:, : len(scales)].T
        pairs = packing.from_compressed(tensors["weight_packed"], scales.shape[1] * self.group)
        return Matrix(pairs, scales, zeros, None).dense()


@dataclass(frozen=True)
class Fp8Blocks(Encoding):
    """e4m3 with a float32 scale for each block of 128 rows and 128 columns."""

    def configuration(self, wide: Sequence[str]) -> dict[str, Any]:
        """The size of blocks, and the wide modules."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(wide),
        }

    def tensors(
        self, name: str, weight: Float[np.ndarray, "O I"], moment: Float[Array, "I I"] | None
    ) -> dict[str, np.ndarray]:
        """The largest number of a block becomes 448; the scale is the factor, whatever its name says."""
        rows, columns = weight.shape
        padded = np.pad(weight, [(0, -rows % BLOCK), (0, -columns % BLOCK)])
        blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        largest = np.abs(blocks).max(axis=(1, 3))
        scales = np.maximum(largest / np.float32(FP8_LARGEST), np.finfo(np.float32).tiny)  # for blocks of zeros
        numbers = (blocks / scales[:, None, :, None]).astype(E4M3).reshape(padded.shape)[:rows, :columns]
        return {"weight": numbers, "weight_scale_inv": scales}

    def dense(self, tensors: Mapping[str, np.ndarray]) -> Float[np.ndarray, "O I"]:
        """Number * scale."""
        numbers = tensors["weight"]
        scales = np.kron(tensors["weight_scale_inv"], np.ones((BLOCK, BLOCK), np.float32))
        return numbers.astype(np.float32) * scales[: numbers.shape[0], : numbers.shape[1]]


@dataclass(frozen=True)
class Fp8Rows(Encoding):
    """e4m3 with a float32 scale for each row: compressed-tensors' float-quantized."""

    def configuration(self, wide: Sequence[str]) -> dict[str, Any]:
        """What `save_model` writes, and the wide modules that it does not name."""
        usual = FP8_QUANTIZATION["ignore"]
        return {**FP8_QUANTIZATION, "ignore": [*usual, *(module for module in wide if module not in usual)]}

    def tensors(
        self, name: str, weight: Float[np.ndarray, "O I"], moment: Float[Array, "I I"] | None
    ) -> dict[str, np.ndarray]:
        """The largest number of a row becomes 448."""
        numbers, scales = quantize_rows(weight)
        return {"weight": numbers, "weight_scale": scales}

    def dense(self, tensors: Mapping[str, np.ndarray]) -> Float[np.ndarray, "O I"]:
        """Number * scale."""
        return tensors["weight"].astype(np.float32) * tensors["weight_scale"]


def packed(matrix: Matrix, *, symmetric: bool) -> dict[str, np.ndarray]:
    """compressed-tensors' tensors of a 4-bit matrix whose inputs are in order."""
    assert matrix.zeros is not None
    assert matrix.order is None
    tensors = {
        "weight_packed": packing.numbers_to_words(packing.to_numbers(matrix.values)),
        "weight_scale": matrix.scales,
        "weight_shape": np.array([len(matrix.values), matrix.inputs], np.int64),
    }
    if symmetric:
        return tensors
    return tensors | {"weight_zero_point": np.ascontiguousarray(packing.numbers_to_words(matrix.zeros.T).T)}


def _compressed_tensors(name: str, weights: Mapping[str, Any], wide: Sequence[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(wide),
        "kv_cache_scheme": None,
    }
