"""In which order our arrays hold the rows of a checkpoint's tensors, where it is not the checkpoint's own.

Rows are moved when a tensor is loaded, and back when it is written. There are two reasons for it:

- Kernels rotate the pairs (i, i + H/2) of a whole head. A model that rotates the first r dimensions only pairs
  (i, i + r/2), so the dimensions of its queries and keys are moved to where kernels look for them; the others follow
  with an angle of 0 (`models.rope`). Attention sums over the dimensions of a head, so their order changes no score.
- Devices share whole heads. What belongs to a head lies side by side: the gates and queries of a kv head, the query,
  key and values of a key head of Gated DeltaNet, and the two gates of a value head. Where devices outnumber kv heads,
  these are copied (`DecoderConfig.over`): several of our rows are one row of the checkpoint.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from dflash_jax.spec import DecoderConfig, GatedDelta

Order = Int[np.ndarray, " rows"]  # row i of ours is row order[i] of the checkpoint's


def row_orders(config: DecoderConfig) -> dict[str, Order]:
    """The order of the rows of tensors, by the name of their module (`q_proj`); others stay as they are."""
    rotary = rotary_order(config.head_dim, config.rope.rotary_dim(config.head_dim))
    is_partial = config.rope.partial_rotary_factor != 1
    heads = np.repeat(np.arange(config.stored.num_key_value_heads), config.kv_copies)
    orders: dict[str, Order] = {}
    if config.has_gated_attention:
        orders["q_proj"] = _gates_and_queries(config, rotary)
    elif is_partial:
        orders["q_proj"] = _heads(np.arange(config.num_attention_heads), rotary)
    if is_partial:
        orders |= {"q_norm": rotary, "k_norm": rotary}
    if is_partial or config.kv_copies > 1:
        orders["k_proj"] = _heads(heads, rotary)
    if config.kv_copies > 1:
        orders["v_proj"] = _heads(heads, np.arange(config.head_dim))
    if config.gated_delta is not None:
        orders["in_proj_qkv"] = orders["conv1d"] = _channels(config.gated_delta)
        orders["in_proj_ba"] = _gates(config.gated_delta)
    return orders


def rotary_order(head_dim: int, rotary_dim: int) -> Order:
    """The dimensions of a head: pairs (i, i + rotary_dim/2) at (i, i + head_dim/2), the others in order between."""
    first, second, rest = np.split(np.arange(head_dim), [rotary_dim // 2, rotary_dim])
    still = (head_dim - rotary_dim) // 2
    return np.concatenate([first, rest[:still], second, rest[still:]])


def inverse(order: Order) -> Order:
    """The order that undoes an order: where each row of the checkpoint is, or its first copy."""
    return np.unique(order, return_index=True)[1]


def _heads(heads: Int[np.ndarray, " heads"], order: Order) -> Order:
    """Some of the checkpoint's heads, with an order of the dimensions in each."""
    return (heads[:, None] * len(order) + order).ravel()


def _gates_and_queries(config: DecoderConfig, rotary: Order) -> Order:
    """A checkpoint has the query and the gate of each head; we have all gates of a kv head, then all its queries."""
    K, N, H = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    rows = np.arange(N * 2 * H).reshape(K, N // K, 2, H)
    return np.concatenate([rows[:, :, 1], rows[:, :, 0][..., rotary]], axis=1).ravel()


def _channels(mixer: GatedDelta) -> Order:
    """A checkpoint has the queries of all key heads, their keys, then all values; we have these for each key head."""
    rows = np.arange(mixer.key_heads * mixer.channels_per_key)
    queries, keys, values = np.split(rows, mixer.key_heads * mixer.key_dim * np.array([1, 2]))
    return np.concatenate([part.reshape(mixer.key_heads, -1) for part in (queries, keys, values)], axis=1).ravel()


def _gates(mixer: GatedDelta) -> Order:
    """A checkpoint that has both gates in one tensor has those of one kind for each key head, then the others."""
    rows = np.arange(2 * mixer.value_heads).reshape(mixer.key_heads, 2, -1)
    return rows.swapaxes(1, 2).ravel()
