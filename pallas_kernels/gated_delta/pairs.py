"""A kernel between the two of a verified block, on Pallas' Triton backend: what each two tokens of it have to do with
each other.

With D[t, s] the decay of what token s writes until token t reads it, and e[t] that of the state before the block, a
block writes u and has outputs o where, for each column of the state S,

    u[t] = beta[t] (v[t] - e[t] k[t] S) - sum over s < t of beta[t] (k[t] k[s]) D[t, s] u[s]
    o[t] = e[t] q[t] S + sum over s <= t of (q[t] k[s]) D[t, s] u[s]

So the second kernel has one product with S, on tensor cores, and sums over the tokens before, where it would pass over
S token after token. Keys and queries are split into two bfloat16, whose products have errors of 2**-16.

It also moves the blocks to where tapes lie, which nobody reads any more: 4 us for 16 sequences of Qwen3.6-27B. The few
programs of the second kernel move a head's share after another, and take 15 of their 83 us for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.lax import DotAlgorithmPreset, Precision
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.prepare import Block, Rows, rows_of
from pallas_kernels.gated_delta.reference import Kept
from pallas_kernels.gated_delta.tokens import at, load, move_share

TOKENS = 16  # of a block, padded
WARPS = 1  # of a program: with four, tiles of 16 x 16 have threads waiting for each other (20 us where one takes 11)
PRODUCT = DotAlgorithmPreset.BF16_BF16_F32_X3  # of keys and queries with keys; in three terms of TF32 37 us for 20


class Pairs(NamedTuple):
    """A block's tokens for the second kernel.

    Attributes:
        vectors: 16 keys, then 16 queries, rounded.
        rest: what rounding left of them.
        values: of the tokens.
        factors: row s is ``-beta[t] (k[t] k[s]) D[t, s]`` for t > s, row 16 + s is ``(q[t] k[s]) D[t, s]`` for t >= s,
            both 0 for other t; then come e[t] and beta[t].
    """

    vectors: BFloat16[Array, "B HK 2*16 dk"]
    rest: BFloat16[Array, "B HK 2*16 dk"]
    values: Float[Array, "B HV T dv"]
    factors: Float[Array, "B HV 2*16+2 16"]


def pair(
    kept: Kept, rows: Int[Array, " B"], count: Int[Array, " B"], block: Block, prepared: Rows, *, interpret: bool
) -> tuple[Pairs, Kept]:
    """Say what tokens of blocks have to do with each other, and make the blocks the new tapes.

    Args:
        kept: what the layers keep of sequences; states stay as they are.
        rows: of the sequences.
        count: tokens of each tape that are folded, in the coming kernel: `prepare` has read them.
        block: tokens as they come, up to 16.
        prepared: the block's tokens as the recurrence takes them.
        interpret: run in Pallas' interpreter.
    """
    (B, HV, _, dv), (_, HK, _, dk) = prepared.values.shape, prepared.keys.shape
    operands = _compat.vary_alike(kept.inputs, kept.gates, rows, count, block, prepared)
    like = functools.partial(_compat.out_like, operand=operands[0])
    vectors = like((B, HK, 2 * TOKENS, dk), jnp.bfloat16)
    inputs, gates, vectors, rest, factors = _compat.triton_call(
        functools.partial(_pair, head_sizes=(dk, dv), is_plain=interpret),
        grid=(B, HK, 1 + 2 * (HV // HK)),
        out_shape=[
            *(like(x.shape, x.dtype) for x in (kept.inputs, kept.gates)),
            vectors,
            vectors,
            like((B, HV, 2 * TOKENS + 2, TOKENS), jnp.float32),
        ],
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        name="gated_delta_pair",
        aliases={0: 0, 1: 1},
    )(*operands)
    return Pairs(vectors, rest, prepared.values, factors), kept._replace(inputs=inputs, gates=gates)


def _pair(
    inputs_in: Any, gates_in: Any, rows: Any, count: Any, block: Any, tokens: Any, inputs: Any, gates: Any,
    vectors: Any, rest: Any, factors: Any, *, head_sizes: tuple[int, int], is_plain: bool,
) -> None:  # fmt: skip
    """One program: keys and queries of a key head of a sequence, or the pairs or the tape of one of its value heads."""
    del inputs_in, gates_in  # the outputs are aliases of them
    b, key, part = (pl.program_id(axis) for axis in range(3))
    is_sequence, row, folded = rows_of(rows, count, b, inputs, gates.shape[1])
    group = gates.shape[2] // inputs.shape[2]

    @pl.when(part == 0)
    def _() -> None:
        _write_vectors(tokens, vectors, rest, b, key)

    @pl.when((part > 0) & (part <= group))
    def _() -> None:
        _write_factors(tokens, factors, b, key, key * group + part - 1, is_plain)

    @pl.when((part > group) & is_sequence)
    def _() -> None:
        program = b, key, key * group + part - 1 - group
        _write_tape(inputs, gates, block, (row, folded), program, head_sizes, is_plain)


def _vectors(ref: Any, T: int, b: Any, key: Any) -> tuple[Array, Array, Array]:
    """Tokens [16, 1], channels [1, dk], and the vectors of a key head, zeros for padding."""
    t, channels = (jnp.arange(size, dtype=jnp.int32) for size in (TOKENS, ref.shape[-1]))
    t, channels = t[:, None], channels[None, :]
    return t, channels, load(ref, b, key, t, channels, where=t < T)


def _write_vectors(tokens: Any, vectors: Any, rest: Any, b: Any, key: Any) -> None:
    """Write keys and queries in two bfloat16."""
    for first, ref in ((0, tokens.keys), (TOKENS, tokens.queries)):
        t, channels, wide = _vectors(ref, tokens.values.shape[2], b, key)
        rounded = wide.astype(jnp.bfloat16)
        pltriton.store(at(vectors, b, key, first + t, channels), rounded)
        left = (wide - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
        pltriton.store(at(rest, b, key, first + t, channels), left)


def _write_factors(tokens: Any, factors: Any, b: Any, key: Any, head: Any, is_plain: bool) -> None:
    """Write what the tokens of a value head have to do with each other."""
    T, precision = tokens.values.shape[2], Precision.HIGHEST if is_plain else PRODUCT
    (i, _, k), (_, _, q) = (_vectors(ref, T, b, key) for ref in (tokens.keys, tokens.queries))
    of_keys, of_queries = (jnp.dot(tile, k.T, precision=precision) for tile in (k, q))
    t = jnp.arange(TOKENS, dtype=jnp.int32)
    j = t[None, :]
    g = jnp.where(t < T, jnp.log(load(tokens.decay, b, head, t, where=t < T)), 0.0)
    beta = load(tokens.strength, b, head, t, where=t < T)
    # Sums over the tokens between, not differences of sums from the first on, which cancel.
    between = jnp.cumsum(jnp.where(i > j, jnp.broadcast_to(g[:, None], (TOKENS, TOKENS)), 0.0), axis=0)
    decay = jnp.exp(between)
    pltriton.store(at(factors, b, head, j, i), jnp.where(i > j, -beta[:, None] * of_keys * decay, 0.0))
    pltriton.store(at(factors, b, head, TOKENS + j, i), jnp.where(i >= j, of_queries * decay, 0.0))
    pltriton.store(at(factors, b, head, 2 * TOKENS, t), jnp.exp(jnp.cumsum(g, axis=0)))
    pltriton.store(at(factors, b, head, 2 * TOKENS + 1, t), beta)


def _write_tape(
    inputs: Any, gates: Any, block: Any, place: tuple[Any, Any], program: tuple[Any, Any, Any],
    head_sizes: tuple[int, int], is_plain: bool,
) -> None:  # fmt: skip
    """Write a head's share of the inputs before the new tape, and of the block, which becomes the tape."""
    (row, folded), (b, key, head), T = place, program, block.inputs.shape[1]
    before, group = inputs.shape[1] - gates.shape[1], block.gates.shape[2] // inputs.shape[2]
    t = jnp.arange(pl.next_power_of_2(T), dtype=jnp.int32)
    exists = (t < T)[:, None]

    def move(channels: Array) -> None:
        moved = [at(inputs, row, folded + j, key, channels)[...] for j in range(before)]
        raw = load(block.inputs, b, t[:, None], key, channels[None, :], where=exists)
        if not is_plain:
            pltriton.debug_barrier()  # a thread may write what another one reads
        for j, kept in enumerate(moved):
            pltriton.store(at(inputs, row, j, key, channels), kept)
        mask = jnp.broadcast_to(exists, raw.shape)
        pltriton.store(at(inputs, row, before + t[:, None], key, channels[None, :]), raw, mask=mask)

    move_share(move, head, jnp.int32(0), head_sizes[1], (group, *head_sizes))
    i = jnp.arange(2, dtype=jnp.int32)[None, :]
    raw = load(block.gates, b, t[:, None], head, i, where=exists)
    pltriton.store(at(gates, row, t[:, None], head, i), raw, mask=jnp.broadcast_to(exists, raw.shape))
