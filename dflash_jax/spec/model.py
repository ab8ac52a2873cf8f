"""Descriptions of models: frozen and hashable, since compiled functions are keyed by them.

They hold everything that decides what a compiled function computes, in one normalised form: capture layers are indices
of target layers, masks are per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mask = Literal["causal", "block"]  # as in `pallas_kernels.lib.masks`, which would bring JAX and every kernel along


@dataclass(frozen=True)
class LayerMask:
    """Which keys the queries of an attention layer see; `pallas_kernels.lib.masks.visible` defines it.

    Attributes:
        mask: "causal": keys up to the query's position; "block": keys behind it, too.
        window: W; keys must be less than W positions away. None is no limit.
    """

    mask: Mask = "causal"
    window: int | None = None


@dataclass(frozen=True)
class FullAttention:
    """A mixer that attends to every stored token.

    Attributes:
        causal: whether a query sees no later token; full layers of drafters see the whole block.
    """

    causal: bool = True

    @property
    def mask(self) -> LayerMask:
        """What its queries see."""
        return LayerMask("causal" if self.causal else "block")


@dataclass(frozen=True)
class WindowAttention:
    """A mixer that attends to tokens less than `window` positions away.

    Attributes:
        window: W, tokens.
        causal: whether a query sees no later token.
    """

    window: int
    causal: bool = True

    @property
    def mask(self) -> LayerMask:
        """What its queries see."""
        return LayerMask("causal" if self.causal else "block", self.window)


@dataclass(frozen=True)
class Dense:
    """A SwiGLU MLP; its width is `DecoderConfig.intermediate_size`."""


Mixer = FullAttention | WindowAttention
Mlp = Dense


@dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer is made of.

    Attributes:
        mixer: mixes the tokens of a sequence.
        mlp: transforms each token.
    """

    mixer: Mixer
    mlp: Mlp = Dense()

    @staticmethod
    def attention(window: int | None, *, causal: bool) -> LayerSpec:
        """A layer with softmax attention; without a window it is full."""
        return LayerSpec(FullAttention(causal) if window is None else WindowAttention(window, causal))

    @property
    def window(self) -> int | None:
        """W, how many tokens of a sequence the layer needs at most; None is all."""
        return self.mixer.mask.window


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with Hugging Face's field names; each `rope_type` reads its own fields only."""

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
    """What targets and drafters have in common; `layers` describes each of the L decoder layers."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerSpec, ...]
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint

    @property
    def num_hidden_layers(self) -> int:
        """L, the number of decoder layers."""
        return len(self.layers)


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A Qwen3 or Llama model, with Hugging Face's field names.

    Attributes:
        weight_block_size: rows and columns of the blocks that share a scale in a block-wise fp8 checkpoint; else None.
    """

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
        target_layer_ids: capture layers; id i is Hugging Face's `hidden_states[i+1]`: the residual stream after target
            layer i and, for the last layer, the final hidden state after the norm.
        mask_token_id: token whose target embedding stands at the positions to be drafted.
        target_hidden_size: D of the target.
        draft_vocab_size: rows of the drafter's own head; None if it uses the target's head.
        weight_block_size: as for `TargetConfig`.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    target_hidden_size: int
    draft_vocab_size: int | None
    weight_block_size: tuple[int, int] | None
