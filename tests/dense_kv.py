"""A dense KV cache, one slot a position, to compute with what the paged one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import ContextCache
from dflash_jax.spec import GatedDelta, LayerMask
from dflash_jax.state.dense_kv import attention, write_each
from dflash_jax.state.recurrent import shapes_of
from pallas_kernels.gated_delta import Kept, Weights, reference
from pallas_kernels.lib.masks import visible
from pallas_kernels.lib.rotary import Rotary, split_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseKVCache(ContextCache):
    """A `models.layers.ContextCache` with S slots for each of B sequences; position p of a sequence is slot p.

    Attention is plain jnp over all slots, and differentiable.
    """

    keys: list[Float[Array, "B S K H"]]
    values: list[Float[Array, "B S K H"]]

    @staticmethod
    def zeros(num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> DenseKVCache:
        """An empty cache of arrays of shape [B, S, K, H]."""
        keys, values = ([jnp.zeros(shape, dtype) for _ in range(num_layers)] for _ in range(2))
        return DenseKVCache(keys, values)

    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], DenseKVCache]:
        """Store keys and values at their positions, and give the queries.

        Positions that are negative or beyond the last slot are not stored.
        """
        q, k, v = split_heads(heads, rotary)
        slots = self.keys[layer].shape[1]
        where = (jnp.arange(k.shape[0])[:, None], jnp.where(positions < 0, slots, positions))
        keys, values = list(self.keys), list(self.values)
        keys[layer] = keys[layer].at[where].set(k.astype(keys[layer].dtype), mode="drop")
        values[layer] = values[layer].at[where].set(v.astype(values[layer].dtype), mode="drop")
        return q, replace(self, keys=keys, values=values)

    def write_context(
        self,
        heads: Sequence[Float[Array, "B T K _ H"]],
        rotary: Rotary,
        k_norms: Sequence[Float[Array, " H"] | None],
        positions: Int[Array, "B T"],
    ) -> DenseKVCache:
        """Store keys and values of every layer at their positions, as `write` does."""
        cache: DenseKVCache = write_each(self, heads, rotary, k_norms, positions)
        return cache

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], DenseKVCache]:
        """Run the recurrence over whole sequences: a call must have all tokens."""
        return recur_whole(inputs[..., : delta.channels_per_key], gates, weights, positions, delta), self

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """Attention in float32; a row that sees nothing gives zeros."""
        keys, values = (pool[layer].astype(q.dtype) for pool in (self.keys, self.values))
        key_positions = jnp.arange(keys.shape[1])
        seen = visible(positions, key_positions[None, :], mask=mask.mask, window=mask.window)
        return attention(q, keys, values, seen & (key_positions < kv_length[:, None])[:, None, :])


def recur_whole(
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    weights: Weights,
    positions: Int[Array, "B T"],
    delta: GatedDelta,
) -> Float[Array, "B T HV dv"]:
    """Outputs of a Gated DeltaNet layer for whole sequences, from their first token on; differentiable."""
    B = len(inputs)
    kept = Kept(*(jnp.zeros(part.shape, part.dtype) for part in shapes_of(delta, B, 1, inputs.dtype)))
    length = (positions >= 0).sum(axis=1, dtype=jnp.int32)
    outputs, _ = reference.prefill(kept, weights, jnp.arange(B), jnp.ones(B, bool), inputs, gates, length)
    return outputs
