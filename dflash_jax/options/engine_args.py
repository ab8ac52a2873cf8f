"""The options of an engine as users give them, with their defaults. Names are vLLM's where it has them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from dflash_jax.base.errors import ConfigError


@dataclass(frozen=True)
class EngineArgs:
    """Options of `LLM`, `AsyncLLM` and the server.

    Attributes:
        dtype: "auto" (the checkpoint's; float16 and fp8 become bfloat16, and on CPUs all become float32, but for the
            matrix products of a drafter, which are in bfloat16 there), "float32" or "bfloat16".
        kv_cache_dtype: "auto" (dtype), "float32", "bfloat16", "fp8_e4m3", "fp8_e5m2" or "fp8" (e4m3).
        draft_kv_cache_dtype: the same of the drafter's keys and values; "auto" takes kv_cache_dtype.
        draft_quantization: "fp8" runs the drafter's matrix products in e4m3, over a copy of the head: faster where the
            device multiplies fp8, and slower on CPUs. It changes drafts, never outputs; None leaves them in dtype.
        max_model_len: most tokens of prompt and completion; None takes the target's max_position_embeddings.
        max_num_seqs: most sequences that run side by side.
        max_num_batched_tokens: most prompt tokens processed in one step, over all sequences.
        max_num_queued_seqs: most sequences that wait for `AsyncLLM`; None bounds nothing.
        num_speculative_tokens: drafts that every round verifies, at most the drafter's block_size - 1; None lets each
            round verify as many as pay.
        tensor_parallel_size: devices that share the model.
        page_size: tokens a page of the KV cache.
        enable_prefix_caching: keep the pages of past prompts, and take them up again for a prompt that begins alike.
        gpu_memory_utilization: share of the device's memory for parameters and KV cache.
        kv_cache_memory_bytes: memory for the KV cache of all devices together; overrides the share.
        compile_at_start: compile every step before the first request; otherwise each is compiled when first needed.
            None does so on accelerators, where programs are kept over restarts; on CPUs it compiles what a lone request
            needs, meanwhile.
        seed: of the seeds drawn for requests that bring none; None makes every run differ.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    draft_quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    max_num_queued_seqs: int | None = None
    num_speculative_tokens: int | None = None
    tensor_parallel_size: int = 1
    page_size: int = 64
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    compile_at_start: bool | None = False
    seed: int | None = 0

    @staticmethod
    def of(options: dict[str, Any]) -> EngineArgs:
        """Options by name.

        Raises:
            ConfigError: one is unknown; the nearest known one is named.
        """
        known = [field.name for field in fields(EngineArgs)]
        for name in options:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"there is no option {name!r}; did you mean {nearest!r}?")
        return EngineArgs(**options)
