"""Memory-mapped tensors of a model folder.

The safetensors package cannot give fp8 tensors to numpy, and copies what it gives. So the format is read here; it is
simple: 8 bytes of header length, a JSON header, raw little-endian data.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec import read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "I8": np.int8,
        "U8": np.uint8,
        "I16": np.int16,
        "I32": np.int32,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place in a file; its data is read by `load` only."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def load(self) -> np.ndarray:
        """The tensor as a read-only view of the mapped file."""
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model folder by name, from the files of its index, else `model.safetensors`, else all files.

    Raises:
        CheckpointError: there are no weights, a file of the index is absent, a file is truncated or corrupt, or a
            tensor is in two files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(folder):
        for info in _read_header(file):
            if info.name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {info.name!r} stands in {tensors[info.name].file.name} too; remove one file."
                )
            tensors[info.name] = info
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if not index.exists():
        single = folder / SINGLE_NAME
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file; give a folder that holds the weights.")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of tensors to files; download it again.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of its folder; download it again.")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name!r}, which is not in {folder}; download the missing file.")
    return [folder / name for name in names]


def _read_header(file: Path) -> Iterator[TensorInfo]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(min(length, size))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); download it again.") from error
    if size < 8 or 8 + length > size:
        raise CheckpointError(
            f"{file} is truncated: its header ends at byte {8 + length}, the file at {size}; download it again."
        )
    try:
        entries = [_entry(name, entry) for name, entry in json.loads(text).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} has a corrupt header ({error!r}); download it again.") from error
    for entry in entries:
        yield _checked(file, size, 8 + length, *entry)


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    begin, end = map(int, entry["data_offsets"])
    return name, str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end


def _checked(
    file: Path, size: int, data: int, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int
) -> TensorInfo:
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype}; supported are {', '.join(DTYPES)}.")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name!r} of {dtype} {list(shape)} should span {expected} bytes and spans {end - begin}; "
            "download it again."
        )
    if data + end > size:
        raise CheckpointError(
            f"{file} is truncated: tensor {name!r} ends at byte {data + end}, the file at {size}; download it again."
        )
    return TensorInfo(file, name, DTYPES[dtype], shape, data + begin)
