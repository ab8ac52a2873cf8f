"""The cache of a target with layers of both kinds: pages of keys and values, and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from jaxtyping import Array, Float, Int

from dflash_jax.spec import GatedDelta, LayerMask
from dflash_jax.state.paged_kv import PagedKVCache
from dflash_jax.state.recurrent import RecurrentStates
from pallas_kernels import Rotary
from pallas_kernels.gated_delta import Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HybridCache:
    """A `models.caches.RecurrentCache` that hands each call to the part that keeps what it is about."""

    kv: PagedKVCache
    states: RecurrentStates

    def write(
        self, layer: int, heads: Float[Array, "B T K J H"], rotary: Rotary, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], HybridCache]:
        """See `PagedKVCache.write`."""
        q, kv = self.kv.write(layer, heads, rotary, positions)
        return q, replace(self, kv=kv)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """See `PagedKVCache.attend`."""
        return self.kv.attend(layer, q, positions, kv_length, mask)

    def write_attend(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> tuple[Float[Array, "B T N H"], HybridCache]:
        """See `PagedKVCache.write_attend`."""
        out, kv = self.kv.write_attend(layer, heads, rotary, positions, kv_length, mask)
        return out, replace(self, kv=kv)

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], HybridCache]:
        """See `RecurrentStates.advance`."""
        outputs, states = self.states.advance(layer, inputs, gates, weights, positions, delta)
        return outputs, replace(self, states=states)

    def of_layer(self, layer: int) -> HybridCache:
        """See `models.caches.DividedCache.of_layer`."""
        return HybridCache(self.kv.of_layer(layer), self.states.of_layer(layer))

    def with_layer_of(self, layer: int, part: HybridCache) -> HybridCache:
        """Take over what a layer has written to its part."""
        return HybridCache(self.kv.with_layer_of(layer, part.kv), self.states.with_layer_of(layer, part.states))
