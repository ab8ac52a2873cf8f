"""Decoder layers, built from the `LayerSpec` of each, over the caches of `models.caches`.

Modules are functional: parameters in, arrays out. They do not know how the state of sequences is kept; a layer gets a
cache and returns the updated one.
"""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import KVCache
from dflash_jax.models.mixers.attention import Attention, Queries
from dflash_jax.models.mixers.gated_delta import GatedDeltaNet
from dflash_jax.models.mlp.dense import MLP
from dflash_jax.models.mlp.experts import SparseMLP
from dflash_jax.models.projections import project_add_norm
from dflash_jax.models.rope import Rope
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig, Dense
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import norms_table


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer, as `config.layers[index]` describes it; also layer `index` of its cache."""

    config: DecoderConfig
    index: int
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.norms = declare(self, norms_table(), self.config)
        if self.has_attention:  # a module's parameters have the name of the attribute, as in checkpoints
            self.self_attn = Attention(self.config, self.index, self.devices)
        else:
            self.linear_attn = GatedDeltaNet(self.config, self.index, self.devices)
        is_dense = isinstance(self.config.layers[self.index].mlp, Dense)
        self.mlp = MLP(self.config, self.devices) if is_dense else SparseMLP(self.config, self.devices)

    @property
    def has_attention(self) -> bool:
        """Whether the layer's mixer is attention, so that it keeps keys and values; else it keeps a recurrent state."""
        return self.index in self.config.attention_layers

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        """What mixes the tokens of a sequence."""
        return self.self_attn if self.has_attention else self.linear_attn

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
            cache: what is kept of earlier positions.

        Returns:
            The residual stream after the layer, its norm by `next_norm`, and the updated cache.
        """
        heads, cache = self.mixer(h, rope, positions, kv_length, cache)
        return *self._finish(x, heads, next_norm, positions), cache

    def write(
        self, h: Float[Array, "B T D"] | QuantizedRows, rope: Rope, positions: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Queries, KVCache]:
        """The first half of a layer with attention: store keys and values. Returns queries and the updated cache."""
        return self.self_attn.write(h, rope, positions, cache)

    def attend(
        self,
        x: Float[Array, "B T D"],
        queries: Queries,
        next_norm: Float[Array, " D"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """The second half, from the queries on, for as many tokens as there are queries."""
        return self._finish(x, self.self_attn.attend(queries, positions, kv_length, cache), next_norm, positions)

    def _finish(
        self,
        x: Float[Array, "B T D"],
        heads: Float[Array, "B T N H"],
        next_norm: Float[Array, " D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """Output projection and MLP."""
        weights, name, norm = self.mixer.weights, self.mixer.output, self.norms["post_attention_layernorm"]
        bias, eps = weights.get(f"{name}_bias"), self.config.rms_norm_eps
        x, h = project_add_norm(x, heads, weights[name], bias, norm, eps, self.devices)
        return self.mlp(x, h, next_norm, positions >= 0)
