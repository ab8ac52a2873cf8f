"""Keys and values of whole sequences in one call: the `KVCache` of training.

The layers are those that serve; only where they keep keys and values differs. Nothing is written in place, and
everything is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.caches import ContextCache, KVCache
from dflash_jax.spec import GatedDelta, LayerMask
from dflash_jax.state.dense_kv import attention, write_each
from dflash_jax.train.gated_delta import recur_sequences
from pallas_kernels.gated_delta import Weights
from pallas_kernels.lib.masks import visible
from pallas_kernels.lib.rotary import Rotary, split_heads

CUDNN_HEAD_DIM = 256  # elements: the largest head that cuDNN's fused attention takes on Hopper


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceCache(ContextCache):
    """A `models.layers.ContextCache` for one call over whole sequences: row t of a sequence is position t.

    It holds the keys and values of each layer that the call has written, and attends over them causally. Rows of
    padding come behind the tokens, where causal attention never sees them.

    Attributes:
        keys: of each layer that has been written, after norm and RoPE.
        values: of the same layers.
        is_fused: whether cuDNN attends, on a GPU in bfloat16; XLA splits it over devices only if they divide kv heads.
    """

    keys: dict[int, Float[Array, "B T K H"]] = field(default_factory=dict)
    values: dict[int, Float[Array, "B T K H"]] = field(default_factory=dict)
    is_fused: bool = field(default=True, metadata={"static": True})

    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], SequenceCache]:
        """Keep the keys and values of every position; returns the queries and the cache with them."""
        q, k, v = split_heads(heads, rotary)
        return q, replace(self, keys={**self.keys, layer: k}, values={**self.values, layer: v})

    def write_context(
        self,
        heads: Sequence[Float[Array, "B T K _ H"]],
        rotary: Rotary,
        k_norms: Sequence[Float[Array, " H"] | None],
        positions: Int[Array, "B T"],
    ) -> SequenceCache:
        """Keep keys and values of every layer and position."""
        cache: SequenceCache = write_each(self, heads, rotary, k_norms, positions)
        return cache

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], SequenceCache]:
        """Run the recurrence over whole sequences, from zeros; nothing is kept."""
        return recur_sequences(inputs[..., : delta.channels_per_key], gates, weights, positions, delta), self

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """Attend causally from every row over the rows up to it."""
        keys, values = self.keys[layer], self.values[layer]
        is_fit = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu" and q.shape[-1] <= CUDNN_HEAD_DIM
        if self.is_fused and is_fit:
            window = None if mask.window is None else (mask.window - 1, 0)
            return jax.nn.dot_product_attention(
                q, keys, values, is_causal=True, local_window_size=window, implementation="cudnn"
            )
        rows = jnp.arange(q.shape[1])
        seen = visible(rows, rows, mask=mask.mask, window=mask.window)
        return attention(q, keys, values, seen[None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBlocks(KVCache):
    """A `models.layers.KVCache` of A drafted blocks of G rows for each sequence, all in one call (Q = A * G).

    A block sees the context strictly below its anchor and its own rows, never another block: exactly what it would see
    alone, with the drafter's cache cut at its anchor. Source: arXiv 2602.06036, section 4.2.

    Attributes:
        context: the drafter's keys and values of every position of the sequences.
        anchors: position of the first row of each block.
        block: keys and values [B, Q, K, H] of the rows of the blocks, for each layer.
    """

    context: SequenceCache
    anchors: Int[Array, "B A"]
    block: SequenceCache = field(default_factory=SequenceCache)

    def write(
        self,
        layer: int,
        heads: Float[Array, "B Q K J H"],
        rotary: Rotary,
        positions: Int[Array, "B Q"],
    ) -> tuple[Float[Array, "B Q N H"], PackedBlocks]:
        """Keep the keys and values of the blocks' rows; returns their queries and the cache with them."""
        q, block = self.block.write(layer, heads, rotary, positions)
        return q, replace(self, block=block)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B Q N H"],
        positions: Int[Array, "B Q"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B Q N H"]:
        """Attend from every block over its context and itself; the gradient computes the scores again."""
        return _packed_attention(
            q,
            (self.context.keys[layer], self.context.values[layer]),
            (self.block.keys[layer], self.block.values[layer]),
            self.anchors,
            mask,
        )


def context_seen(anchors: Int[Array, "B A"], G: int, T: int, mask: LayerMask) -> Bool[Array, "B A G T"]:
    """Whether row g of a block sees the context at position t."""
    rows, keys = anchors[..., None] + jnp.arange(G), jnp.arange(T)
    return visible(rows, keys, mask=mask.mask, window=mask.window) & (keys < anchors[..., None, None])


def _packed_attention(
    q: Float[Array, "B Q N H"],
    context: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]],
    block: tuple[Float[Array, "B Q K H"], Float[Array, "B Q K H"]],
    anchors: Int[Array, "B A"],
    mask: LayerMask,
) -> Float[Array, "B Q N H"]:
    """One softmax over scores of the context [B, K, N/K, A, G, T] and of the block [B, K, N/K, A, G, G], in float32."""
    B, Q, N, H = q.shape
    A, K, T = anchors.shape[1], block[0].shape[2], context[0].shape[1]
    G = Q // A
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    @jax.checkpoint  # the gradient computes the scores again: kept, they would be the largest arrays of training
    def attend(q: Array, context: tuple[Array, Array], block: tuple[Array, Array], anchors: Array) -> Array:
        rows = jnp.arange(G)
        block_seen = visible(rows, rows, mask=mask.mask, window=mask.window)
        queries = q.reshape(B, A, G, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
        block_keys, block_values = (x.reshape(B, A, G, K, H) for x in block)
        wide = {"precision": precision, "preferred_element_type": jnp.float32}
        far = jnp.einsum("bagknh,btkh->bknagt", queries, context[0], **wide)
        near = jnp.einsum("bagknh,baskh->bknags", queries, block_keys, **wide)
        far = jnp.where(context_seen(anchors, G, T, mask)[:, None, None], far, -jnp.inf)
        near = jnp.where(block_seen, near, -jnp.inf)  # every row sees itself
        # Scores of context and block are not concatenated: those of the context are the largest array of training.
        highest = jax.lax.stop_gradient(jnp.maximum(far.max(axis=-1), near.max(axis=-1)))[..., None]
        far, near = jnp.exp(far - highest), jnp.exp(near - highest)
        total = far.sum(axis=-1) + near.sum(axis=-1)
        out = jnp.einsum("bknagt,btkh->bagknh", far.astype(q.dtype), context[1], **wide)
        out += jnp.einsum("bknags,baskh->bagknh", near.astype(q.dtype), block_values, **wide)
        out /= jnp.moveaxis(total, (1, 2), (3, 4))[..., None]
        return out.astype(q.dtype).reshape(B, Q, N, H)

    return attend(q, context, block, anchors)
