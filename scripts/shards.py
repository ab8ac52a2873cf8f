"""Files of weights that are written while their tensors are made, so that only one file's tensors are in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dflash_jax.weights.export import save_json, save_tensors
from dflash_jax.weights.safetensors import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 2**30  # of a file of weights, beyond which the next layer goes into another


class Shards:
    """Files of weights, each written once it is large enough.

    Args:
        folder: where they are until `finish`.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._waiting: dict[str, np.ndarray] = {}
        self._written: list[list[str]] = []  # the names in each file
        self.nbytes = 0  # of all tensors

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take the tensors of a layer."""
        self._waiting |= tensors
        self.nbytes += sum(array.nbytes for array in tensors.values())
        if sum(array.nbytes for array in self._waiting.values()) >= SHARD_BYTES:
            self._write()

    def finish(self, out: Path) -> None:
        """Move the files to a folder: one by its usual name, or several with an index."""
        self._write()
        count = len(self._written)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            (self._folder / str(i)).replace(out / (name if count > 1 else SINGLE_NAME))
        if count > 1:
            weight_map = {tensor: name for name, held in zip(names, self._written, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
            save_json(out / INDEX_NAME, index)

    def _write(self) -> None:
        if self._waiting:
            save_tensors(self._folder / str(len(self._written)), self._waiting)
            self._written.append(list(self._waiting))
            self._waiting = {}
