"""DFlash speculative decoding in pure JAX: the whole Python API."""

from dflash_jax.async_llm import AsyncLLM
from dflash_jax.core import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError, EngineDeadError, QueueFullError, RequestError
from dflash_jax.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DFlashError",
    "EngineDeadError",
    "Logprob",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
