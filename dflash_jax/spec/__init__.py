"""What a checkpoint's `config.json` says, frozen; every check of a bad one is in this package."""

from dflash_jax.spec.draft import check_draft_fits, draft_config
from dflash_jax.spec.fields import Fields, read_json
from dflash_jax.spec.model import (
    DecoderConfig,
    Dense,
    DraftConfig,
    Experts,
    FullAttention,
    GatedDelta,
    LayerMask,
    LayerSpec,
    RopeConfig,
    TargetConfig,
    WindowAttention,
)
from dflash_jax.spec.target import target_config

__all__ = [
    "DecoderConfig",
    "Dense",
    "DraftConfig",
    "Experts",
    "Fields",
    "FullAttention",
    "GatedDelta",
    "LayerMask",
    "LayerSpec",
    "RopeConfig",
    "TargetConfig",
    "WindowAttention",
    "check_draft_fits",
    "draft_config",
    "read_json",
    "target_config",
]
