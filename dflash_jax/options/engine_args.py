"""The options of an engine as users give them. Names are vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_jax.options.dtypes import DRAFT_QUANTIZATIONS, DTYPES, KV_CACHE_DTYPES
from dflash_jax.options.flag_values import drafts_of_block
from dflash_jax.options.kinds import Bytes, Choice, Number, Switch
from dflash_jax.options.option import Flag, documented, option, options_of, unknown_option
from dflash_jax.spec.quantization import METHOD_OF

SIZE, SIZE_OR_NONE = Number(1), Number(1, or_none=True)
STORED = Choice(("auto", *KV_CACHE_DTYPES))
SPECULATION, ENGINE = "speculation", "engine"  # titles of the server's flags


@documented
@dataclass(frozen=True)
class EngineArgs:
    """Options of `LLM`, `AsyncLLM` and the server."""

    dtype: str = option(
        "auto",
        Choice(("auto", *DTYPES)),
        "type of parameters and activations; auto is the checkpoint's, where float16 and fp8 become bfloat16, and on "
        "CPUs float32 (but bfloat16 for a drafter's matrix products, which change no output)",
        server_group=ENGINE,
    )
    quantization: str | None = option(
        None,
        Choice(tuple(METHOD_OF), or_none=True),
        "what the checkpoint's matrices are, by vLLM's and SGLang's names; its config.json says so anyway, and another "
        "one is an error, but fp8 rounds those of a checkpoint that is not quantised",
        unset="none: what the checkpoint says",
        server_group=ENGINE,
        server_names=("--quantization", "-q"),
    )
    kv_cache_dtype: str = option(
        "auto",
        STORED,
        "type of stored keys and values; auto takes dtype, fp8 is fp8_e4m3, and int4_had is 4 bits, with keys rotated "
        "by a Hadamard transform",
        server_group=ENGINE,
    )
    draft_kv_cache_dtype: str = option(
        "auto",
        STORED,
        "type of the drafter's stored keys and values; auto takes kv_cache_dtype",
        server_group=SPECULATION,
        must_agree=True,
        speculative_key="kv_cache_dtype",
    )
    draft_quantization: str | None = option(
        None,
        Choice(DRAFT_QUANTIZATIONS, or_none=True),
        "type of the drafter's matrices; changes drafts, never outputs; fp8 multiplies in fp8, its pass over the head "
        "included, which is faster where the device does, and slower on CPUs; int4 takes least memory: it rounds the "
        "matrices in groups of 128, and uses the target's head as it is",
        unset="none: dtype, or under gpu_memory_bytes the widest that fits",
        server_group=SPECULATION,
        server_names=("--draft-quantization", "--speculative-draft-model-quantization"),
        must_agree=True,
        speculative_key="quantization",
    )
    max_model_len: int | None = option(
        None,
        SIZE_OR_NONE,
        "most tokens of prompt and completion",
        unit="TOKENS",
        unset="the model's max_position_embeddings",
        server_group=ENGINE,
        server_names=("--max-model-len", "--context-length"),
    )
    max_num_seqs: int | None = option(
        None,
        SIZE_OR_NONE,
        "most sequences that run side by side",
        unit="SEQUENCES",
        unset="none: 16, or fewer where memory is short",
        server_group=ENGINE,
        server_names=("--max-num-seqs", "--max-running-requests"),
    )
    max_num_batched_tokens: int | None = option(
        None,
        SIZE_OR_NONE,
        "most prompt tokens processed in one step, over all sequences",
        unit="TOKENS",
        unset="none: 8192, or fewer where memory is short",
        server_group=ENGINE,
        server_names=("--max-num-batched-tokens", "--chunked-prefill-size"),
    )
    max_num_queued_seqs: int | None = option(
        None,
        SIZE_OR_NONE,
        "most sequences (n of each request) that wait in `AsyncLLM` and the server; none bounds nothing",
        unit="SEQUENCES",
        server_group=ENGINE,
        server_names=("--max-num-queued-reqs", "--max-queued-requests"),
    )
    num_speculative_tokens: int | None = option(
        None,
        SIZE_OR_NONE,
        "drafts that every round verifies, at most the drafter's block_size - 1; block_size itself means the whole "
        "block, too",
        unit="DRAFTS",
        unset="none: each round verifies as many as pay",
        server_group=SPECULATION,
        server_names=("--num-speculative-tokens", "--spec-tokens"),
        must_agree=True,
        speculative_key="num_speculative_tokens",
        server_flags=(
            Flag(
                ("--speculative-num-draft-tokens",),
                "SGLang's name of --num-speculative-tokens, which counts the target's own token, too",
                unset="as many as pay",
                arguments={"type": drafts_of_block, "metavar": "TOKENS"},
            ),
        ),
    )
    tensor_parallel_size: int = option(
        1,
        SIZE,
        "devices that share the model",
        unit="DEVICES",
        server_group=ENGINE,
        server_names=("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    )
    page_size: int = option(
        64,
        SIZE,
        "tokens of a page of the KV cache",
        unit="TOKENS",
        server_group=ENGINE,
        server_names=("--block-size", "--page-size"),
    )
    enable_prefix_caching: bool = option(
        True,
        Switch(),
        "keep the pages of past prompts, and share them with prompts that begin alike",
        server_group=ENGINE,
        server_flags=(
            Flag(
                ("--disable-radix-cache",),
                "SGLang's name of --no-enable-prefix-caching",
                unset="prefix caching is on",
                arguments={"action": "store_false"},
            ),
        ),
    )
    gpu_memory_utilization: float = option(
        0.9,
        Number(0, 1, is_whole=False, is_open=True),
        "share of the device's memory for parameters and KV cache, above 0 and at most 1",
        unit="SHARE",
        server_group=ENGINE,
        server_names=("--gpu-memory-utilization", "--mem-fraction-static"),
    )
    gpu_memory_bytes: int | None = option(
        None,
        Bytes(1, or_none=True),
        "most memory that the engine takes of each device in all, such as 23.0GiB: parameters, KV cache, states, "
        "temporaries and what CUDA itself takes; comes before the share",
        unit="BYTES",
        unset="none: gpu_memory_utilization decides",
        server_group=ENGINE,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        Bytes(1, or_none=True),
        "memory for the KV cache of all devices together, instead of what the share leaves",
        unit="BYTES",
        unset="none: what the share leaves",
        server_group=ENGINE,
    )
    state_cache_fraction: float = option(
        0.1,
        Number(0, 1, is_whole=False),
        "share of the KV cache's memory for snapshots of recurrent states (Gated DeltaNet), with which prompts that "
        "begin alike go on; 0 shares nothing",
        unit="SHARE",
        server_group=ENGINE,
    )
    compile_at_start: bool | None = option(
        False,
        Switch(or_none=True),
        "compile every program before the first request; off compiles each when it is first needed; none, the default "
        "of servers, compiles every program on accelerators, and on CPUs what one request needs",
        server_group=ENGINE,
    )
    seed: int | None = option(
        0,
        Number(-(2**63), 2**63 - 1, or_none=True),
        "seed of the seeds drawn for requests that bring none; none makes every run differ",
        unit="N",
        server_group=ENGINE,
        server_names=("--seed", "--random-seed"),
    )

    @staticmethod
    def of(options: dict[str, Any]) -> EngineArgs:
        """The options with these names; the others have their defaults.

        Raises:
            ConfigError: a name is unknown; a name near it is suggested.
        """
        known = options_of(EngineArgs)
        for name in options:
            if name not in known:
                raise unknown_option(name, known)
        return EngineArgs(**options)
