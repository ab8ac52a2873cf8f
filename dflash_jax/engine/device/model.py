"""A model in the form that the engine takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from dflash_jax.engine.device.memory import explain_out_of_memory
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.weights.formats import transposed
from dflash_jax.weights.formats.fp8 import quantize_draft
from dflash_jax.weights.loader import KVScales, Params


@dataclass(frozen=True)
class Model:
    """A configuration, its parameters, and the scales of fp8 keys and values if the checkpoint has any."""

    config: TargetConfig | DraftConfig
    params: Params
    kv_scales: KVScales | None


def narrowed(draft: Model, target: Model, dtype: jnp.dtype) -> Model:
    """A drafter for a CPU with its matrices, and its copy of the target's head, in this narrower dtype."""
    return replace(draft, params=jax.block_until_ready(transposed.narrowed(draft.params, target.params, dtype)))


def quantized(draft: Model, target: Model, mesh: Mesh) -> Model:
    """A drafter with its matrices, and its copy of the target's head, in fp8.

    Raises:
        ConfigError: the fp8 parameters do not fit in the memory.
    """
    assert isinstance(draft.config, DraftConfig)
    with explain_out_of_memory():
        params = quantize_draft(draft.params, draft.config, target.params, mesh.place)
        return replace(draft, params=jax.block_until_ready(params))
