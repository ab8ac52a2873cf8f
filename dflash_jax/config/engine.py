"""The options of an engine, checked against the models they are for."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from dflash_jax.config.model import DraftConfig, TargetConfig
from dflash_jax.core import is_int
from dflash_jax.errors import ConfigError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
KV_CACHE_DTYPES = {
    **DTYPES,
    "fp8": jnp.float8_e4m3fn,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine; `LLM` says what each means. Dtypes are resolved, lengths are numbers."""

    dtype: jnp.dtype
    kv_cache_dtype: jnp.dtype
    draft_kv_cache_dtype: jnp.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int  # 0 without a drafter
    tensor_parallel_size: int
    page_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None  # None: what the device has left

    @staticmethod
    def of(
        target: TargetConfig,
        draft: DraftConfig | None,
        *,
        dtype: str,
        kv_cache_dtype: str,
        max_model_len: int | None,
        num_speculative_tokens: int | None,
        enable_prefix_caching: bool,
        gpu_memory_utilization: float,
        kv_cache_memory_bytes: int | None,
        draft_kv_cache_dtype: str = "auto",
        **sizes: int,
    ) -> EngineConfig:
        """Resolve the options against the models.

        Raises:
            ConfigError: an option is unknown, out of range, or contradicts the models.
        """
        own = "float32" if target.dtype == "float32" else "bfloat16"
        compute = _choose("dtype", dtype, DTYPES, own)
        longest = target.max_position_embeddings if max_model_len is None else max_model_len
        for name, value in {"max_model_len": longest, **sizes}.items():
            if not is_int(value) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 1.")
        if not 0 < gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={gpu_memory_utilization!r} must be in (0, 1].")
        if kv_cache_memory_bytes is not None and (not is_int(kv_cache_memory_bytes) or kv_cache_memory_bytes < 1):
            raise ConfigError(f"kv_cache_memory_bytes={kv_cache_memory_bytes!r} must be an integer of at least 1.")
        if longest > target.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={longest} exceeds the model's max_position_embeddings="
                f"{target.max_position_embeddings}; lower it, or extend the model with rope_scaling in its config.json."
            )
        stored = compute.name if kv_cache_dtype == "auto" else kv_cache_dtype
        return EngineConfig(
            dtype=compute,
            kv_cache_dtype=_choose("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES, stored),
            draft_kv_cache_dtype=_choose("draft_kv_cache_dtype", draft_kv_cache_dtype, KV_CACHE_DTYPES, stored),
            max_model_len=longest,
            num_speculative_tokens=_num_drafts(num_speculative_tokens, draft),
            enable_prefix_caching=enable_prefix_caching,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            **sizes,
        )


def _choose(name: str, value: str, known: dict[str, type], auto: str) -> jnp.dtype:
    if value not in ("auto", *known):
        raise ConfigError(f"{name}={value!r} is unknown; choose one of auto, {', '.join(known)}.")
    return jnp.dtype(known[auto if value == "auto" else value])


def _num_drafts(wanted: int | None, draft: DraftConfig | None) -> int:
    if draft is None:
        if wanted is not None:
            raise ConfigError(f"num_speculative_tokens={wanted} needs a drafter; give draft_model, or leave it out.")
        return 0
    most = draft.block_size - 1
    if wanted is None:
        return most
    if not is_int(wanted) or not 1 <= wanted <= most:
        raise ConfigError(
            f"num_speculative_tokens={wanted!r} must be from 1 to {most}: "
            f"the drafter's block_size is {draft.block_size}."
        )
    return wanted
