"""What an engine takes of each device, part by part, and what gives way where memory is short."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dflash_jax.base.errors import ConfigError
from dflash_jax.engine.device.memory import (
    FULL,
    GAPS_BYTES,
    SLIDING,
    capacity_of,
    divide,
    group_bytes,
    log_capacity,
    working_bytes,
)
from dflash_jax.options import EngineConfig
from dflash_jax.options.dtypes import DRAFT_QUANTIZATIONS
from dflash_jax.parallel.platform import OUTSIDE_BYTES
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.state.layout import Layout
from dflash_jax.weights.layouts import ROUNDED_GROUP
from dflash_jax.weights.parameters import output_axes, parameters_of
from dflash_jax.weights.tables import checkpoint_table

# Sequences side by side and prompt tokens of a step, from what is wished to what the smallest memory is given: steps of
# 2,048 tokens cost a prompt little, and fewer sequences cost less than a shorter context.
WAYS = ((16, 8192), (16, 4096), (16, 2048), (8, 2048), (4, 2048), (4, 1024), (2, 1024), (1, 1024), (1, 512))
ROOM: Mapping[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
}  # for which the drafter's matrices become narrower

logger = logging.getLogger("dflash_jax")


def device_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of parameters on the first of their devices."""

    def of_leaf(leaf: Any) -> int:
        place = getattr(leaf, "sharding", None)
        shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(of_leaf, jax.tree.leaves(params)))


def parameter_bytes(
    config: TargetConfig | DraftConfig, dtype: np.dtype, bits: int | None = None, *, has_zeros: bool = False
) -> int:
    """Bytes of a model's parameters on one device, by its configuration alone.

    Args:
        config: the model's.
        dtype: of what is not quantised: embedding, head, norms, gates of Gated DeltaNet.
        bits: of a number of the other matrices, each 128 of which share a 16-bit scale; None leaves them in the dtype.
        has_zeros: whether they share a zero point of a byte, too.
    """
    total = 0
    for parameter in parameters_of(checkpoint_table(config), config):
        size = math.prod(parameter.shape)
        if bits is not None and parameter.is_rounded:
            inputs = math.prod(parameter.shape[output_axes(parameter.axes) :])
            groups = size // math.gcd(inputs, ROUNDED_GROUP)
            total += size * bits // 8 + groups * (2 + has_zeros)
        else:
            total += size * (4 if parameter.is_float32 else dtype.itemsize)
    return total


def machine_bytes() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_machine_memory(what: str, size: int, dtype: np.dtype) -> None:
    """Refuse what this machine's memory cannot hold, if the device is a CPU: the kernel would kill the process.

    Args:
        what: what takes the memory, in the plural.
        size: its bytes, a lower bound.
        dtype: of the parameters.

    Raises:
        ConfigError: the machine has less memory.
    """
    total = machine_bytes()
    if size <= total or jax.default_backend() != "cpu":
        return
    narrower = "--dtype bfloat16, " if dtype.itemsize == 4 and size <= 2 * total else ""
    raise ConfigError(
        f"{what} take {size / 1e9:.1f} GB in {dtype.name} and this machine has {total / 1e9:.1f} GB of memory; give "
        f"{narrower}a smaller model or a GPU."
    )


def fitted(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, parameters: int) -> EngineConfig:
    """Lower what was left out to what lets one sequence of `max_model_len` fit; `plan_layout` refuses what never fits.

    Args:
        target: the target.
        draft: its drafter.
        config: options, some of which were left out.
        parameters: bytes of both models on one device.
    """
    if not config.flexible or not target.attention_layers:
        return config
    lowered = config
    for sequences, tokens in WAYS:
        way: dict[str, Any] = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
        lowered = replace(config, **{name: way[name] for name in config.flexible})
        if divide(target, draft, lowered, parameters).fits:
            break
    if lowered != config:
        changes = ", ".join(f"{name}={getattr(lowered, name)}" for name in sorted(config.flexible))
        logger.info("memory is short beside one sequence of max_model_len=%d: %s", config.max_model_len, changes)
    return lowered


def with_draft_quantization(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, of_target: int
) -> EngineConfig:
    """Choose the widest type of the drafter's matrices that leaves room, if `gpu_memory_bytes` bounds the engine.

    Args:
        config: options.
        target: the target.
        draft: its drafter.
        of_target: bytes of the target's parameters on one device, which are loaded.
    """
    if draft is None or config.gpu_memory_bytes is None or config.draft_quantization is not None:
        return config
    roomy = replace(config, **{name: value for name, value in ROOM.items() if name in config.flexible})
    narrowest = DRAFT_QUANTIZATIONS[-1]
    for quantization in (None, *DRAFT_QUANTIZATIONS):
        of_draft = draft_bytes(target, draft, config.draft_dtype, quantization)
        # The drafter is not loaded yet, so what a device says is in use lacks it.
        less = replace(roomy, gpu_memory_bytes=max(config.gpu_memory_bytes - of_draft, 1))
        if quantization == narrowest or divide(target, draft, less, of_target).fits:
            break
    if quantization is not None:
        logger.info("the drafter's matrices become %s, %.2f GiB: memory is short", quantization, of_draft / 2**30)
    return replace(config, draft_quantization=quantization)


def draft_bytes(target: TargetConfig, draft: DraftConfig, dtype: np.dtype, quantization: str | None) -> int:
    """Bytes of a drafter's parameters on one device; for one in fp8 there is a copy of the target's head in 8 bits."""
    bits = {None: None, "fp8": 8, "int4": 4}[quantization]
    head = target.vocab_size * target.hidden_size if quantization == "fp8" and draft.draft_vocab_size is None else 0
    return parameter_bytes(draft, dtype, bits, has_zeros=bits == 4) + head


def parts_of(
    target: TargetConfig,
    draft: DraftConfig | None,
    layout: Layout,
    config: EngineConfig,
    parameters: Sequence[int],
) -> dict[str, int]:
    """Bytes of each part of an engine on one device.

    Args:
        target: the target.
        draft: its drafter.
        layout: the plan.
        config: options.
        parameters: bytes of the target's and of the drafter's.
    """
    capacity, pages = capacity_of(target, draft, layout, config), layout.groups
    kept = zip(group_bytes(target, draft, config), (pages[FULL], pages[SLIDING]), strict=True)
    devices = config.tensor_parallel_size
    parts = {
        "target": parameters[0],
        "drafter": parameters[1],
        f"{capacity.tokens:,} tokens of keys and values": sum(size * p.num_units for size, p in kept)
        * layout.page_size
        // devices,
        f"states of {config.max_num_seqs} sequences": config.max_num_seqs * capacity.state_bytes // devices,
        f"{capacity.snapshots} snapshots": capacity.snapshots * capacity.state_bytes // devices,
        "sampling and temporaries of steps": working_bytes(target, draft, config),
    }
    if config.gpu_memory_bytes is not None:
        parts |= {"gaps between arrays": GAPS_BYTES, "CUDA": OUTSIDE_BYTES}
    return {name: size for name, size in parts.items() if size}


def log_plan(
    target: TargetConfig,
    draft: DraftConfig | None,
    layout: Layout,
    config: EngineConfig,
    parameters: Sequence[int],
) -> None:
    """Log at INFO what a layout can hold, and what each part takes of a device; arguments as for `parts_of`."""
    log_capacity(target, draft, layout, config)
    parts = parts_of(target, draft, layout, config, parameters)
    words = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    cap = "" if config.gpu_memory_bytes is None else f" of gpu_memory_bytes={config.gpu_memory_bytes / 2**30:.2f}"
    logger.info("Memory of a device in GiB: %s; in all %.2f%s", words, sum(parts.values()) / 2**30, cap)


def log_peak(devices: int) -> None:
    """Log at INFO the most that JAX's allocator has given, on the one of so many devices that gave most."""
    stats = [device.memory_stats() or {} for device in jax.devices()[:devices]]
    peak, limit = max((s.get("peak_bytes_in_use", 0), s.get("bytes_limit", 0)) for s in stats)
    if peak:
        logger.info("Memory of a device at its peak: %d of %d bytes that JAX's allocator has", peak, limit)


def has_room(parameters: Sequence[jax.Array]) -> bool:
    """Whether a device that holds these has memory left for another copy of the largest, and a quarter of it.

    XLA times matrix products over such copies while it compiles, and a program fails to compile where they do not fit.
    Devices that do not tell their memory (CPUs) have room.
    """
    device = next(iter(parameters[0].devices()))
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    return bool(free >= max(leaf.addressable_shards[0].data.nbytes for leaf in parameters) * 5 / 4)
