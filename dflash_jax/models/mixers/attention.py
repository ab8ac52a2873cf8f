"""Softmax attention as a mixer: its projections. The attention itself is the cache's (`models.caches.KVCache`)."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import KVCache
from dflash_jax.models.projections import project_heads
from dflash_jax.models.rope import Rope
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig, FullAttention, WindowAttention
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.formats.weight import weight_of
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import attention_table
from pallas_kernels.lib.rotary import Rotary, gated, gates_of


class Queries(NamedTuple):
    """What attention needs of each query token once its key and value are stored.

    Attributes:
        heads: the queries, with norm and RoPE applied.
        gates: of each kv head the first rows, whose sigmoids multiply the attention's output; None where the model has
            no such gates.
    """

    heads: Float[Array, "B T N H"]
    gates: Float[Array, "B T K J H"] | None


class Attention(nn.Module):
    """One attention block up to its output projection, over layer `index` of the cache."""

    config: DecoderConfig
    index: int
    devices: Devices = AUTOMATIC

    output = "o_proj"  # the projection that the layer applies to what the block returns

    def setup(self) -> None:
        mixer = self.config.layers[self.index].mixer
        assert isinstance(mixer, FullAttention | WindowAttention)
        self.mixer = mixer
        # An fp8 drafter has qkv_proj, joined of the parameters in its table; they are taken as they come.
        if self.has_variable("params", "qkv_proj"):
            self.weights = dict(self.variables["params"])
        else:
            self.weights = declare(self, attention_table(self.config), self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"] | QuantizedRows,
        rope: Rope,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Store keys and values of normed inputs x, and attend."""
        heads, rotary = self.heads(x, rope)
        return cache.write_attend(self.index, heads, rotary, positions, kv_length, self.mixer.mask)

    def write(
        self, x: Float[Array, "B T D"] | QuantizedRows, rope: Rope, positions: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Queries, KVCache]:
        """The first half of a call: store keys and values."""
        heads, rotary = self.heads(x, rope)
        q, cache = cache.write(self.index, heads, rotary, positions)
        return Queries(q, gates_of(heads, rotary)), cache

    def attend(
        self, queries: Queries, positions: Int[Array, "B T"], kv_length: Int[Array, " B"], cache: KVCache
    ) -> Float[Array, "B T N H"]:
        """The second half of a call, for as many tokens as there are queries."""
        out = cache.attend(self.index, queries.heads, positions, kv_length, self.mixer.mask)
        return gated(out, queries.gates)

    def heads(self, x: Float[Array, "B T D"] | QuantizedRows, rope: Rope) -> tuple[Float[Array, "B T K J H"], Rotary]:
        """Project to [q..q, k, v] for each kv head, J heads side by side, with gates of the output in front.

        Returns:
            The heads, and the scales, norms and rotation that the cache still has to apply to them.
        """
        if "qkv_proj" not in self.weights:
            return jnp.concatenate([self._project("q_proj", x), self.keys_values(x)], axis=-2), self._rotary(rope)
        weight = weight_of(self.weights["qkv_proj"])
        if self.config.has_gated_attention or "qkv_proj_bias" in self.weights or weight.needs_kernels:
            return self._project("qkv_proj", x), self._rotary(rope)
        heads, scales = weight.unscaled(x, kernels=self.devices.is_single)
        return heads.reshape(*x.shape[:2], *weight.shape[:-1]), self._rotary(rope, scales)

    def keys_values(self, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K 2 H"]:
        """Project to [k, v] for each kv head; drafters only, whose queries have a weight of their own."""
        return self._project("kv_proj", x)

    def _project(self, name: str, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K J H"]:
        return project_heads(x, self.weights[name], self.weights.get(f"{name}_bias"), self.devices)

    def _rotary(self, rope: Rope, scales: tuple[Array, Array] | None = None) -> Rotary:
        """What heads need before attention; `scales` are those of an fp8 product, for each token and each output."""
        norms = self.weights.get("q_norm"), self.weights.get("k_norm")
        return Rotary(*rope, *norms, scales, self.config.rms_norm_eps, self.config.has_gated_attention)
