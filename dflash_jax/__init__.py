"""DFlash speculative decoding in pure JAX: the whole Python API.

Names are imported when they are first asked for: a command of this package can say that it has started before it
imports JAX, which takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.async_llm import AsyncLLM
    from dflash_jax.base.errors import (
        CheckpointError,
        ConfigError,
        DFlashError,
        EngineDeadError,
        ProgramLimitError,
        QueueFullError,
        RequestError,
    )
    from dflash_jax.base.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from dflash_jax.base.values import SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
    from dflash_jax.llm import LLM
else:  # where a checker of types would take any name for one of this module

    def __getattr__(name: str) -> object:
        """Import a public name; modules that import JAX come last."""
        if name in __all__:
            for home in ("base.errors", "base.outputs", "base.values", "llm", "async_llm"):
                module = import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*globals(), *__all__])


__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DFlashError",
    "EngineDeadError",
    "Logprob",
    "ProgramLimitError",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
