"""Inside Triton kernels of Gated DeltaNet: tokens from their raw projections to what the recurrence takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.reference import L2_EPS, Weights


class Source(NamedTuple):
    """Tokens of a sequence as they lie in memory; T is their number, padded to a power of two.

    Attributes:
        t: their numbers.
        length: how many there are.
        inputs: gives for a tap and channels [N] the inputs [T, N] that the tap multiplies, 0 for padding.
        projections: gives for 0 the projections b of a head [T], for 1 the projections a.
    """

    t: Int[Array, " T"]
    length: Any
    inputs: Callable[[int, Array], Array]
    projections: Callable[[int], Array]


class Head(NamedTuple):
    """A value head and where its channels lie among those of its key head."""

    value: Any  # of HV
    key: Any  # of HK
    query_channels: Array  # [dk]
    key_channels: Array  # [dk]
    value_channels: Array  # [dv]


def head_of(value: Any, weights: Any, key_dim: int, value_dim: int) -> Head:
    """The head of that number; `weights` are references."""
    group = weights.A_log.shape[0] // weights.conv.shape[0]
    key, query_channels = value // group, jnp.arange(key_dim, dtype=jnp.int32)
    first = 2 * key_dim + value % group * value_dim
    value_channels = first + jnp.arange(value_dim, dtype=jnp.int32)
    return Head(value, key, query_channels, key_dim + query_channels, value_channels)


def at(ref: Any, *index: Any) -> Any:
    """A tile of a reference by an index of scalars, [T, 1] and [1, N], which interpreters only take broadcast."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return ref.at[tuple(jnp.broadcast_to(i, shape) for i in index)]


def load(ref: Any, *index: Any, where: Any) -> Array:
    """Load a tile as `at` names it; 0 where the mask is False, which may lie outside of the reference."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return pltriton.load(at(ref, *index), mask=jnp.broadcast_to(where, shape), other=0)


def behind(
    kept: Any, place: tuple[Any, Any], block: Any, tokens: tuple[Any, Array], weights: Any, head: Head,
    has_before: Any = True,
) -> Source:  # fmt: skip
    """Tokens of a block that goes on behind a row.

    Args:
        kept: inputs that rows keep.
        place: the row, and where in it the J inputs before the block begin.
        block: inputs, gates and length of blocks.
        tokens: the block, and the numbers of its tokens.
        weights: of the layer.
        head: of the tokens.
        has_before: False takes zeros for the J inputs before the block.
    """
    (row, first), (b, t), before = place, tokens, weights.conv.shape[-1] - 1
    length = jnp.clip(block.length[b], 0, block.inputs.shape[1])

    def window(tap: int, channels: Array) -> Array:
        at_tap, channels = (t + tap - before)[:, None], channels[None, :]
        new = load(block.inputs, b, at_tap, head.key, channels, where=(at_tap >= 0) & (at_tap < length))
        if tap == before:
            return new
        old = load(kept, row, first + before + at_tap, head.key, channels, where=(at_tap < 0) & has_before)
        return jnp.where(at_tap < 0, old, new)

    return Source(t, length, window, lambda i: load(block.gates, b, t, head.value, i, where=t < length))


def convolved(source: Source, weights: Any, head: Head, channels: Int[Array, " N"]) -> Float[Array, "T N"]:
    """Convolution and SiLU of channels, rounded to the dtype of the inputs, in float32."""
    taps = weights.conv.shape[-1]
    mixed: Any = 0.0
    for tap in range(taps):
        raw = source.inputs(tap, channels)
        mixed += raw.astype(jnp.float32) * at(weights.conv, head.key, channels, tap)[...].astype(jnp.float32)[None, :]
    return (mixed / (1 + jnp.exp(-mixed))).astype(raw.dtype).astype(jnp.float32)


def normed(x: Float[Array, "T N"]) -> Float[Array, "T N"]:
    """Rows divided by their L2 norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS)[:, None]


def decay_and_strength(source: Source, weights: Weights, head: Head) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Log decay and write strength of a head's tokens, both 0 for padding."""
    is_token = source.t < source.length
    b, a = (source.projections(i).astype(jnp.float32) for i in range(2))
    a += weights.dt_bias[head.value].astype(jnp.float32)
    softplus = jnp.maximum(a, 0) + jnp.log1p(jnp.exp(-jnp.abs(a)))
    g = -jnp.exp(weights.A_log[head.value].astype(jnp.float32)) * softplus
    return jnp.where(is_token, g, 0.0), jnp.where(is_token, 1 / (1 + jnp.exp(-b)), 0.0)


def move_share(
    move: Callable[[Array], None], head: Any, column: Any, columns: int, sizes: tuple[int, int, int]
) -> None:
    """Call a function with the channels of a key head that a program of the last kernels moves.

    Each channel has one program: values that of their columns, queries and keys that of the first head.

    Args:
        move: is called with channels [N].
        head: value head of the program.
        column: number of its group of columns.
        columns: in a group.
        sizes: value heads of a key head, dk and dv.
    """
    group, dk, dv = sizes
    move(2 * dk + head % group * dv + column * columns + jnp.arange(columns, dtype=jnp.int32))

    @pl.when(head % group == 0)
    def _() -> None:
        share = 2 * dk * columns // dv
        move(column * share + jnp.arange(share, dtype=jnp.int32))
