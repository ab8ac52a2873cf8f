"""Descriptions of models: frozen and hashable, since compiled functions are keyed by them.

They hold everything that decides what a compiled function computes, in one normalised form: capture layers are indices
of target layers, masks are per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from dflash_jax.spec.quantization import Quantization

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
        gated: whether each output is multiplied by the sigmoid of a gate, which is projected beside the query.
    """

    causal: bool = True
    gated: bool = False

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
class GatedDelta:
    """A mixer that keeps one recurrent state of a sequence instead of keys and values (Gated DeltaNet).

    Attributes:
        key_heads: HK, heads of queries and keys.
        value_heads: HV, heads of values, a multiple of HK; value head h reads key head h // (HV // HK).
        key_dim: dk, size of a query or key.
        value_dim: dv, size of a value.
        conv_width: taps of the causal convolution over queries, keys and values; the last is the current token's.
        activation: of the gate that multiplies the normed output; `output_gate_type` in a config.json.

    Source: arXiv 2412.06464; transformers' Qwen3_5GatedDeltaNet.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: Literal["silu", "sigmoid"] = "silu"

    @property
    def values_per_key(self) -> int:
        """The number of value heads that read a key head, r = HV / HK."""
        return self.value_heads // self.key_heads

    @property
    def channels_per_key(self) -> int:
        """Channels of the convolution of one key head: its query, its key and its value heads, c = 2 dk + r dv."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim


@dataclass(frozen=True)
class Dense:
    """A SwiGLU MLP; its width is `DecoderConfig.intermediate_size`."""


@dataclass(frozen=True)
class Experts:
    """A mixture of SwiGLU experts, of which a router chooses some for each token.

    Attributes:
        count: X, number of experts.
        per_token: k, experts that a token is sent to: those of the largest router weights, the first of equals.
        width: M, hidden units of an expert.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        shared_width: hidden units of the expert that sees every token, whose output a gate scales; None if there is
            none.

    Source: transformers' Qwen3MoeSparseMoeBlock and Qwen3_5MoeSparseMoeBlock.
    """

    count: int
    per_token: int
    width: int
    renormalize: bool
    shared_width: int | None = None


Mixer = FullAttention | WindowAttention | GatedDelta
Mlp = Dense | Experts


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
    def mask(self) -> LayerMask:
        """What the queries of an attention layer see.

        Raises:
            TypeError: the layer has no attention.
        """
        if isinstance(self.mixer, GatedDelta):
            raise TypeError("A Gated DeltaNet layer has no mask; ask the layers of DecoderConfig.attention_layers.")
        return self.mixer.mask

    @property
    def window(self) -> int | None:
        """W, how many tokens of a sequence an attention layer needs at most; None is all.

        Raises:
            TypeError: the layer has no attention.
        """
        return self.mask.window


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with Hugging Face's field names; each `rope_type` reads its own fields only.

    `partial_rotary_factor` is the share of a head's dimensions that are rotated: the first ones.
    """

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
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """The number of dimensions of a head that are rotated; halves of these first ones are paired."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class DecoderConfig:
    """What targets and drafters have in common; `layers` describes each of the L decoder layers.

    Attributes:
        zero_centered_norms: norms of layers, queries, keys and the last one multiply by 1 + w in float32, w being what
            the checkpoint holds. The norm inside of a Gated DeltaNet layer multiplies by w.
        kv_copies: how many of the kv heads, side by side, are one kv head of the checkpoint (`over`).
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F of the layers without experts; 0 if all have some
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
    zero_centered_norms: bool = field(default=False, kw_only=True)
    kv_copies: int = field(default=1, kw_only=True)

    def over(self, devices: int) -> Self:
        """The model as so many devices hold it.

        Where there are more devices than kv heads, each kv head is copied, so that every device has one, for its share
        of the queries. Else every device would hold all kv heads, twice the bytes of a token with two on four devices,
        and compute the attention of all queries.
        """
        stored = self.stored
        copies, rest = divmod(devices, stored.num_key_value_heads)
        if rest or copies == 0 or self.num_attention_heads % devices:
            return stored
        return replace(stored, num_key_value_heads=devices, kv_copies=copies)

    @property
    def stored(self) -> Self:
        """The model as its checkpoint holds it."""
        return replace(self, num_key_value_heads=self.num_key_value_heads // self.kv_copies, kv_copies=1)

    @property
    def num_hidden_layers(self) -> int:
        """L, the number of decoder layers."""
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if not isinstance(layer.mixer, GatedDelta))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mixer, GatedDelta))

    @property
    def gated_delta(self) -> GatedDelta | None:
        """The mixer of all recurrent layers; None if there are none."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)), None)

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of all layers that have one; None if there are none."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def has_gated_attention(self) -> bool:
        """Whether attention layers gate their outputs; all do, or none."""
        return any(isinstance(layer.mixer, FullAttention) and layer.mixer.gated for layer in self.layers)


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A Qwen3, Qwen3-Next, Qwen3.5 or Llama model, with Hugging Face's field names.

    Attributes:
        weight_block_size: rows and columns of the blocks that share a scale in a block-wise fp8 checkpoint; else None.
        quantization: what the checkpoint says of its quantised matrices; None if it says nothing.
        num_tokens: the first rows of the vocabulary, which a tokenizer or the end of texts names; those behind are
            padding, which is read and never emitted. None is all rows, and what config.json alone says.
    """

    architecture: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] | None
    quantization: Quantization | None = None
    num_tokens: int | None = None


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
