"""A model in the form that the engine takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dflash_jax.engine.device.budget import device_bytes
from dflash_jax.engine.device.memory import explain_out_of_memory, free_bytes
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.mesh import AXIS, Mesh
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.weights.formats import transposed
from dflash_jax.weights.formats.fp8 import quantize_draft
from dflash_jax.weights.formats.protocol import Weight
from dflash_jax.weights.formats.screened import is_worth_it
from dflash_jax.weights.loader import KVScales, Params
from pallas_kernels import Screen, screen_of
from pallas_kernels.registry import Device

logger = logging.getLogger("dflash_jax")
MOST_FOR_COPY = 1 / 20  # of the memory that is left for keys and values


@dataclass(frozen=True)
class Model:
    """A configuration, its parameters, and the scales of fp8 keys and values if the checkpoint has any."""

    config: TargetConfig | DraftConfig
    params: Params
    kv_scales: KVScales | None


def narrowed(draft: Model, target: Model, dtype: jnp.dtype) -> Model:
    """A drafter for a CPU with its matrices, and its copy of the target's head, in this narrower dtype."""
    return replace(draft, params=jax.block_until_ready(transposed.narrowed(draft.params, target.params, dtype)))


def screened(target: Model, draft: DraftConfig | None, config: EngineConfig, mesh: Mesh) -> Model:
    """A target with an 8-bit copy of its head, where that makes an argmax faster and memory is not short.

    The copy takes the place of the one in fp8 that a drafter in fp8 would have.

    Raises:
        ConfigError: the copy does not fit in the memory.
    """
    assert isinstance(target.config, TargetConfig)
    head: Any = target.params.get("lm_head", target.params["embed_tokens"])
    if isinstance(head, Weight) or len(head) % mesh.size:
        return target
    if not is_worth_it(len(head) // mesh.size, head.shape[1], head.dtype, Device.default()):
        return target
    replaces_copy = config.draft_quantization == "fp8" and draft is not None and draft.draft_vocab_size is None
    free = free_bytes(target.config, draft, config, device_bytes(target.params)) // mesh.size
    if not replaces_copy and head.size // mesh.size > free * MOST_FOR_COPY:
        return target
    of_each = head.size / mesh.size / 2**30
    logger.info("the target's head has a copy in 8 bits, %.2f GiB, for drafts and to find its argmax by", of_each)
    rows = PartitionSpec(AXIS)
    make = mesh.on_each(screen_of, rows, Screen._make((rows, PartitionSpec(None, AXIS))))
    with explain_out_of_memory():
        screen = jax.block_until_ready(jax.jit(make)(head))
    return replace(target, params={**target.params, "screen": screen})


def quantized(draft: Model, target: Model, mesh: Mesh) -> Model:
    """A drafter with its matrices in fp8, and its copy of the target's head if that has none in 8 bits.

    Raises:
        ConfigError: the fp8 parameters do not fit in the memory.
    """
    assert isinstance(draft.config, DraftConfig)
    with explain_out_of_memory():
        params = quantize_draft(draft.params, draft.config, target.params, mesh.place)
        return replace(draft, params=jax.block_until_ready(params))
