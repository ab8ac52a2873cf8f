"""What a model is: frozen descriptions, hashable, so that each is the key of the functions compiled for it.

They hold everything that decides what a compiled function computes, tap ids and masks in their one
normalised form included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mask = Literal["causal", "block"]  # as in `pallas_kernels.lib.masks`, which would bring JAX and every kernel along


@dataclass(frozen=True)
class LayerMask:
    """Which keys a layer's queries see: `pallas_kernels.lib.masks.visible` says what the two fields mean."""

    mask: Mask = "causal"
    window: int | None = None


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields of one `rope_type` are unused by the others."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """What target and drafter layers have in common. `layers` has one mask for each of the L layers."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerMask, ...]
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint

    @property
    def num_hidden_layers(self) -> int:
        """L."""
        return len(self.layers)


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A Qwen3 or Llama model."""

    architecture: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] | None


@dataclass(frozen=True)
class DraftConfig(DecoderConfig):
    """A DFlash drafter.

    Attributes:
        block_size: G, the anchor and the G-1 tokens drafted in one pass.
        target_layer_ids: taps; id i is the residual output of target layer i (Hugging Face `hidden_states[i+1]`).
        mask_token_id: the token whose target embedding fills the undrafted positions.
        target_hidden_size: D of the target.
        draft_vocab_size: rows of the drafter's own head, None when it uses the target's.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    target_hidden_size: int
    draft_vocab_size: int | None
    weight_block_size: tuple[int, int] | None
