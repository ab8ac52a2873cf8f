"""The options of an engine, checked against the models they are for."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import is_int
from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.spec.model import DraftConfig, TargetConfig

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KV_CACHE_DTYPES = {
    **DTYPES,
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
DRAFT_QUANTIZATIONS = ("fp8",)


@dataclass(frozen=True)
class EngineConfig:
    """`EngineArgs` resolved against the models: dtypes are dtypes, lengths are numbers."""

    dtype: np.dtype
    draft_dtype: np.dtype  # of the drafter's matrix products
    kv_cache_dtype: np.dtype
    draft_kv_cache_dtype: np.dtype
    draft_quantization: str | None  # one of DRAFT_QUANTIZATIONS; None leaves the drafter as it is
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_seqs: int | None  # None bounds nothing
    num_speculative_tokens: int  # 0 without a drafter
    adaptive_speculation: bool  # whether a round may verify fewer
    tensor_parallel_size: int
    page_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None  # None: what the device has left
    compile_at_start: bool | None  # None: on accelerators

    @staticmethod
    def of(args: EngineArgs, target: TargetConfig, draft: DraftConfig | None, *, on_cpu: bool = False) -> EngineConfig:
        """Resolve the options against the models.

        On CPUs "auto" is float32, except for the matrix products of a drafter, which never change an output: of its
        rows, always several, they are faster in bfloat16.

        Raises:
            ConfigError: an option is unknown, out of range, or contradicts the models.
        """
        own = "float32" if target.dtype == "float32" or on_cpu else "bfloat16"
        compute = _choose("dtype", args.dtype, DTYPES, own)
        is_narrow = on_cpu and args.dtype == "auto" and args.tensor_parallel_size == 1
        longest = target.max_position_embeddings if args.max_model_len is None else args.max_model_len
        if not 0 < args.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={args.gpu_memory_utilization!r} must be in (0, 1].")
        for name in ("enable_prefix_caching", "compile_at_start"):
            value = getattr(args, name)
            if not (isinstance(value, bool) or (name == "compile_at_start" and value is None)):
                raise ConfigError(f"{name}={value!r} must be True or False.")
        stored = compute.name if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        resolved = EngineConfig(
            dtype=compute,
            draft_dtype=np.dtype(ml_dtypes.bfloat16) if is_narrow else compute,
            kv_cache_dtype=_choose("kv_cache_dtype", args.kv_cache_dtype, KV_CACHE_DTYPES, stored),
            draft_kv_cache_dtype=_choose("draft_kv_cache_dtype", args.draft_kv_cache_dtype, KV_CACHE_DTYPES, stored),
            draft_quantization=_draft_quantization(args.draft_quantization, draft),
            max_model_len=_size("max_model_len", longest),
            max_num_seqs=_size("max_num_seqs", args.max_num_seqs),
            max_num_batched_tokens=_size("max_num_batched_tokens", args.max_num_batched_tokens),
            max_num_queued_seqs=_optional_size("max_num_queued_seqs", args.max_num_queued_seqs),
            num_speculative_tokens=_num_drafts(args.num_speculative_tokens, draft),
            adaptive_speculation=draft is not None and args.num_speculative_tokens is None,
            tensor_parallel_size=_size("tensor_parallel_size", args.tensor_parallel_size),
            page_size=_size("page_size", args.page_size),
            enable_prefix_caching=args.enable_prefix_caching,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=_optional_size("kv_cache_memory_bytes", args.kv_cache_memory_bytes),
            compile_at_start=args.compile_at_start,
        )
        if longest > target.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={longest} exceeds the model's max_position_embeddings="
                f"{target.max_position_embeddings}; lower it, or extend the model with rope_scaling in its config.json."
            )
        return resolved


def _size(name: str, value: int) -> int:
    if not is_int(value) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1.")
    return value


def _optional_size(name: str, value: int | None) -> int | None:
    return None if value is None else _size(name, value)


def _choose(name: str, value: str, known: dict[str, type], auto: str) -> np.dtype:
    if value not in ("auto", *known):
        raise ConfigError(f"{name}={value!r} is unknown; choose one of auto, {', '.join(known)}.")
    return np.dtype(known[auto if value == "auto" else value])


def _draft_quantization(wanted: str | None, draft: DraftConfig | None) -> str | None:
    if wanted is None:
        return None
    if wanted not in DRAFT_QUANTIZATIONS:
        raise ConfigError(
            f"draft_quantization={wanted!r} is unknown; choose one of None, {', '.join(DRAFT_QUANTIZATIONS)}."
        )
    if draft is None:
        raise ConfigError(f"draft_quantization={wanted!r} needs a drafter; give draft_model, or leave it out.")
    return wanted


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
