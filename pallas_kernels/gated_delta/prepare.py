"""The first kernel of a verified block on Pallas' Triton backend: what the second needs of tape and block, no state.

Convolution, SiLU, norms and gates happen here, once a head; in the second kernel several programs share a head, and
each would repeat them. For a block of several tokens the kernel also takes the block's tokens out of each other's way:
with K, Q, V the block's rows, D[i, j] = exp(g_(j+1) + ... + g_i), e[i] = exp(g_1 + ... + g_i) and
T = (I + strict(beta K K^T D))^-1, the outputs are linear in the state before the block,

    O = (e Q - M T diag(beta e) K) S + M T diag(beta) V,    M = Q K^T D for i >= j

so that the second kernel has one product with S left. Every factor is bounded: |beta| <= 1, keys of norm 1, D <= 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.reference import Kept, Weights
from pallas_kernels.gated_delta.tokens import (
    Head,
    Source,
    at,
    behind,
    convolved,
    decay_and_strength,
    head_of,
    load,
    normed,
)

WARPS = 4  # of a program, whose tiles are 16 rows of 128
LEAST_ROWS = 16  # of an operand of a product
LEAST_GATES = 32  # float32 numbers of a head: Mosaic copies multiples of 128 bytes


class Block(NamedTuple):
    """Tokens to verify, as they come."""

    inputs: Float[Array, "B T HK _"]
    gates: Float[Array, "B T HV 2"]
    length: Int[Array, " B"]


class Rows(NamedTuple):
    """Tokens as the recurrence takes them: decay and strength are exp(g) and beta, 1 and 0 for padding."""

    queries: Float[Array, "B HK T dk"] | None  # None: of a tape
    keys: Float[Array, "B HK T dk"]
    values: Float[Array, "B HV T dv"]
    decay: Float[Array, "B HV N"]  # N >= T; what lies behind T is not written
    strength: Float[Array, "B HV N"]


class Mixed(NamedTuple):
    """A block's tokens freed of each other: outputs = queries S + fixed, S being the state before the block."""

    queries: Float[Array, "B HV T dk"]
    fixed: Float[Array, "B HV T dv"]


def rows_of(rows: Any, count: Any, b: Any, kept: Any, tokens: int) -> tuple[Any, Any, Any]:
    """Inside a kernel: whether sequence b is one, its row or 0, and how many tokens of its tape are folded."""
    row, is_sequence = rows[b], (rows[b] >= 0) & (rows[b] < kept.shape[0])
    return is_sequence, jnp.where(is_sequence, row, 0), jnp.where(is_sequence, jnp.clip(count[b], 0, tokens), 0)


def rows_made(
    make: Callable[..., Any], heads: tuple[int, int], sizes: tuple[int, int], dtype: Any, T: int, *, queries: bool
) -> Rows:
    """Rows of T tokens.

    Args:
        make: makes an array of a shape [B, ...] whose B is left out, float32 unless it is given a `dtype`.
        heads: HK and HV.
        sizes: dk and dv.
        dtype: of values.
        T: number of tokens.
        queries: whether there are any.
    """
    (HK, HV), (dk, dv) = heads, sizes
    decay, strength = (make(HV, max(T, LEAST_GATES)) for _ in range(2))
    keys, values = make(HK, T, dk), make(HV, T, dv, dtype=dtype)
    return Rows(make(HK, T, dk) if queries else None, keys, values, decay, strength)


def prepare(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    block: Block | None,
    *,
    mixes: bool,
    interpret: bool,
) -> tuple[Rows, Rows | Mixed | None]:
    """Prepare the accepted tokens of tapes, and blocks.

    Args:
        kept: what the layers keep of sequences; it is read.
        weights: of the layer.
        rows: of the sequences.
        count: tokens of the tapes to prepare; what lies behind them is not written.
        block: None prepares no block.
        mixes: whether the block's tokens are freed of each other.
        interpret: run in Pallas' interpreter.
    """
    (_, HV, dk, dv), (_, G, *_), B, HK = kept.state.shape, kept.gates.shape, len(rows), len(weights.conv)
    operands = (kept.inputs, kept.gates, weights, rows, count, block)
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))

    def like(*shape: int, dtype: Any = jnp.float32) -> Any:
        return _compat.out_like((B, *shape), dtype, leaves[0])

    tokens = functools.partial(rows_made, like, (HK, HV), (dk, dv), kept.inputs.dtype)
    out_shape: list[Any] = [tokens(G, queries=False)]
    if block is not None:
        T, padded = block.inputs.shape[1], max(LEAST_ROWS, pl.next_power_of_2(G))
        out_shape.append(Mixed(like(HV, padded, dk), like(HV, padded, dv)) if mixes else tokens(T, queries=True))
    outputs = _compat.triton_call(
        functools.partial(_prepare, sizes=(dk, dv), least=LEAST_ROWS if mixes else 1),
        grid=(B, HV) if mixes else (B, HK, 2 + HV // HK, 1 if block is None else 2),
        out_shape=out_shape,
        num_warps=WARPS if mixes or G > 1 else WARPS // 2,
        num_stages=1,
        interpret=interpret,
        name="gated_delta_prepare",
    )(*jax.tree.unflatten(tree, leaves))
    tape, *prepared = outputs
    return tape, prepared[0] if prepared else None


def _prepare(
    inputs: Any, gates: Any, weights: Any, rows: Any, count: Any, block: Any, tape: Any, *prepared: Any,
    sizes: tuple[int, int], least: int,
) -> None:  # fmt: skip
    """One program: queries, keys or the values of one head, of the tape or of the block of one sequence.

    Programs are many and short: those of a value head would repeat the queries and keys of its key head, and wait for
    three convolutions one after another. Of a block whose tokens are mixed, a program has all of a value head.
    """
    b = pl.program_id(0)
    row, folded = rows_of(rows, count, b, inputs, gates.shape[1])[1:]
    # As many for blocks as for tapes, so that the same sums have the same order.
    numbers = jnp.arange(max(least, pl.next_power_of_2(gates.shape[1])), dtype=jnp.int32)

    def source(head: Head, is_block: bool) -> Source:
        if is_block:
            return behind(inputs, (row, folded), block, (b, numbers), weights, head)
        return _of_tape(inputs, gates, (row, folded), numbers, head)

    if prepared and isinstance(prepared[0], Mixed):
        head = head_of(pl.program_id(1), weights, *sizes)
        for which in range(3):
            pl.when(folded > 0)(functools.partial(_store_part, which, tape, b, source(head, False), weights, head))
        _store_mixed(prepared[0], b, source(head, True), weights, head)
        return
    group = weights.A_log.shape[0] // weights.conv.shape[0]
    part, is_block = pl.program_id(2), pl.program_id(3)
    head = head_of(pl.program_id(1) * group + jnp.maximum(part - 2, 0), weights, *sizes)
    for i, target in enumerate((tape, *prepared)):
        is_mine = (is_block == i) & ((folded > 0) | (i == 1))
        for which in range(3):  # each compiled once: all programs of values run the same code
            is_part = jnp.minimum(part, 2) == which
            store = functools.partial(_store_part, which, target, b, source(head, i == 1), weights, head)
            pl.when(is_mine & is_part)(store)


def _of_tape(inputs: Any, gates: Any, place: tuple[Any, Any], t: Array, head: Head) -> Source:
    """The accepted tokens of a row's tape."""
    (row, folded), before = place, inputs.shape[1] - gates.shape[1]

    def window(tap: int, channels: Array) -> Array:
        at_tap = (t + tap)[:, None]
        return load(inputs, row, at_tap, head.key, channels[None, :], where=at_tap < folded + before)

    return Source(t, folded, window, lambda i: load(gates, row, t, head.value, i, where=t < folded))


def _store_part(part: int, target: Any, b: Any, source: Source, weights: Any, head: Head) -> None:
    """Write queries (0), keys (1), or values with decay and strength (2) as the recurrence takes them."""
    if part == 2:
        t, exists = source.t, source.t < target.values.shape[2]
        g, beta = decay_and_strength(source, weights, head)
        pltriton.store(at(target.decay, b, head.value, t), jnp.exp(g), mask=exists)
        pltriton.store(at(target.strength, b, head.value, t), beta, mask=exists)
        _store(target.values, b, head.value, t, convolved(source, weights, head, head.value_channels))
    elif part == 1:
        _store(target.keys, b, head.key, source.t, normed(convolved(source, weights, head, head.key_channels)))
    elif target.queries is not None:
        queries = normed(convolved(source, weights, head, head.query_channels)) * head.query_channels.size**-0.5
        _store(target.queries, b, head.key, source.t, queries)


def _store_mixed(target: Any, b: Any, source: Source, weights: Any, head: Head) -> None:
    """Write tokens freed of each other."""
    t = source.t
    g, beta = decay_and_strength(source, weights, head)
    scale = head.query_channels.size**-0.5
    q = normed(convolved(source, weights, head, head.query_channels)) * scale
    k = normed(convolved(source, weights, head, head.key_channels))
    i, j = t[:, None], t[None, :]
    # Sums over the tokens between, not differences of sums from the first on, which cancel.
    between = jnp.cumsum(jnp.where(i > j, jnp.broadcast_to(g[:, None], (t.size, t.size)), 0.0), axis=0)
    decay = jnp.where(i >= j, jnp.exp(between), 0.0)
    from_state = jnp.exp(jnp.cumsum(g, axis=0))
    system = jnp.where(i > j, beta[:, None] * _product(k, k.T) * decay, 0.0)

    def eliminate(n: Any, inverse: Array) -> Array:
        """Take row n, which is final, out of those below it."""
        column = jnp.sum(jnp.where(j == n, system, 0.0), axis=1)
        row = jnp.sum(jnp.where(i == n, inverse, 0.0), axis=0)
        return inverse - column[:, None] * row[None, :]

    inverse = jax.lax.fori_loop(0, t.size - 1, eliminate, jnp.where(i == j, 1.0, 0.0))
    reach = _product(_product(q, k.T) * decay, inverse) * beta[None, :]
    values = convolved(source, weights, head, head.value_channels)
    _store(target.fixed, b, head.value, t, _product(reach, values))
    mixed = from_state[:, None] * q - _product(reach * from_state[None, :], k)
    _store(target.queries, b, head.value, t, mixed)


def _store(target: Any, b: Any, head: Any, t: Array, tile: Array) -> None:
    channels = jnp.arange(tile.shape[1], dtype=jnp.int32)
    mask = jnp.broadcast_to((t < target.shape[2])[:, None], tile.shape)
    pltriton.store(at(target, b, head, t[:, None], channels[None, :]), tile.astype(target.dtype), mask=mask)


def _product(left: Array, right: Array) -> Array:
    """Multiply in float32: what is left of a block must be exact before bfloat16 sees it."""
    return jnp.dot(left, right, precision=jax.lax.Precision.HIGHEST)
