"""Decoder layers, built from the `LayerSpec` of each, and the interface to the cache that they write to and read.

Modules are functional: parameters in, arrays out. They do not know how keys and values are kept; a layer gets a
`KVCache` and returns the updated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax.models.mixers.attention import Attention
from dflash_jax.models.mlp.dense import MLP
from dflash_jax.models.projections import project_add_norm
from dflash_jax.models.rope import Rope, rope_tables
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig, LayerMask
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.tables import declare, norms_table
from pallas_kernels.lib.norm import rms_norm
from pallas_kernels.lib.rotary import Rotary


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of the layers of one model, for B sequences: pages in the engine, dense arrays elsewhere."""

    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Store keys and values at their absolute positions.

        Args:
            layer: index of the layer.
            heads: projected heads; each kv head has J - 2 query heads, its key and its value, side by side.
            rotary: scales, norms and RoPE, which are applied to the heads first.
            positions: absolute positions of the tokens, int32; tokens at negative ones are not stored.

        Returns:
            The queries, with `rotary` applied, and the updated cache.
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
        """Attention of q over the stored keys at positions below `kv_length` that the mask lets each query see."""
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
        """`write`, then `attend` with the queries of these heads."""
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
        """Store keys and values of every layer at their absolute positions.

        Args:
            heads: projected heads; each kv head has the key and the value of each layer, side by side. They come in
                one array for all layers or in several, first layers first.
            rotary: scales and RoPE, which are applied to keys after their norm.
            k_norms: weight of each layer's key norm, or None.
            positions: absolute positions of the tokens, int32; tokens at negative ones are not stored.
        """
        ...


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer, as `config.layers[index]` describes it; also layer `index` of its cache."""

    config: DecoderConfig
    index: int
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.norms = declare(self, norms_table(), self.config)
        self.mask = self.config.layers[self.index].mask
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
        """Run the layer.

        One kernel does an addition to the residual stream and the norm after it. So the layer takes its input already
        normed, and ends with the norm of the layer that follows.

        Args:
            x: residual stream.
            h: x after this layer's input norm.
            next_norm: weight of the next layer's input norm, or of the model's last norm.
            rope: cosines and sines of the positions.
            positions: absolute positions of the tokens, int32.
            kv_length: number of keys that queries may see, as for `KVCache.attend`.
            cache: keys and values of earlier positions.

        Returns:
            The residual stream after the layer, its norm by `next_norm`, and the updated cache.
        """
        heads, cache = cache.write_attend(self.index, *self.self_attn.heads(h, rope), positions, kv_length, self.mask)
        return *self._finish(x, heads, next_norm), cache

    def write(
        self, h: Float[Array, "B T D"] | QuantizedRows, rope: Rope, positions: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """The first half of the layer: store keys and values. Returns the queries and the updated cache."""
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
        """The second half of the layer, from the queries on, for as many tokens as there are queries."""
        return self._finish(x, cache.attend(self.index, q, positions, kv_length, self.mask), next_norm)

    def _finish(
        self, x: Float[Array, "B T D"], heads: Float[Array, "B T N H"], next_norm: Float[Array, " D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """Output projection and MLP."""
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
        """Add the projection of that name to the residual stream, then norm it."""
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
    """Run the first layers of a model over embeddings x; `last_norm` is the weight of the norm after them.

    Returns:
        The residual stream after each layer; the final hidden states, normed; the updated cache.
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
