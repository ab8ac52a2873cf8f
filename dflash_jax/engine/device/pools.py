"""The pools that hold the pages of a plan, and where layers keep theirs in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.engine.device.memory import FP8, FULL, SLIDING, explain_out_of_memory, feature_size, group_of
from dflash_jax.engine.device.slots import DEFERRED, Caches
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DecoderConfig, DraftConfig, TargetConfig
from dflash_jax.state import recurrent
from dflash_jax.state.layout import Layout
from dflash_jax.state.paged_kv import PagedKVCache, Place
from dflash_jax.weights.loader import KVScales
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import KeyRounding, Pages

ADDRESSABLE_BYTES = 2 << 30  # of the largest 8-bit pool below 4 GiB that Triton kernels can address

logger = logging.getLogger("dflash_jax")


def place_layers(
    groups: Sequence[int | None], layout: Layout, page_bytes: int, dtype: jnp.dtype
) -> tuple[tuple[Place | None, ...], list[int]]:
    """Where layers of these groups keep their pages, and how many pages each pool has.

    The layers of a group share one pool, or several where `layers_of_pool` says that one would be too large.

    Args:
        groups: group of each layer; None for a layer without pages.
        layout: how many pages a layer has.
        page_bytes: bytes of the keys in one page, on one device; without the scales of 4-bit keys, in arrays of their
            own.
        dtype: of the pools.
    """
    places: dict[int, Place] = {}
    sizes: list[int] = []
    for group in (FULL, SLIDING):
        pages = layout.groups[group].num_units
        layers = [layer for layer, of in enumerate(groups) if of == group]
        per_pool = layers_of_pool(len(layers), pages * page_bytes, dtype)
        for start in range(0, len(layers), per_pool):
            part = layers[start : start + per_pool]
            places |= {layer: Place(group, len(sizes), i * pages) for i, layer in enumerate(part)}
            sizes.append(len(part) * pages)
    return tuple(places.get(layer) for layer in range(len(groups))), sizes


def layers_of_pool(num_layers: int, layer_bytes: int, dtype: jnp.dtype) -> int:
    """How many layers of a group share a pool of keys: all, or as few as keep each pool at 2 GiB or less.

    Triton kernels address pools of 8-bit numbers with 32-bit offsets, which overflow from 2 to 4 GiB.

    Args:
        num_layers: layers of the group.
        layer_bytes: bytes of the keys of one layer, on one device.
        dtype: of the pool.
    """
    total = num_layers * layer_bytes
    if dtype.itemsize > 1 or not ADDRESSABLE_BYTES < total <= 2 * ADDRESSABLE_BYTES:
        return max(num_layers, 1)
    if layer_bytes > ADDRESSABLE_BYTES:
        logger.warning(
            "the %s keys of one layer fill %.2f GiB of a device, and Triton kernels address no pool from 2 to 4 GiB: "
            "slower kernels run instead; lower kv_cache_memory_bytes or keep these keys in bfloat16",
            dtype.name,
            layer_bytes / 2**30,
        )
        return 1
    return ADDRESSABLE_BYTES // layer_bytes


def make_caches(
    target: TargetConfig,
    draft: DraftConfig | None,
    layout: Layout,
    config: EngineConfig,
    mesh: Mesh,
    kv_scales: tuple[KVScales | None, KVScales | None] = (None, None),
    key_rounding: KeyRounding | None = None,
) -> Caches:
    """Make empty pools for all layers, recurrent states, and room for deferred features.

    Args:
        target: the target.
        draft: its drafter.
        layout: how many pages each group has.
        config: dtypes of the pools.
        mesh: devices; kv heads are split over them where they divide evenly.
        kv_scales: scales of the target and of the drafter; only fp8 pools use them.
        key_rounding: of the target's keys, if they are in 4 bits.

    Raises:
        ConfigError: the pools do not fit in the memory.
    """

    def cache(
        model: DecoderConfig,
        groups: list[int | None],
        dtype: jnp.dtype,
        scales: KVScales | None,
        rounding: KeyRounding | None = None,
    ) -> PagedKVCache:
        page = (model.num_key_value_heads, layout.page_size, model.head_dim)
        devices = mesh.size if mesh.share(page[0]) else 1
        page_bytes = math.prod(page) // 2 if dtype == int4_kv.DTYPE else math.prod(page) * dtype.itemsize
        places, pages = place_layers(groups, layout, page_bytes // devices, dtype)

        def pools() -> list[Pages]:
            return [_empty_pool((number, *page), dtype, mesh) for number in pages]

        of_heads: dict[str, Any] = {}
        if scales is not None and dtype in FP8:
            place = mesh.place(("L", "K"), scales.k.shape)
            of_heads = {"k_scale": jax.device_put(scales.k, place), "v_scale": jax.device_put(scales.v, place)}
        if rounding is not None:
            parts = rounding.offset, rounding.feedback
            places_of = (mesh.place(("L", "K", "H", "H")[: part.ndim], part.shape) for part in parts)
            of_heads["k_rounding"] = KeyRounding(*map(jax.device_put, parts, places_of))
        return PagedKVCache(pools(), pools(), **of_heads, places=places, mesh=mesh)

    deferred = (config.max_num_seqs, DEFERRED, feature_size(target, draft))
    with explain_out_of_memory():
        caches = Caches(
            target=cache(
                target,
                [FULL if i in target.attention_layers else None for i in range(target.num_hidden_layers)],
                config.kv_cache_dtype,
                kv_scales[0],
                key_rounding,
            ),
            draft=PagedKVCache([], [], mesh=mesh),
            features=jnp.zeros(deferred, config.dtype, device=mesh.place(("Q", "R", "C"), deferred)),
        )
        if draft is not None:
            groups: list[int | None] = [group_of(layer.window) for layer in draft.layers]
            caches = replace(caches, draft=cache(draft, groups, config.draft_kv_cache_dtype, kv_scales[1]))
        if layout.snapshots is not None:
            rows = layout.groups[layout.snapshots].num_units
            states = recurrent.make_states(target, config.max_num_seqs, rows, layout.block, config.dtype, mesh)
            caches = replace(caches, states=states)
        return jax.block_until_ready(caches)


def _empty_pool(shape: tuple[int, int, int, int], dtype: jnp.dtype, mesh: Mesh) -> Pages:
    """Zeros, split over the devices by kv heads."""

    def zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
        axes = ("P", "K", "S", "H")[: len(array.shape)]
        return jnp.zeros(array.shape, array.dtype, device=mesh.place(axes, array.shape))

    arrays = int4_kv.shapes(shape) if dtype == int4_kv.DTYPE else jax.ShapeDtypeStruct(shape, dtype)
    pool: Pages = jax.tree.map(zeros, arrays)
    return pool
