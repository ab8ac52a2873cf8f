"""The first kernel of a verified block on Mosaic GPU: what the second needs of tape and block, and the new tape.

A warp convolves 16 tokens of 128 channels (`tile`): a CTA has the keys and queries of a key head, or the values of two
of its heads, of tape and block. One kernel takes the place of two (`prepare` and one for pairs), which took 22.9 us for
16 sequences of Qwen3.6-27B.

With D[t, s] the decay of what token s writes until token t reads it, and e[t] that of the state before the block, a
block writes u and has outputs o where, for each column of the state S,

    u[t] = beta[t] (v[t] - e[t] k[t] S) - sum over s < t of beta[t] (k[t] k[s]) D[t, s] u[s]
    o[t] = e[t] q[t] S + sum over s <= t of (q[t] k[s]) D[t, s] u[s]

So for blocks by pairs the second kernel has one product with S, on tensor cores, and sums over the tokens before, where
it would pass over S token after token. Keys and queries are split into two numbers of bfloat16, whose products have
errors of 2**-16.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.columns import SIZE
from pallas_kernels.gated_delta.lanes import (
    BEHIND_VECTORS,
    FACTORS,
    KEYS,
    ORIGINS,
    QUERIES,
    ROW,
    TAPE,
    WARPS,
    Sizes,
    keys_and_queries,
    values_of_heads,
)
from pallas_kernels.gated_delta.prepare import Block, Rows, rows_made
from pallas_kernels.gated_delta.reference import Kept, Weights
from pallas_kernels.gated_delta.tile import TOKENS

HEADS_OF_CTA = 2  # whose values a CTA has
MOST_GROUP = 8  # value heads of a key head, whose factors and decays wait in shared memory


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


class _Call(NamedTuple):
    """References of a call; `inputs`, `gates` and what is prepared are written."""

    inputs: Any
    gates: Any
    conv: Any  # taps of channels one after another, in rows of 128
    A_log: Any
    dt_bias: Any
    rows: Any
    count: Any
    block: Any
    tape: Any
    prepared: Any


def first(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    block: Block | None,
    *,
    pairs: bool,
) -> tuple[Rows, Rows | Pairs | None, Kept]:
    """Prepare the accepted tokens of tapes and blocks, and make the blocks the new tapes.

    Args:
        kept: what the layers keep of sequences; states stay as they are.
        weights: of the layer.
        rows: of the sequences.
        count: tokens of the tapes to prepare; what lies behind them is not written.
        block: None prepares no block, and leaves tapes as they are.
        pairs: whether the block's tokens are put in pairs.

    Returns:
        The tapes' tokens, the block's, and what is kept then.
    """
    (_, HV, *_), (_, G, *_), B, HK = kept.state.shape, kept.gates.shape, len(rows), len(weights.conv)

    def empty(*shape: int, dtype: Any = jnp.float32) -> Any:
        return lax.empty((B, *shape), dtype)

    tokens = functools.partial(rows_made, empty, (HK, HV), (SIZE, SIZE), kept.inputs.dtype)
    T = 0 if block is None else block.inputs.shape[1]
    sizes = Sizes(HV // HK, HK, kept.inputs.shape[1] - G, G, T, pairs)
    prepared: Rows | Pairs | None = None if block is None else tokens(T, queries=True)
    if pairs:
        assert isinstance(prepared, Rows)
        vectors = (empty(HK, 2 * TOKENS, SIZE, dtype=jnp.bfloat16) for _ in range(2))
        prepared = Pairs(next(vectors), next(vectors), prepared.values, empty(HV, FACTORS, TOKENS))
    conv = weights.conv.reshape(HK, -1, SIZE)  # as TMA wants it: rows of 8 bytes are too short
    tape = tokens(G, queries=False)
    operands = _Call(kept.inputs, kept.gates, conv, *weights[1:], rows, count, block, tape, prepared)
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    ctas = 1 + pl.cdiv(sizes.group, HEADS_OF_CTA)  # those of keys and queries, which take longest, come first
    mesh = plgpu.Mesh(grid=(ctas, B, HK), grid_names=("cta", "sequence", "key"))

    def body(refs: Any) -> None:
        run = functools.partial(_body, jax.tree.unflatten(tree, refs), sizes)
        pl.run_scoped(run, **_scratch(sizes, kept.inputs.dtype, conv.dtype))

    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    changed = _compat.mosaic_in_place(body, leaves, mesh, compiler_params=params, name="gated_delta_first")
    results = jax.tree.unflatten(tree, changed)
    return results.tape, results.prepared, kept._replace(inputs=results.inputs, gates=results.gates)


def _scratch(sizes: Sizes, dtype: Any, dtype_of_taps: Any) -> dict[str, Any]:
    """Shared memory and barriers of a CTA."""
    of_tape, of_block = 2, 3 * bool(sizes.block)  # copies
    scratch = {
        "window": plgpu.SMEM((WARPS, sizes.before + TOKENS, SIZE), dtype),
        "taps": plgpu.SMEM((WARPS, sizes.before + 1, SIZE), dtype_of_taps),
        "vectors_full": plgpu.Barrier(num_arrivals=of_tape + 2 * of_block),
        "values_full": plgpu.Barrier(num_arrivals=HEADS_OF_CTA * (of_tape + of_block)),
    }
    if not sizes.by_pairs or jnp.dtype(dtype).itemsize == 4:
        scratch["raw"] = plgpu.SMEM(((TAPE + 1) * TOKENS, ROW), dtype)
    if sizes.by_pairs:
        by_token = (sizes.group, TOKENS)
        scratch |= {
            "shared": plgpu.SMEM(((BEHIND_VECTORS + 1) * TOKENS, ROW), jnp.bfloat16),
            "products": plgpu.SMEM((2, TOKENS, TOKENS + 1), jnp.float32),
            "logs": plgpu.SMEM(by_token, jnp.float32),
            "strengths": plgpu.SMEM(by_token, jnp.float32),
            "left": plgpu.SMEM((sizes.group, ORIGINS, TOKENS + 1), jnp.float32),
        }
    return scratch


def _body(call: _Call, sizes: Sizes, *, window: Any, taps: Any, vectors_full: Any, values_full: Any, **s: Any) -> None:
    """The body of one CTA: keys and queries of a key head, or the values of two of its heads."""
    b, key, cta = (lax.axis_index(name) for name in ("sequence", "key", "cta"))
    row, (P, G) = call.rows[b], call.gates.shape[:2]
    is_sequence = (row >= 0) & (row < P)
    row = jnp.where(is_sequence, row, 0)
    folded = jnp.where(is_sequence, jnp.clip(call.count[b], 0, G), 0)
    length = jnp.int32(0) if call.block is None else jnp.clip(call.block.length[b], 0, sizes.block)
    scalars = {"b": b, "key": key, "row": row, "folded": folded, "length": length}
    scalars["is_sequence"] = is_sequence.astype(jnp.int32)
    block_rows, width = sizes.before + sizes.block, sizes.before + 1

    def fetch(slot: int, part: Any, barrier: Any, is_tape: bool) -> None:
        """Bring a warp's 128 channels, of tape or block, and their taps."""
        channels, goal = pl.ds(part * SIZE, SIZE), window.at[slot]
        plgpu.copy_gmem_to_smem(call.conv.at[key, pl.ds(part * width, width), :], taps.at[slot], barrier)
        if is_tape:
            kept = call.inputs.at[row, :, key, channels]
            plgpu.copy_gmem_to_smem(kept, goal.at[pl.ds(0, sizes.before + G)], barrier)
            return
        before = call.inputs.at[row, pl.ds(folded, sizes.before), key, channels]
        plgpu.copy_gmem_to_smem(before, goal.at[pl.ds(0, sizes.before)], barrier)
        new = call.block.inputs.at[b, :, key, channels]
        plgpu.copy_gmem_to_smem(new, goal.at[pl.ds(sizes.before, sizes.block)], barrier)

    def keep(parts: dict[int, Any]) -> None:
        """Write windows of the block to where tapes lie, of which no other CTA reads these channels."""

        @pl.when(is_sequence)
        def _() -> None:
            for slot, part in parts.items():
                goal = call.inputs.at[row, pl.ds(0, block_rows), key, pl.ds(part * SIZE, SIZE)]
                plgpu.copy_smem_to_gmem(window.at[slot, pl.ds(0, block_rows)], goal)

    @pl.when(cta == 0)
    def _of_key_head() -> None:
        parts, heads = {QUERIES: 0, KEYS: 1}, _scalars_of_heads(call, sizes, key)
        fetch(TAPE, parts[KEYS], vectors_full, is_tape=True)
        if call.block is not None:
            for slot, part in parts.items():
                fetch(slot, part, vectors_full, is_tape=False)
        plgpu.barrier_wait(vectors_full)
        if call.block is not None:
            keep(parts)
        keys_and_queries(sizes, _refs_of_vectors(call, window, taps, s), scalars | heads)

    @pl.when(cta > 0)
    def _of_values() -> None:
        one = (cta - 1) * HEADS_OF_CTA
        members = one, jnp.minimum(one + 1, sizes.group - 1)  # the last one twice if they are odd
        parts = {2 * i: 2 + member for i, member in enumerate(members)}
        for slot, part in parts.items():
            fetch(slot + 1, part, values_full, is_tape=True)
            if call.block is not None:
                fetch(slot, part, values_full, is_tape=False)
        plgpu.barrier_wait(values_full)
        if call.block is not None:
            keep(parts)
        refs = {"window": window, "conv": taps, "tape_values": call.tape.values}
        if call.prepared is not None:
            refs["values"] = call.prepared.values
        values_of_heads(sizes, refs, scalars | dict(zip(("one", "other"), members, strict=True)))

    plgpu.wait_smem_to_gmem(0)  # of what is kept


def _scalars_of_heads(call: _Call, sizes: Sizes, key: Any) -> dict[str, Any]:
    """Parameters of a key head's value heads.

    As references they would count as written, as all do that instructions of ours are given, so that XLA copied both
    for each layer: 96 copies of 1.1 us in a round of 27B.
    """
    refs, head = {"rate": call.A_log, "bias": call.dt_bias}, key * sizes.group
    members = range(sizes.group)
    return {f"{name}_{i}": ref[head + i].astype(jnp.float32) for name, ref in refs.items() for i in members}


def _refs_of_vectors(call: _Call, window: Any, taps: Any, s: dict[str, Any]) -> dict[str, Any]:
    refs = {"window": window, "conv": taps, "tape_keys": call.tape.keys}
    refs |= {"kept_gates": call.gates, "tape_decay": call.tape.decay, "tape_strength": call.tape.strength}
    if call.block is not None:
        refs["block_gates"] = call.block.gates
    refs |= s
    if isinstance(call.prepared, Pairs):
        vectors, rest, _, factors = call.prepared
        refs |= {"vectors": vectors, "rest": rest, "factors": factors}
    elif call.prepared is not None:
        refs |= {name: getattr(call.prepared, name) for name in ("keys", "queries", "decay", "strength")}
    return refs
