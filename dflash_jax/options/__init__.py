"""Options of engine and server, each declared once; no JAX."""

from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.engine_config import EngineConfig

__all__ = ["EngineArgs", "EngineConfig"]
