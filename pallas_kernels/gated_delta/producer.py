"""What the producer warpgroup of the second kernel does: it brings states and tokens, and moves tapes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.columns import SIZE
from pallas_kernels.gated_delta.first import Pairs

CONSUMERS = 2  # warpgroups that the items of a CTA go to in turns


class Call(NamedTuple):
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


class Place(NamedTuple):
    """What a consumer has: columns of one head of one sequence."""

    b: Any
    head: Any
    columns: Any  # a pl.ds
    key: Any
    row: Any
    folded: Any
    target: Any
    is_written: Any


def place_of(call: Call, item: Any, width: int) -> Place:
    """What an item is: ``width`` columns of a head, heads of a sequence one after another."""
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
    return Place(b, head, columns, key, row, folded, jnp.where(is_written, target, 0), is_written)


def fetch_state(call: Call, place: Place, i: Any, s: dict[str, Any]) -> None:
    """Start the copy of an item's state as its slot comes free."""
    slots = s["state_s"].shape[0]
    slot = lax.rem(jnp.int32(i), slots)

    @pl.when(i >= slots)
    def _() -> None:
        plgpu.barrier_wait(s["state_empty"].at[slot])

    state = call.state.at[place.row, place.head, :, place.columns]
    plgpu.copy_gmem_to_smem(state, s["state_s"].at[slot], s["state_full"].at[slot])


def fetch_tokens(call: Call, place: Place, i: Any, s: dict[str, Any]) -> None:
    """Start the copies of an item's tokens as their places come free: the tape's, which are free first, come first."""
    slot = lax.rem(i, CONSUMERS)
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

        @pl.when(i >= CONSUMERS)
        def _(name: str = name) -> None:
            plgpu.barrier_wait(s[f"{name}_empty"].at[slot])

        for part, (source, head) in parts.items():
            rows: Any = source.at[place.b, head, :, place.columns] if part == "values" else source.at[place.b, head]
            plgpu.copy_gmem_to_smem(rows, s[f"{name}_{part}"].at[slot], s[f"{name}_full"].at[slot])


def move_tape(call: Call, place: Place) -> None:
    """Write the inputs before the new tape, and the block, the new tape: a head's share, by its first item.

    A key head's queries and keys are shared out among its value heads. All is read before anything is written, so that
    the producer waits for memory once.
    """
    G, heads = call.gates.shape[1], call.state.shape[1]
    before, group = call.inputs.shape[1] - G, heads // call.inputs.shape[2]
    member = lax.rem(place.head, group)
    tokens = 0 if call.block is None else call.block.inputs.shape[1]

    def move(*firsts: Any) -> None:
        """Channels, 128 from each of the first ones on, and the gates."""
        raw = []
        for channels in (pl.ds(begin, SIZE) for begin in firsts):
            raw.append([call.inputs[place.row, place.folded + j, place.key, channels] for j in range(before)])
            raw[-1] += [call.block.inputs[place.b, t, place.key, channels] for t in range(tokens)]
        at = [(t, i) for t in range(tokens) for i in range(2)]
        gates = [call.block.gates[place.b, t, place.head, i] for t, i in at]
        for begin, rows in zip(firsts, raw, strict=True):
            for j, row in enumerate(rows):
                call.inputs[place.target, j, place.key, pl.ds(begin, SIZE)] = row
        for (t, i), number in zip(at, gates, strict=True):
            call.gates[place.target, t, place.head, i] = number

    is_first, values = place.is_written & (place.columns.start == 0), (2 + member) * SIZE
    if group == 1:
        pl.when(is_first)(functools.partial(move, 0, SIZE, values))
        return
    pl.when(is_first & (member < 2))(functools.partial(move, member * SIZE, values))
    if group > 2:
        pl.when(is_first & (member >= 2))(functools.partial(move, values))
