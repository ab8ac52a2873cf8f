"""The configuration of a target, read from its folder and checked against the head in its weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_jax.spec import TargetConfig, read_json, target_config
from dflash_jax.weights.naming import naming_of
from dflash_jax.weights.safetensors import TensorInfo, list_tensors

ROWS = 8192  # of head and embedding that are compared at a time: all of both may be gigabytes
EMBEDDING = "embed_tokens.weight"
logger = logging.getLogger(__name__)


def read_target_config(folder: Path) -> TargetConfig:
    """Read the `config.json` of a target.

    Where it ties the head to the embedding and the weights hold a head with other numbers, the head is used, as
    transformers does (`tie_weights`); a folder without weights is believed.

    Raises:
        CheckpointError: a file is absent or damaged.
        ConfigError: an unknown architecture, missing field or impossible value.
    """
    path = folder / "config.json"
    config = target_config(read_json(path), str(path))
    if not config.tie_word_embeddings or not any(folder.glob("*.safetensors")):
        return config
    tensors = list_tensors(folder)
    naming = naming_of(tensors, config)
    head, embedding = tensors.get(naming.head), tensors.get(naming.prefix + EMBEDDING)
    if head is None or embedding is None or _are_equal(head, embedding):
        return config
    logger.warning(
        "%s ties the head to the embedding, but %s holds a head %r of its own, which is used; set "
        "tie_word_embeddings to false.",
        path,
        head.file.name,
        head.name,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two matrices hold the same numbers; it stops at the first rows that differ."""
    if one.shape != other.shape:
        return False
    pair = one.load(), other.load()
    parts = ([matrix[i : i + ROWS].astype(np.float32) for matrix in pair] for i in range(0, one.shape[0], ROWS))
    return all(np.array_equal(first, second, equal_nan=True) for first, second in parts)
