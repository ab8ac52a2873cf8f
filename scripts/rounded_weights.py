"""Folders of a target whose weights have been rounded to fewer bits, as float32 numbers that any engine multiplies.

Every matrix of a layer is rounded to the nearest number of its group of 128 inputs, by the functions that the engine
rounds with at load; embedding, head, norms, convolutions and the gates of Gated DeltaNet stay as they are. The engine
never rounds what it widens, so a product with these numbers differs from one with packed ones by the order of its sums
alone, and a CPU computes it many times faster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dflash_jax.spec import read_json, target_config
from dflash_jax.spec.hybrid import text_raw_config
from dflash_jax.weights import packing
from dflash_jax.weights.export import QUANTIZED, dense_params, save_json, save_tensors
from dflash_jax.weights.layouts import Matrix, rounded, rounded_int4
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import checkpoint_tensors
from dflash_jax.weights.safetensors import SINGLE_NAME

ROUNDING: Mapping[str, Callable[[np.ndarray], Matrix]] = {"fp8": rounded, "int4": rounded_int4}


def widened(matrix: Matrix) -> Float[np.ndarray, "O I"]:
    """The numbers of a quantised matrix in float32."""
    scales = np.repeat(matrix.scales.astype(np.float32), matrix.group, axis=1)
    if matrix.zeros is None:
        return matrix.values.astype(np.float32) * scales
    zeros = np.repeat(matrix.zeros.astype(np.float32), matrix.group, axis=1)
    return (packing.to_numbers(matrix.values) - zeros) * scales


def write_rounded(source: Path, out: Path, weights: str) -> int:
    """Write the target in `source` to `out` with its layers' matrices rounded; returns how many were.

    Args:
        source: a folder of a target.
        out: folder to make.
        weights: a key of `ROUNDING`.
    """
    raw = read_json(source / "config.json")
    config = target_config(raw)
    params = dense_params(config, load_params(source, config, jnp.float32, keep_quantized=False))
    tensors = checkpoint_tensors(config, params)
    names = [name for name, tensor in tensors.items() if name.endswith(QUANTIZED) and tensor.ndim == 2]
    for name in names:
        tensors[name] = widened(ROUNDING[weights](tensors[name]))
    out.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, out)
    save_tensors(out / SINGLE_NAME, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    text = text_raw_config(raw)
    save_json(out / "config.json", {k: v for k, v in text.items() if k != "quantization_config"} | {"dtype": "float32"})
    return len(names)
