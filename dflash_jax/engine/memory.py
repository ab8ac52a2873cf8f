"""How many pages there are, and the pools that hold them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.cache.paged import PagedKVCache
from dflash_jax.config import DecoderConfig, DraftConfig, EngineConfig, TargetConfig
from dflash_jax.engine.scheduler import Layout
from dflash_jax.engine.sharding import Mesh
from dflash_jax.engine.state import Caches
from dflash_jax.errors import ConfigError

CPU_CACHE_BYTES = 4 << 30  # without a device that says how much it has

FULL, SLIDING = 0, 1  # KV groups


def group_of(layer_window: int | None) -> int:
    """The group of a drafter layer; the target's layers keep every token."""
    return FULL if layer_window is None else SLIDING


def bytes_per_token(config: DecoderConfig, layers: int, dtype: jnp.dtype) -> int:
    """Bytes of keys and values that so many layers keep of a token."""
    return 2 * layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def plan_layout(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig) -> Layout:
    """Share the memory for keys and values between the two groups of pages.

    The sliding group gets what `max_num_seqs` sequences can need of it; the full group gets the rest, but no more
    than all of them can fill.

    Raises:
        ConfigError: the memory does not hold one sequence of `max_model_len`.
    """
    size, dtype, block = config.page_size, config.kv_cache_dtype, config.num_speculative_tokens + 1
    windows = [mask.window for mask in draft.layers if mask.window is not None] if draft else []
    window = max(windows) if windows else None
    # One round is in flight while the next is reserved, so a table reaches two blocks beyond the last token.
    width = -(-(config.max_model_len + 2 * block) // size)
    sliding_each = 0 if window is None else min(width, -(-(window + 3 * block) // size) + 1)
    full_layers = 0 if draft is None else draft.num_hidden_layers - len(windows)
    full_bytes = bytes_per_token(target, target.num_hidden_layers, dtype)
    full_bytes += bytes_per_token(draft, full_layers, dtype) if draft else 0
    sliding_bytes = bytes_per_token(draft, len(windows), dtype) if draft else 0
    budget = config.kv_cache_memory_bytes or free_bytes(config)
    sliding_pages = config.max_num_seqs * sliding_each
    left = budget - sliding_pages * size * sliding_bytes
    full_pages = min(left // (size * full_bytes), config.max_num_seqs * width)
    if full_pages < width:
        raise ConfigError(
            f"{budget / 2**30:.2f} GiB for keys and values hold {max(full_pages, 0) * size} tokens, and one sequence "
            f"of max_model_len={config.max_model_len} needs {width * size}; lower max_model_len or max_num_seqs, "
            "or raise gpu_memory_utilization or kv_cache_memory_bytes."
        )
    return Layout(size, block, full_pages, sliding_pages, window, width)


def free_bytes(config: EngineConfig) -> int:
    """Bytes that the devices have left for keys and values."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    each = stats["bytes_limit"] * config.gpu_memory_utilization - stats["bytes_in_use"]
    return int(each) * config.tensor_parallel_size


def make_caches(
    target: TargetConfig, draft: DraftConfig | None, layout: Layout, config: EngineConfig, mesh: Mesh
) -> Caches:
    """Empty pools for every layer."""

    def cache(model: DecoderConfig, groups: tuple[int, ...]) -> PagedKVCache:
        pages = {FULL: layout.full_pages, SLIDING: layout.sliding_pages}
        shapes = [(pages[g], model.num_key_value_heads, layout.page_size, model.head_dim) for g in groups]

        def pools() -> list[jax.Array]:
            placed = [mesh.place(("P", "K", "S", "H"), shape) for shape in shapes]
            return [jnp.zeros(s, config.kv_cache_dtype, device=p) for s, p in zip(shapes, placed, strict=True)]

        return PagedKVCache(pools(), pools(), group_of=groups, mesh=mesh.mesh if mesh.mesh.size > 1 else None)

    return Caches(
        target=cache(target, (FULL,) * target.num_hidden_layers),
        draft=PagedKVCache([], []) if draft is None else cache(draft, tuple(group_of(m.window) for m in draft.layers)),
    )
