"""Norm, rotary embedding, attention and MLP: what target and drafter layers are made of.

Modules are functional: parameters in, arrays out. They know nothing of where keys and values are kept; a layer
writes to and attends over a `KVCache` that it is handed and hands back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.parallel.collectives import Devices, project_add_norm, project_swiglu
from dflash_jax.spec import DecoderConfig, LayerMask, RopeConfig
from dflash_jax.weights.formats.fp8 import Quantized, QuantizedRows
from dflash_jax.weights.formats.weight import project
from dflash_jax.weights.tables import attention_table, declare, mlp_table, norms_table
from pallas_kernels.lib.norm import rms_norm
from pallas_kernels.lib.rotary import Rotary


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of the layers of one model, for B sequences. Dense today, paged in the engine."""

    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Store keys and values at their absolute positions, and give the queries; negative positions are not stored.

        Args:
            layer: whose they are.
            heads: as projected: of each kv head, side by side, its J - 2 query heads, its key and its value.
            rotary: what is done to them first: scales of all of them, norm and RoPE of queries and keys.
            positions: of the tokens.
        """
        ...

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """Attention of q over the stored keys at positions below kv_length that the mask lets it see."""
        ...

    def write_attend(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Both at once, of the queries of these heads."""
        q, cache = self.write(layer, heads, rotary, positions)
        return cache.attend(layer, q, positions, kv_length, mask), cache


@runtime_checkable
class ContextCache(KVCache, Protocol):
    """The `KVCache` of a drafter."""

    def write_context(
        self,
        heads: Sequence[Float[Array, "B T K _ H"]],
        rotary: Rotary,
        k_norms: Sequence[Float[Array, " H"] | None],
        positions: Int[Array, "B T"],
    ) -> ContextCache:
        """Store keys and values of every layer, as `write` does those of one.

        Args:
            heads: as projected: of each kv head, side by side, the key and the value of each layer; in one array for
                all layers, or in several, those of the first layers first.
            rotary: what is done to keys first, besides their norm.
            k_norms: weight of each layer's norm of keys, or None.
            positions: of the tokens.
        """
        ...


Rope = tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [H/2] in float32 and the factor on cos and sin.

    Sources: linear, arXiv 2306.15595; yarn, arXiv 2309.00071; llama3, Llama 3.1's reference code. The
    conventions for missing fields are those of transformers 5.
    """
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "linear":
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((rope.original_max_position_embeddings / wavelength - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * inverse / rope.factor + smooth * inverse).astype(np.float32), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse.astype(np.float32), 1.0


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    blended = inverse / rope.factor * ramp + inverse * (1 - ramp)

    def magnitude(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    return blended.astype(np.float32), magnitude(rope.factor) if factor is None else factor


def rope_tables(config: DecoderConfig, positions: Int[Array, "B T"]) -> Rope:
    """Cosines and sines of absolute positions, float32."""
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


class Attention(nn.Module):
    """Projections of one attention block; the attention itself is the cache's. `devices` are as for the layer."""

    config: DecoderConfig
    devices: Devices | None = None

    def setup(self) -> None:
        if self.has_variable("params", "qkv_proj"):  # where a drafter's are joined, they are not those of its table
            self.weights = dict(self.variables["params"])
        else:
            self.weights = declare(self, attention_table(self.config), self.config)

    def _project(self, name: str, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K J H"]:
        alone = self.devices is not None and self.devices.mesh.size == 1
        return project(x, self.weights[name], self.weights.get(f"{name}_bias"), alone=alone)

    def heads(self, x: Float[Array, "B T D"] | QuantizedRows, rope: Rope) -> tuple[Float[Array, "B T K J H"], Rotary]:
        """Of each kv head, side by side, its query heads, its key and its value; and what they still lack."""
        if "qkv_proj" not in self.weights:
            return jnp.concatenate([self._project("q_proj", x), self.keys_values(x)], axis=-2), self.rotary(rope)
        weight = self.weights["qkv_proj"]
        if isinstance(weight, Quantized) and weight.is_whole and "qkv_proj_bias" not in self.weights:
            raw, of_tokens, _ = weight.raw_product(x, x.dtype)
            return raw.reshape(*x.shape[:2], *weight.scales.shape), self.rotary(rope, (of_tokens, weight.scales))
        return self._project("qkv_proj", x), self.rotary(rope)

    def keys_values(self, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K 2 H"]:
        """The same without queries; of a drafter, whose queries have weights of their own."""
        return self._project("kv_proj", x)

    def rotary(self, rope: Rope, scales: tuple[Array, Array] | None = None) -> Rotary:
        """What projected heads lack before they are attended with; scales are those of fp8 products."""
        norms = self.weights.get("q_norm"), self.weights.get("k_norm")
        return Rotary(*rope, *norms, scales, self.config.rms_norm_eps)


class MLP(nn.Module):
    """SwiGLU, up to its last projection; `devices` are as for `project_swiglu`."""

    config: DecoderConfig
    devices: Devices | None = None

    def setup(self) -> None:
        self.weights = declare(self, mlp_table(self.config), self.config)

    def __call__(self, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T F"] | QuantizedRows:
        weight, bias = self.weights["gate_up_proj"], self.weights.get("gate_up_proj_bias")
        return project_swiglu(x, weight, bias, self.devices)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer; layer `index` of its cache and of its configuration's masks.

    `devices` are as for `project_add_norm`.
    """

    config: DecoderConfig
    index: int
    devices: Devices | None = None

    def setup(self) -> None:
        self.norms = declare(self, norms_table(), self.config)
        self.self_attn = Attention(self.config, self.devices)
        self.mlp = MLP(self.config, self.devices)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        h: Float[Array, "B T D"] | QuantizedRows,
        next_norm: Float[Array, " D"],
        rope: Rope,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows, KVCache]:
        """The residual stream after the layer, the same normed for what follows, and the cache.

        A norm belongs to the addition before it, which the same kernel does: so h is x after this layer's input norm,
        and the layer ends with that of the next.

        Args:
            x: the residual stream.
            h: the same, normed.
            next_norm: weight of the next layer's input norm, or of the model's last one.
            rope: cosines and sines of the positions.
            positions: of the tokens.
            kv_length: as for `KVCache.attend`.
            cache: keys and values of earlier positions.
        """
        own = self.config.layers[self.index]
        heads, cache = cache.write_attend(self.index, *self.self_attn.heads(h, rope), positions, kv_length, own)
        return *self._finish(x, heads, next_norm), cache

    def write(
        self, h: Float[Array, "B T D"] | QuantizedRows, rope: Rope, positions: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """The first half of the layer, which stores keys and values: its queries, and the cache."""
        return cache.write(self.index, *self.self_attn.heads(h, rope), positions)

    def attend(
        self,
        x: Float[Array, "B T D"],
        q: Float[Array, "B T N H"],
        next_norm: Float[Array, " D"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """The second half, of as many of the tokens as there are queries; arguments and results are the layer's."""
        own = self.config.layers[self.index]
        return self._finish(x, cache.attend(self.index, q, positions, kv_length, own), next_norm)

    def _finish(
        self, x: Float[Array, "B T D"], heads: Float[Array, "B T N H"], next_norm: Float[Array, " D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """What comes after attention."""
        x, h = self._add_norm(x, heads, self.self_attn.weights, "o_proj", self.norms["post_attention_layernorm"])
        return self._add_norm(x, self.mlp(h), self.mlp.weights, "down_proj", next_norm)

    def _add_norm(
        self,
        x: Float[Array, "B T D"],
        inputs: Array | QuantizedRows,
        weights: Mapping[str, Any],
        name: str,
        norm: Float[Array, " D"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """X plus the projection of that name, and the same normed."""
        weight, bias = weights[name], weights.get(f"{name}_bias")
        return project_add_norm(x, inputs, weight, bias, norm, self.config.rms_norm_eps, self.devices)


def run_layers(
    config: DecoderConfig,
    layers: Sequence[DecoderLayer],
    x: Float[Array, "B T D"],
    last_norm: Float[Array, " D"],
    positions: Int[Array, "B T"],
    cache: KVCache,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"] | QuantizedRows, KVCache]:
    """Layers of a model, from the first on, over embeddings x; `last_norm` is the weight of the norm after them.

    Returns:
        The residual stream after each layer; hidden states after the last norm; the cache.
    """
    rope = rope_tables(config, positions)
    kv_length = positions.max(axis=1) + 1
    first, *rest = [*(layer.norms["input_layernorm"] for layer in layers), last_norm]
    h: Array | QuantizedRows = rms_norm(x, first, config.rms_norm_eps)
    outputs = []
    for layer, next_norm in zip(layers, rest, strict=True):
        x, h, cache = layer(x, h, next_norm, rope, positions, kv_length, cache)
        outputs.append(x)
    return outputs, h, cache
