"""The options of an engine, checked against its models."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import is_int
from dflash_jax.options.dtypes import DTYPES, KV_CACHE_DTYPES
from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.option import check_options
from dflash_jax.spec.model import DraftConfig, TargetConfig

# What options are that are left out, and that memory may lower (`engine.device.budget`).
ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 8192}

logger = logging.getLogger("dflash_jax")


@dataclass(frozen=True)
class EngineConfig:
    """`EngineArgs` resolved against the models: dtypes are NumPy dtypes, lengths are numbers of tokens."""

    dtype: np.dtype
    draft_dtype: np.dtype  # of the drafter's matrix products
    kv_cache_dtype: np.dtype
    draft_kv_cache_dtype: np.dtype
    draft_quantization: str | None  # None: the drafter's matrices are in draft_dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_seqs: int | None  # None: no bound
    num_speculative_tokens: int  # 0: no drafter
    adaptive_speculation: bool  # whether a round may verify fewer drafts
    tensor_parallel_size: int
    page_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    gpu_memory_bytes: int | None  # of each device; None: what gpu_memory_utilization says
    kv_cache_memory_bytes: int | None  # None: what gpu_memory_utilization leaves
    state_cache_fraction: float  # of the memory of the KV cache
    compile_at_start: bool | None  # None: on accelerators
    flexible: frozenset[str]  # options that were left out and may be lowered to what memory holds

    @staticmethod
    def of(args: EngineArgs, target: TargetConfig, draft: DraftConfig | None, *, on_cpu: bool = False) -> EngineConfig:
        """Resolve the options against the models.

        On CPUs "auto" is float32. The drafter's matrix products are then bfloat16, which is faster for their several
        rows: drafts never change an output.

        Raises:
            ConfigError: an option is unknown, out of bounds, or contradicts the models.
        """
        _check_against_models(args, target, draft)
        check_options(args)
        automatic = "float32" if target.dtype == "float32" or on_cpu else "bfloat16"
        dtype = np.dtype(DTYPES[automatic if args.dtype == "auto" else args.dtype])
        is_narrow = on_cpu and args.dtype == "auto" and args.tensor_parallel_size == 1
        stored = dtype.name if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        draft_stored = stored if args.draft_kv_cache_dtype == "auto" else args.draft_kv_cache_dtype
        block_drafts = 0 if draft is None else draft.block_size - 1
        longest = target.max_position_embeddings if args.max_model_len is None else args.max_model_len
        drafts = block_drafts if args.num_speculative_tokens is None else args.num_speculative_tokens
        if draft is not None and drafts == draft.block_size:
            logger.info("num_speculative_tokens=%d is the whole block: %d drafts and the anchor", drafts, block_drafts)
            drafts = block_drafts
        left_out = frozenset(name for name in ROOMY if getattr(args, name) is None)
        resolved = {
            "dtype": dtype,
            "draft_dtype": np.dtype(ml_dtypes.bfloat16) if is_narrow else dtype,
            "kv_cache_dtype": np.dtype(KV_CACHE_DTYPES[stored]),
            "draft_kv_cache_dtype": np.dtype(KV_CACHE_DTYPES[draft_stored]),
            "max_model_len": longest,
            "num_speculative_tokens": drafts,
            "adaptive_speculation": draft is not None and args.num_speculative_tokens is None,
            "flexible": left_out,
            **{name: ROOMY[name] for name in left_out},
        }
        unchanged = {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name not in resolved}
        return EngineConfig(**resolved, **unchanged)


def _check_against_models(args: EngineArgs, target: TargetConfig, draft: DraftConfig | None) -> None:
    """Refuse options that are allowed, but not for these models.

    Raises:
        ConfigError: names what the models allow.
    """
    longest, drafts = args.max_model_len, args.num_speculative_tokens
    if is_int(longest) and longest > target.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={longest} exceeds the model's max_position_embeddings="
            f"{target.max_position_embeddings}; lower it, or extend the model with rope_scaling in its config.json."
        )
    if draft is None:
        for name in ("num_speculative_tokens", "draft_quantization"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name}={getattr(args, name)!r} needs a drafter; give draft_model, or leave it out.")
    elif is_int(drafts) and not 1 <= drafts <= draft.block_size:
        raise ConfigError(
            f"num_speculative_tokens={drafts} must be from 1 to {draft.block_size - 1}: "
            f"the drafter's block_size is {draft.block_size}."
        )
