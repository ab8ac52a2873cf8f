"""DFlash speculative decoding in pure JAX: the whole Python API."""

from dflash_jax.core import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError, RequestError
from dflash_jax.llm import LLM

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DFlashError",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokensPrompt",
]
