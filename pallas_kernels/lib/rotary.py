"""Norm and RoPE of a layer's heads between projection and attention, in plain jnp and differentiable.

Projections that read the same input are one array, so a layer's heads come as ``[.., K, J, H]``: each kv head has its
J - 2 query heads, its key and its value side by side. Where the attention's output has gates (Qwen3.5), a kv head has
those of its R query heads in front of them, and J is 2 R + 2. Kernels follow these definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.lib.norm import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotary:
    """The work that turns projected queries and keys into those of the attention: RMS norm of each head, then RoPE.

    Attributes:
        cos: cosines of each token's angles, float32.
        sin: sines of these angles, float32.
        q_norm: weights of the queries' norm; None norms nothing.
        k_norm: weights of the keys' norm; None norms nothing.
        scales: float32 scales of tokens and of columns, for heads that are products of fp8 numbers; all heads are
            multiplied by both first. None is 1.
        eps: of both norms.
        has_gates: whether gates lie in front of the queries. They stay as they are; whoever attends multiplies the
            output by their sigmoids.
    """

    cos: Float[Array, "*T H2"]
    sin: Float[Array, "*T H2"]
    q_norm: Float[Array, " H"] | None = None
    k_norm: Float[Array, " H"] | None = None
    scales: tuple[Float[Array, "*T"], Float[Array, "K J H"]] | None = None
    eps: float = field(default=1e-6, metadata={"static": True})
    has_gates: bool = field(default=False, metadata={"static": True})


def num_gates(heads: Any, rotary: Rotary | None) -> int:
    """How many gates a kv head of ``[.., K, J, H]`` has, which lie in front of as many query heads."""
    return (heads.shape[-2] - 2) // 2 if rotary is not None and rotary.has_gates else 0


def num_queries(heads: Any, rotary: Rotary | None) -> int:
    """How many query heads a kv head of ``[.., K, J, H]`` has."""
    return heads.shape[-2] - 2 - num_gates(heads, rotary)


def gates_of(heads: Float[Array, "*T K J H"], rotary: Rotary) -> Float[Array, "*T K J H"] | None:
    """The heads if their first rows are gates, else None."""
    return heads if rotary.has_gates else None


def gated(out: Float[Array, "*T N H"], gates: Float[Array, "*T K _ H"] | None) -> Float[Array, "*T N H"]:
    """Attention's output times the sigmoids of its gates, in float32; without gates as it is.

    Args:
        out: the output, whose heads of a kv head lie side by side.
        gates: of each kv head the first N / K rows.
    """
    if gates is None:
        return out
    *tokens, N, H = out.shape
    opened = jax.nn.sigmoid(gates[..., : N // gates.shape[-3], :].astype(jnp.float32))
    return (out.astype(jnp.float32) * opened.reshape(*tokens, N, H)).astype(out.dtype)


def rotate(x: Float[Array, "*T N H"], cos: Float[Array, "*T H2"], sin: Float[Array, "*T H2"]) -> Float[Array, "*T N H"]:
    """Rotary embedding over the whole head, in float32, halves paired (Hugging Face's order)."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def split_heads(
    heads: Float[Array, "*T K J H"], rotary: Rotary | None
) -> tuple[Float[Array, "*T N H"], Float[Array, "*T K H"], Float[Array, "*T K H"]]:
    """Split heads into queries and keys, normed and rotated, and values.

    Values are only scaled. Without a ``rotary`` all heads stay as they are. The query heads of a kv head lie side by
    side; gates are left out.
    """
    *tokens, K, J, H = heads.shape
    R = num_queries(heads, rotary)
    if rotary is not None and rotary.scales is not None:
        of_tokens, of_columns = rotary.scales
        factors = of_tokens[..., None, None, None] * of_columns
        heads = (heads.astype(jnp.float32) * factors).astype(heads.dtype)
    q, k, v = heads[..., J - 2 - R : -2, :].reshape(*tokens, K * R, H), heads[..., -2, :], heads[..., -1, :]
    if rotary is None:
        return q, k, v

    def positioned(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        normed = x if weight is None else rms_norm(x, weight, rotary.eps)
        return rotate(normed, rotary.cos, rotary.sin).astype(heads.dtype)

    return positioned(q, rotary.q_norm), positioned(k, rotary.k_norm), v


def pairs_of(heads: Sequence[Any]) -> list[tuple[Any, int]]:
    """For each layer, the array that holds its key and value, and the row of its key; the value is in the next row.

    Args:
        heads: arrays ``[.., K, 2 * layers, H]``, with the key and the value of a layer side by side.
    """
    return [(array, row) for array in heads for row in range(0, array.shape[-2], 2)]
