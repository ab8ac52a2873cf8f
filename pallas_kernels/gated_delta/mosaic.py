"""Verify and fold of Gated DeltaNet on Hopper: the second kernel, with a state in registers (`columns`, `quads`).

A consumer warpgroup has one head of one sequence, or half of its columns where heads are few: a column needs no other.
A producer warpgroup (`producer`) brings states and tokens by TMA while the two consumers compute, and moves the raw
inputs that become the new tape where the first kernel has not. Tokens are written one after another, by the same
operations whether they are folded, decoded or verified, and however wide an item is: so a state's bits do not depend on
that.

Blocks of many heads in 16 bits are not written (`takes_pairs`): the first kernel says what their tokens have to do with
each other, and one product on tensor cores, with errors of 2**-16, takes the place of 16 passes over the state.
"""

from __future__ import annotations

import functools
import math
from typing import Any

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
from pallas_kernels.gated_delta.producer import CONSUMERS, Call, Place, fetch_state, fetch_tokens, move_tape, place_of
from pallas_kernels.gated_delta.quads import Quads
from pallas_kernels.gated_delta.reference import Kept, Weights
from pallas_kernels.lib.shared_memory import tiled

MOST_STATES = 2 * CONSUMERS  # in shared memory: those that are computed with, and those that come and go
# Items of a consumer from which so many pay. With fewer, the first kernel starts later beside so much shared memory: a
# layer of 27B takes 64.8 -> 61.8 us for 16 sequences, and 22.4 -> 23.1 for 4 (H100).
LEAST_ITEMS = 3
SHARED_MEMORY = 224 * 1024  # bytes of a CTA: 227 KiB less 3 KiB for barriers and alignment
MOST_TOKENS = 16  # of a tape, whose rows wait in shared memory beside two states
LEAST_FOR_PAIRS = 9  # tokens of a block, since a product with 16 costs as much
LEAST_FILL = 0.2  # of the multiprocessors, by heads; fewer were not measured
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

    27B's blocks of 16 take 13.9 -> 12.6 us by pairs for one sequence and 19.4 -> 15.7 for two, 35B's 12.8 -> 11.4 for
    one and 21.1 -> 16.9 for four (H200).
    """
    B, T, heads, _ = gates.shape
    least = LEAST_FOR_PAIRS if B * heads >= _compat.sm_count() else LEAST_FOR_FEW
    return inputs.dtype.itemsize == 2 and least <= T and B * heads >= LEAST_FILL * _compat.sm_count()


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


def _call(
    kept: Kept, rows: Any, count: Any, targets: Any, tape: Rows, prepared: Any, block: Any, outputs: Any,
    width: int | None,
) -> tuple[Any, Kept]:  # fmt: skip
    B, (_, heads, _, _) = len(rows), kept.state.shape
    out = None if outputs is None else lax.empty(outputs.shape, outputs.dtype)
    operands = Call(*kept, out, rows, count, targets, tape, prepared, block)
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    if isinstance(prepared, Pairs):
        width = COLUMNS
    elif width is None:  # whole heads read keys half as often, but few of them leave multiprocessors idle
        width = SIZE if B * heads >= CONSUMERS * _compat.sm_count() else COLUMNS
    items = B * heads * SIZE // width
    ctas = min(_compat.sm_count(), items)
    scratch = _scratch(operands, width, is_long=items > LEAST_ITEMS * CONSUMERS * ctas)
    mesh = plgpu.Mesh(
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
    )

    def body(refs: Any) -> None:
        run = functools.partial(_body, jax.tree.unflatten(tree, refs), items, width)
        pl.run_scoped(run, collective_axes="warpgroup", **scratch)

    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    name = "gated_delta_fold" if block is None else "gated_delta_verify"
    changed = _compat.mosaic_in_place(body, leaves, mesh, compiler_params=params, name=name)
    results = jax.tree.unflatten(tree, changed)
    return results.outputs, Kept(results.state, results.inputs, results.gates)


def _scratch(call: Call, width: int, *, is_long: bool) -> dict[str, Any]:
    """Shared memory and barriers of a CTA; `is_long` says that its consumers have many items."""
    parts: dict[str, dict[str, Any]] = {"tape": _tokens(call.gates.shape[1], width, call.inputs.dtype)}
    prepared = call.prepared
    if isinstance(prepared, Rows):
        tokens = prepared.keys.shape[2]
        queries = plgpu.SMEM((CONSUMERS, tokens, SIZE), jnp.float32)
        parts["block"] = _tokens(tokens, width, call.inputs.dtype) | {"queries": queries}
    elif prepared is not None:
        parts["block"] = {
            name: tiled((CONSUMERS, *prepared.vectors.shape[2:]), jnp.bfloat16) for name in ("vectors", "rest")
        }
        parts["block"]["values"] = plgpu.SMEM((CONSUMERS, prepared.values.shape[2], width), call.inputs.dtype)
        parts["block"]["factors"] = plgpu.SMEM((CONSUMERS, *prepared.factors.shape[2:]), jnp.float32)
    scratch = {f"{name}_{part}": memory for name, part_of in parts.items() for part, memory in part_of.items()}
    size = sum(math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize for memory in scratch.values())
    fits = size + MOST_STATES * SIZE * width * 4 <= SHARED_MEMORY
    states = MOST_STATES if fits and is_long else CONSUMERS
    scratch["state_s"] = tiled((states, SIZE, width), jnp.float32)
    for name, copies, count in (("state", 1, states), *((name, len(part), CONSUMERS) for name, part in parts.items())):
        scratch[f"{name}_full"] = plgpu.Barrier(num_barriers=count, num_arrivals=copies)
        scratch[f"{name}_empty"] = plgpu.Barrier(num_barriers=count)
    return scratch


def _tokens(tokens: int, width: int, dtype: Any) -> dict[str, Any]:
    """Shared memory for tokens that are written one by one."""
    return {
        "keys": plgpu.SMEM((CONSUMERS, tokens, SIZE), jnp.float32),
        "values": plgpu.SMEM((CONSUMERS, tokens, width), dtype),
        "decay": plgpu.SMEM((CONSUMERS, LEAST_GATES), jnp.float32),
        "strength": plgpu.SMEM((CONSUMERS, LEAST_GATES), jnp.float32),
    }


def _body(call: Call, items: int, width: int, **s: Any) -> None:
    """The body of one CTA: it takes every ``ctas``-th item, ``width`` columns each; ``s`` is its scratch."""
    cta, me, ctas = lax.axis_index("cta"), lax.axis_index("warpgroup"), min(_compat.sm_count(), items)
    count = pl.cdiv(items - cta, ctas)

    @pl.when(me == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def place(i: Any) -> Place:
            return place_of(call, cta + i * ctas, width)

        def produce(i: Any, nothing: None) -> None:
            @pl.when(i + 1 < count)
            def _() -> None:
                fetch_state(call, place(i + 1), i + 1, s)

            fetch_tokens(call, place(i), i, s)
            if call.block is None or not _keeps_blocks(call):
                move_tape(call, place(i))

        fetch_state(call, place(0), 0, s)
        lax.fori_loop(0, count, produce, None)

    @pl.when(me < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")

        def consume(i: Any, nothing: None) -> None:
            item = i * CONSUMERS + me
            slots = lax.rem(item, s["state_s"].shape[0]), me
            _advance(call, place_of(call, cta + item * ctas, width), width, slots, s)

        lax.fori_loop(0, pl.cdiv(count - me, CONSUMERS), consume, None)
        plgpu.wait_smem_to_gmem(0)


def _advance(call: Call, place: Place, width: int, slots: tuple[Any, Any], s: dict[str, Any]) -> None:
    """A consumer's item: fold, write the state, run the block. Slots are those of the state and of the tokens.

    Where there are slots for it, the state leaves by TMA from where it came.
    """
    slot, me = slots
    columns = Quads() if isinstance(call.prepared, Pairs) else Columns(width)
    by_tma = s["state_s"].shape[0] > CONSUMERS
    goal = call.state.at[place.target, place.head, :, place.columns]
    plgpu.barrier_wait(s["state_full"].at[slot])
    state = columns.load_state(s["state_s"].at[slot])
    if not by_tma:
        plgpu.barrier_arrive(s["state_empty"].at[slot])
    plgpu.barrier_wait(s["tape_full"].at[me])
    state = _run(state, "tape", columns, (place, None), place.folded, me, s)
    plgpu.barrier_arrive(s["tape_empty"].at[me])

    @pl.when(place.is_written & ((place.folded > 0) | (call.block is None)))
    def _() -> None:
        if not by_tma:
            columns.store_state(state, goal)
            return
        columns.keep_state(state, s["state_s"].at[slot])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["state_s"].at[slot], goal)

    if call.block is not None:
        plgpu.barrier_wait(s["block_full"].at[me])
    if isinstance(columns, Quads):
        vectors, rest, values, factors = (
            s[f"block_{name}"].at[me] for name in ("vectors", "rest", "values", "factors")
        )
        products = columns.products(state, vectors, rest)
        columns.run(products, values, factors, call.outputs, (place.b, place.head, place.columns.start))
    elif call.block is not None:
        _run(state, "block", columns, (place, call.outputs), jnp.int32(call.outputs.shape[1]), me, s)
    if call.block is not None:
        plgpu.barrier_arrive(s["block_empty"].at[me])
    if by_tma:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(s["state_empty"].at[slot])


def _run(
    state: jax.Array,
    name: str,
    columns: Any,
    goal: tuple[Place, Any],
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
