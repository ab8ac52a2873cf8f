"""Verify and fold of Gated DeltaNet on Hopper: the second kernel, with a state in registers (`columns`, `quads`).

A consumer warpgroup has one head of one sequence, or half of its columns where heads are few: a column needs no other.
A producer warpgroup brings states and tokens by TMA while the two consumers compute, and moves the raw inputs that
become the new tape where the first kernel has not. Tokens are written one after another, by the same operations whether
they are folded, decoded or verified, and however wide an item is: so a state's bits do not depend on that.

Blocks of many heads in 16 bits are not written (`takes_pairs`): the first kernel says what their tokens have to do with
each other, and one product on tensor cores, with errors of 2**-16, takes the place of 16 passes over the state.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.columns import COLUMNS, SIZE, Columns
from pallas_kernels.gated_delta.first import MOST_GROUP, Pairs, first
from pallas_kernels.gated_delta.prepare import LEAST_GATES, Block, Rows, prepare
from pallas_kernels.gated_delta.quads import Quads
from pallas_kernels.gated_delta.reference import Kept, Weights
from pallas_kernels.lib.shared_memory import tiled

CONSUMERS = 2
MOST_TOKENS = 16  # of a tape, whose rows wait in shared memory beside two states
LEAST_FOR_PAIRS = 9  # tokens of a block, since a product with 16 costs as much
LEAST_FOR_FEW = 12  # where some multiprocessors have no head: a token takes 0.8 us, the product 9.3 (27B, H200)


def refusal(kept: Kept, weights: Weights) -> str | None:
    """Say why the Mosaic backend cannot do this call, or None."""
    del weights
    if (sizes := kept.state.shape[-2:]) != (SIZE, SIZE):
        return f"The Mosaic kernel needs heads of {SIZE}; these are {sizes}."
    if (tokens := kept.gates.shape[1]) > MOST_TOKENS:
        return f"The Mosaic kernel needs tapes of at most {MOST_TOKENS} tokens; this has {tokens}."
    if (group := kept.state.shape[1] // kept.inputs.shape[2]) > MOST_GROUP:
        return f"The Mosaic kernel needs at most {MOST_GROUP} value heads for a key head; these are {group}."
    return None


def takes_pairs(inputs: Float[Array, "B T HK _"], gates: Float[Array, "B T HV 2"]) -> bool:
    """Say whether blocks are faster by pairs, and rounding their outputs leaves no more of the errors.

    27B's blocks of 16 take 19.4 -> 15.7 us by pairs for 2 sequences, whose 96 heads are fewer than multiprocessors, and
    12.9 -> 12.2 for one, which is left as it is; 35B's 21.1 -> 16.9 for 4 (H200).
    """
    B, T, heads, _ = gates.shape
    least = LEAST_FOR_PAIRS if B * heads >= _compat.sm_count() else LEAST_FOR_FEW
    return inputs.dtype.itemsize == 2 and least <= T and 2 * B * heads >= _compat.sm_count()


@functools.partial(jax.jit, static_argnames=("width", "pairs"))
def verify(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
    *,
    width: int | None = None,
    pairs: bool | None = None,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """See ``pallas_kernels.gated_delta.verify``.

    ``width`` is an item's columns, 64 or 128, where the block's tokens are written one by one; ``pairs`` says that they
    are not. Both are picked where they are None.
    """
    if pairs is None:
        pairs = width is None and takes_pairs(inputs, gates)
    block = Block(inputs.astype(kept.inputs.dtype), gates.astype(kept.gates.dtype), length)
    tape, prepared, kept = _prepared(kept, weights, rows, count, block, pairs=pairs)
    shape = (*inputs.shape[:2], kept.state.shape[1], SIZE)
    return _call(kept, rows, count, rows, tape, prepared, block, jax.ShapeDtypeStruct(shape, inputs.dtype), width)


@functools.partial(jax.jit, static_argnames="width")
def fold(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    targets: Int[Array, " B"],
    *,
    width: int | None = None,
) -> Kept:
    """See ``pallas_kernels.gated_delta.fold``; ``width`` as for `verify`."""
    tape, _, kept = _prepared(kept, weights, rows, count, None, pairs=False)
    return _call(kept, rows, count, targets, tape, None, None, None, width)[1]


def _prepared(
    kept: Kept, weights: Weights, rows: Any, count: Any, block: Block | None, *, pairs: bool
) -> tuple[Rows, Rows | Pairs | None, Kept]:
    """What `first` returns. Tapes of one token, of engines without a drafter, are too short for its tiles of 16."""
    if _keeps_blocks(kept):
        return first(kept, weights, rows, count, block, pairs=pairs)
    tape, prepared = prepare(kept, weights, rows, count, block, mixes=False, interpret=False)
    assert prepared is None or isinstance(prepared, Rows)
    return tape, prepared, kept


def _keeps_blocks(kept: Any) -> bool:
    """Whether the first kernel is `first`, which makes blocks the new tapes."""
    return bool(kept.gates.shape[1] > 1)


class _Call(NamedTuple):
    """References of a call; `state`, `inputs`, `gates` and `outputs` are written."""

    state: Any
    inputs: Any
    gates: Any
    outputs: Any
    rows: Any
    count: Any
    targets: Any
    tape: Any
    prepared: Any
    block: Any


class _Place(NamedTuple):
    """What a consumer has: columns of one head of one sequence."""

    b: Any
    head: Any
    columns: Any  # a pl.ds
    key: Any
    row: Any
    folded: Any
    target: Any
    is_written: Any


def _call(
    kept: Kept, rows: Any, count: Any, targets: Any, tape: Rows, prepared: Any, block: Any, outputs: Any,
    width: int | None,
) -> tuple[Any, Kept]:  # fmt: skip
    B, (_, heads, _, _) = len(rows), kept.state.shape
    out = None if outputs is None else lax.empty(outputs.shape, outputs.dtype)
    operands = _Call(*kept, out, rows, count, targets, tape, prepared, block)
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    if isinstance(prepared, Pairs):
        width = COLUMNS
    elif width is None:  # whole heads read keys half as often, but few of them leave multiprocessors idle
        width = SIZE if B * heads >= CONSUMERS * _compat.sm_count() else COLUMNS
    items = B * heads * SIZE // width
    mesh = plgpu.Mesh(
        grid=(min(_compat.sm_count(), items),),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
    )

    def body(refs: Any) -> None:
        run = functools.partial(_body, jax.tree.unflatten(tree, refs), items, width)
        pl.run_scoped(run, collective_axes="warpgroup", **_scratch(operands, width))

    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    name = "gated_delta_fold" if block is None else "gated_delta_verify"
    changed = _compat.mosaic_in_place(body, leaves, mesh, compiler_params=params, name=name)
    results = jax.tree.unflatten(tree, changed)
    return results.outputs, Kept(results.state, results.inputs, results.gates)


def _scratch(call: _Call, width: int) -> dict[str, Any]:
    """Shared memory and barriers of a CTA."""
    scratch: dict[str, Any] = {"state_s": plgpu.SMEM((CONSUMERS, SIZE, width), jnp.float32)}
    prepared, written = call.prepared, {"tape": call.gates.shape[1]}
    if isinstance(prepared, Rows):
        written["block"] = prepared.keys.shape[2]
    for name, tokens in written.items():
        scratch |= {
            f"{name}_keys": plgpu.SMEM((CONSUMERS, tokens, SIZE), jnp.float32),
            f"{name}_values": plgpu.SMEM((CONSUMERS, tokens, width), call.inputs.dtype),
            f"{name}_decay": plgpu.SMEM((CONSUMERS, LEAST_GATES), jnp.float32),
            f"{name}_strength": plgpu.SMEM((CONSUMERS, LEAST_GATES), jnp.float32),
        }
    if isinstance(prepared, Rows):
        scratch["block_queries"] = plgpu.SMEM((CONSUMERS, written["block"], SIZE), jnp.float32)
    elif prepared is not None:
        for name in ("vectors", "rest"):
            scratch[f"block_{name}"] = tiled((CONSUMERS, *prepared.vectors.shape[2:]), jnp.bfloat16)
        scratch["block_values"] = plgpu.SMEM((CONSUMERS, prepared.values.shape[2], width), call.inputs.dtype)
        scratch["block_factors"] = plgpu.SMEM((CONSUMERS, *prepared.factors.shape[2:]), jnp.float32)
    copies = len(scratch) - 1  # all but the state
    return scratch | {
        "state_full": plgpu.Barrier(num_barriers=CONSUMERS),
        "state_empty": plgpu.Barrier(num_barriers=CONSUMERS),
        "rows_full": plgpu.Barrier(num_barriers=CONSUMERS, num_arrivals=copies),
        "rows_empty": plgpu.Barrier(num_barriers=CONSUMERS),
    }


def _place(call: _Call, item: Any, width: int) -> _Place:
    heads, P, G = call.state.shape[1], call.state.shape[0], call.gates.shape[1]
    parts = SIZE // width
    b, head = lax.div(item, heads * parts), lax.rem(lax.div(item, parts), heads)
    row, target = call.rows[b], call.targets[b]
    exists = (row >= 0) & (row < P)
    row = jnp.where(exists, row, 0)
    folded = jnp.where(exists, jnp.clip(call.count[b], 0, G), 0)
    is_written = exists & (target >= 0) & (target < P)
    key = lax.div(head, heads // call.inputs.shape[2])
    columns = pl.ds(lax.rem(item, parts) * width, width)
    return _Place(b, head, columns, key, row, folded, jnp.where(is_written, target, 0), is_written)


def _body(call: _Call, items: int, width: int, **s: Any) -> None:
    """The body of one CTA: it takes every ``ctas``-th item, ``width`` columns each; ``s`` is its scratch."""
    cta, me, ctas = lax.axis_index("cta"), lax.axis_index("warpgroup"), min(_compat.sm_count(), items)
    count = pl.cdiv(items - cta, ctas)

    @pl.when(me == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def produce(i: Any, nothing: None) -> None:
            place = _place(call, cta + i * ctas, width)
            _fetch(call, place, i, s)
            if call.block is None or not _keeps_blocks(call):
                _move_tape(call, place)

        lax.fori_loop(0, count, produce, None)

    @pl.when(me < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")

        def consume(i: Any, nothing: None) -> None:
            _advance(call, _place(call, cta + (i * CONSUMERS + me) * ctas, width), width, me, s)

        lax.fori_loop(0, pl.cdiv(count - me, CONSUMERS), consume, None)


def _fetch(call: _Call, place: _Place, i: Any, s: dict[str, Any]) -> None:
    """Start the copies of an item as its places come free: its state first, which is free first."""
    slot = lax.rem(i, CONSUMERS)

    @pl.when(i >= CONSUMERS)
    def _() -> None:
        plgpu.barrier_wait(s["state_empty"].at[slot])

    state = call.state.at[place.row, place.head, :, place.columns]
    plgpu.copy_gmem_to_smem(state, s["state_s"].at[slot], s["state_full"].at[slot])

    @pl.when(i >= CONSUMERS)
    def _() -> None:
        plgpu.barrier_wait(s["rows_empty"].at[slot])

    for name, tokens in (("tape", call.tape), ("block", call.prepared)):
        if tokens is None:
            continue
        if isinstance(tokens, Pairs):
            parts = {"vectors": (tokens.vectors, place.key), "rest": (tokens.rest, place.key)}
            parts |= {"values": (tokens.values, place.head), "factors": (tokens.factors, place.head)}
        else:
            parts = {"keys": (tokens.keys, place.key), "values": (tokens.values, place.head)}
            parts |= {"decay": (tokens.decay, place.head), "strength": (tokens.strength, place.head)}
            if tokens.queries is not None:
                parts["queries"] = tokens.queries, place.key
        for part, (source, head) in parts.items():
            rows: Any = source.at[place.b, head, :, place.columns] if part == "values" else source.at[place.b, head]
            plgpu.copy_gmem_to_smem(rows, s[f"{name}_{part}"].at[slot], s["rows_full"].at[slot])


def _advance(call: _Call, place: _Place, width: int, me: Any, s: dict[str, Any]) -> None:
    """A consumer's item: fold, write the state, run the block."""
    columns = Quads() if isinstance(call.prepared, Pairs) else Columns(width)
    plgpu.barrier_wait(s["state_full"].at[me])
    state = columns.load_state(s["state_s"].at[me])
    plgpu.barrier_arrive(s["state_empty"].at[me])
    plgpu.barrier_wait(s["rows_full"].at[me])
    state = _run(state, "tape", columns, (place, None), place.folded, me, s)

    @pl.when(place.is_written & ((place.folded > 0) | (call.block is None)))
    def _() -> None:
        columns.store_state(state, call.state.at[place.target, place.head, :, place.columns])

    if isinstance(columns, Quads):
        vectors, rest, values, factors = (
            s[f"block_{name}"].at[me] for name in ("vectors", "rest", "values", "factors")
        )
        products = columns.products(state, vectors, rest)
        columns.run(products, values, factors, call.outputs, (place.b, place.head, place.columns.start))
    elif call.block is not None:
        _run(state, "block", columns, (place, call.outputs), jnp.int32(call.outputs.shape[1]), me, s)
    plgpu.barrier_arrive(s["rows_empty"].at[me])


def _run(
    state: jax.Array,
    name: str,
    columns: Any,
    goal: tuple[_Place, Any],
    count: Any,
    me: Any,
    s: dict[str, Any],
) -> jax.Array:
    """Write tokens to a state, one after another; where the goal has outputs, store each token's."""
    place, outputs = goal
    keys, values, decays, strengths = (s[f"{name}_{part}"].at[me] for part in ("keys", "values", "decay", "strength"))
    last = keys.shape[0] - 1

    def token(t: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, product = carry
        decay = decays[t]
        delta = strengths[t] * (columns.load_column(values.at[t]) - decay * product)
        query = None if outputs is None else s[f"{name}_queries"].at[me, t]
        following = keys.at[jnp.minimum(t + 1, last)]
        state, output, product = columns.written(state, decay, delta, keys.at[t], query, following)
        if outputs is not None:
            columns.store_column(output, outputs.at[place.b, t, place.head, place.columns])
        return state, product

    state, _ = lax.fori_loop(0, count, token, (state, columns.projected(state, keys.at[0])))
    return state


def _move_tape(call: _Call, place: _Place) -> None:
    """Write the inputs before the new tape, and the block, the new tape: a head's share, by its first item."""
    G, heads = call.gates.shape[1], call.state.shape[1]
    before, group = call.inputs.shape[1] - G, heads // call.inputs.shape[2]
    member = lax.rem(place.head, group)

    def move(first: Any) -> None:
        """128 channels."""
        channels = pl.ds(first, SIZE)
        kept = [call.inputs[place.row, place.folded + j, place.key, channels] for j in range(before)]
        tokens = 0 if call.block is None else call.block.inputs.shape[1]
        new = [call.block.inputs[place.b, t, place.key, channels] for t in range(tokens)]
        for j, raw in enumerate((*kept, *new)):
            call.inputs[place.target, j, place.key, channels] = raw

    @pl.when(place.is_written & (place.columns.start == 0))
    def _() -> None:
        move((2 + member) * SIZE)

        @pl.when(member == 0)
        def _of_key_head() -> None:
            move(0)
            move(SIZE)

        if call.block is not None:
            at = [(t, i) for t in range(call.block.gates.shape[1]) for i in range(2)]
            raw = [call.block.gates[place.b, t, place.head, i] for t, i in at]
            for (t, i), number in zip(at, raw, strict=True):
                call.gates[place.target, t, place.head, i] = number
