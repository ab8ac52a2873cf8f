"""Features of the target, computed once and kept on disk: for targets that cost more than reading features does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32

from dflash_jax.progress import phase
from dflash_jax.spec import TargetConfig
from dflash_jax.train.dataset import Batches
from dflash_jax.train.objective import Batch, target_features
from dflash_jax.weights.export import save_json
from dflash_jax.weights.loader import Params


@dataclass(frozen=True)
class FeatureCache:
    """Features of every token of a data set, in one memory-mapped file.

    Attributes:
        rows: bfloat16 or float32, one row of C numbers for each of the X tokens.
        starts: first row of each sample.
    """

    rows: Float[np.ndarray, "X C"]
    starts: np.ndarray

    @staticmethod
    def of(folder: Path, target: TargetConfig, params: Params, taps: tuple[int, ...], batches: Batches) -> FeatureCache:
        """Open the features of a data set, or compute and keep them.

        A file is complete once its description, a JSON file, stands beside it.

        Args:
            folder: of the files, whose names are hashes of all that features depend on.
            target: configuration of the target.
            params: its parameters; features have their dtype.
            taps: capture layers.
            batches: of the data set.
        """
        dataset = batches.dataset
        dtype = jax.tree.leaves(params)[0].dtype
        digest = hashlib.sha256(dataset.tokens.tobytes() + dataset.starts.tobytes())
        digest.update(repr((target, taps, str(dtype))).encode())
        for keys, array in jax.tree_util.tree_leaves_with_path(params):
            digest.update(f"{jax.tree_util.keystr(keys)} {array.shape} {checksum(array).tolist()}".encode())
        shape = (len(dataset.tokens), len(taps) * target.hidden_size)
        path, description = folder / f"{digest.hexdigest()[:16]}.bin", {"shape": shape, "dtype": str(dtype)}
        cache = FeatureCache(
            _map(path, "r" if path.with_suffix(".json").exists() else "w+", dtype, shape), dataset.starts
        )
        if not path.with_suffix(".json").exists():
            compute = jax.jit(lambda tokens: target_features(params, target, taps, tokens))
            with phase("computing the target's features", batches.per_epoch) as now:
                for samples, batch in now.over(batches.epoch(0)):
                    cache._keep(samples, batch, np.asarray(compute(jnp.asarray(batch.tokens))))
            cache.rows.flush()  # type: ignore[attr-defined]  # a memmap, which the shapes of jaxtyping do not say
            save_json(path.with_suffix(".json"), json.loads(json.dumps(description)))
        return cache

    def features(self, samples: np.ndarray, batch: Batch) -> Float[np.ndarray, "B T C"]:
        """The features of a batch, as `target_features` computes them; zeros where there is no token.

        Args:
            samples: indices of the samples of its rows.
            batch: host arrays.
        """
        out = np.zeros((*batch.tokens.shape, self.rows.shape[1]), self.rows.dtype)
        for row, (i, length) in enumerate(zip(samples, batch.lengths, strict=False)):
            out[row, :length] = self.rows[self.starts[i] : self.starts[i] + length]
        return out

    def _keep(self, samples: np.ndarray, batch: Batch, features: np.ndarray) -> None:
        for row, (i, length) in enumerate(zip(samples, batch.lengths, strict=False)):
            self.rows[self.starts[i] : self.starts[i] + length] = features[row, :length]


@jax.jit
def checksum(array: Shaped[Array, "*shape"]) -> UInt32[Array, "2"]:
    """Two sums over all bits of an array, each element weighted by its position.

    All weights count, so that a target fine-tuned with frozen embeddings is told from the one before. Each device reads
    its own shard once, which costs no more than reading the weights for one token.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, length in enumerate(array.shape):  # as in the flat array; flattening it would gather its shards
        position = position * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    weights = (2 * position + 1, position * jnp.uint32(0x9E3779B1) ^ (position >> 15))  # the first are odd
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in weights])


def _map(path: Path, mode: str, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, dtype=dtype, mode=mode, shape=shape)  # type: ignore[call-overload]  # modes are literals there
