"""Frozen configurations; every check of a bad `config.json` is in this package."""

from dflash_jax.spec.draft import check_draft_fits, draft_config
from dflash_jax.spec.fields import Fields, read_json
from dflash_jax.spec.model import DecoderConfig, DraftConfig, LayerMask, RopeConfig, TargetConfig
from dflash_jax.spec.target import target_config

__all__ = [
    "DecoderConfig",
    "DraftConfig",
    "Fields",
    "LayerMask",
    "RopeConfig",
    "TargetConfig",
    "check_draft_fits",
    "draft_config",
    "read_json",
    "target_config",
]
