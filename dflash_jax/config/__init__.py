"""Frozen configurations; every check of a bad `config.json` or option is in this package."""

from dflash_jax.config.args import EngineArgs
from dflash_jax.config.draft import check_draft_fits, draft_config
from dflash_jax.config.engine import EngineConfig
from dflash_jax.config.fields import Fields, read_json
from dflash_jax.config.model import DecoderConfig, DraftConfig, LayerMask, RopeConfig, TargetConfig
from dflash_jax.config.target import target_config

__all__ = [
    "DecoderConfig",
    "DraftConfig",
    "EngineArgs",
    "EngineConfig",
    "Fields",
    "LayerMask",
    "RopeConfig",
    "TargetConfig",
    "check_draft_fits",
    "draft_config",
    "read_json",
    "target_config",
]
