"""The engine's options as flags, for every command that loads an engine itself. The server has vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from dflash_jax.options import EngineArgs
from dflash_jax.options.engine_config import DRAFT_QUANTIZATIONS, DTYPES, KV_CACHE_DTYPES

ON_OFF = argparse.BooleanOptionalAction
KV_DTYPES = ["auto", *KV_CACHE_DTYPES]
FLAGS: dict[str, dict[str, Any]] = {  # by the name in `EngineArgs`
    "dtype": {"choices": ["auto", *DTYPES], "help": "of parameters and activations"},
    "kv_cache_dtype": {"choices": KV_DTYPES, "help": "of stored K and V"},
    "draft_kv_cache_dtype": {"choices": KV_DTYPES, "help": "the same of the drafter's"},
    "draft_quantization": {"choices": DRAFT_QUANTIZATIONS, "help": "of the drafter's matrix products"},
    "max_model_len": {"type": int, "help": "tokens of prompt and completion; the model's without it"},
    "max_num_seqs": {"type": int, "help": "most sequences that run side by side"},
    "max_num_batched_tokens": {"type": int, "help": "prompt tokens a step"},
    "num_speculative_tokens": {"type": int, "help": "drafts verified each round; without it, as many as pay"},
    "tensor_parallel_size": {"type": int, "help": "devices that share the model"},
    "page_size": {"type": int, "help": "tokens a page of the KV cache"},
    "enable_prefix_caching": {"action": ON_OFF, "help": "keep pages of past prompts"},
    "gpu_memory_utilization": {"type": float, "help": "share of its memory"},
    "kv_cache_memory_bytes": {"type": int, "help": "memory for the KV cache; overrides the share"},
    "compile_at_start": {"action": ON_OFF, "help": "compile every program before the first request"},
}


def add_engine_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of model, drafter and engine.

    Args:
        parser: of the command.
        without: names in `EngineArgs` that the command takes otherwise, or decides.
        defaults: by such a name, where they are not those of `EngineArgs`.
    """
    group, own = parser.add_argument_group("engine"), EngineArgs(**defaults)
    group.add_argument("--model", help="folder or Hugging Face Hub id; without it, the embedded pair")
    group.add_argument("--draft-model", help="the same of its DFlash drafter; without it, one token a pass")
    for name, options in FLAGS.items():
        if name not in without:
            group.add_argument(f"--{name.replace('_', '-')}", default=getattr(own, name), **options)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `EngineArgs` that the command line gives."""
    return {name: getattr(args, name) for name in FLAGS if hasattr(args, name)}
