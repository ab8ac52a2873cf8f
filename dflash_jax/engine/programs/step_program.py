"""The steps of an engine, each declared once: its function, what it changes in place, and what it is called with.

The runner, which calls steps, and whoever compiles them before they are called read the same list, `STEPS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.engine.device import steps
from dflash_jax.engine.device.controls import set_controls
from dflash_jax.engine.device.shapes import StepShape
from dflash_jax.engine.device.slots import (
    ANY,
    CONTROLLED_MODES,
    Caches,
    Chunk,
    Controls,
    FlatParams,
    Sampler,
    SamplingMode,
    Slots,
    StepSpec,
    Tables,
)
from dflash_jax.weights.loader import Params


@dataclass(frozen=True)
class State:
    """What an engine keeps on its devices and hands to steps.

    Attributes:
        params: parameters of target and drafter.
        shared: the same parameters as trees, without the target's layers.
        slots: state of all slots.
        caches: what is kept of processed tokens.
        controls: of all slots.
        sampler: of all slots.
    """

    params: FlatParams
    shared: tuple[Params, Params]
    slots: Slots
    caches: Caches
    controls: Controls
    sampler: Sampler


class StepProgram(NamedTuple):
    """A step, of which programs of many shapes are compiled. It takes first the engine's state, then its inputs.

    Attributes:
        function: of positional arguments, and of keyword-only ones that are compiled in.
        donated: names of the arguments that it changes in place.
        state: the first arguments, from the engine's state and the mode of sampling.
        inputs: the others, from what `stand_ins` gives.
    """

    function: Callable[..., Any]
    donated: tuple[str, ...]
    state: Callable[[State, SamplingMode | None], tuple[Any, ...]]
    inputs: Callable[[SimpleNamespace], tuple[Any, ...]]

    def static(self, **values: Any) -> dict[str, Any]:
        """Those of the values that the function takes as keyword-only arguments."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: values[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def stand_ins(shape: StepShape, state: State, spec: StepSpec) -> SimpleNamespace:
    """What comes with a call of a step, by name: with the shapes, dtypes and places of what comes, and no values."""
    rows, tokens, pages, mode = shape.rows, shape.tokens, shape.pages, shape.mode

    def on_host(*sizes: int) -> Any:
        return np.broadcast_to(np.int32(0), sizes)

    def on_devices(*sizes: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=spec.mesh.whole)

    # A round's tables are on the devices before its steps take them if there are several.
    tables = (on_devices if spec.mesh.size > 1 else on_host)(rows, Tables.width(pages))
    row, plane = on_host(rows), on_host(rows, tokens)
    allowed = on_devices(rows, tokens, -(-spec.target.vocab_size // 32), dtype=np.uint32)
    return SimpleNamespace(
        row=row,
        plane=plane,
        moves=on_host(rows, 3),
        tables=Tables(tables),
        chunk=Chunk(plane, plane, row, row, row, Tables(on_host(rows, Tables.width(pages)))),
        block=on_devices(rows, spec.block) if tokens > 1 else None,
        hidden=on_devices(rows, tokens, spec.target.hidden_size, dtype=state.caches.features.dtype),
        sampler=None if mode == "greedy" else state.sampler,
        allowed=allowed if mode in CONTROLLED_MODES else None,
        needed=np.int32(0) if mode == ANY else None,
        controls=jax.tree.map(lambda array: np.zeros(array.shape[1], array.dtype), state.controls),
    )


def _models(state: State, _: SamplingMode | None) -> tuple[Any, ...]:
    return state.params, state.slots, state.caches


STEPS: dict[str, StepProgram] = {
    program.function.__name__: program
    for program in (
        StepProgram(
            steps.catch_up,
            donated=("cache",),
            state=lambda s, _: (s.shared, s.slots, s.caches.draft, s.caches.features),
            inputs=lambda i: (i.tables, i.row),
        ),
        StepProgram(
            steps.draft,
            donated=("cache",),
            state=lambda s, _: (s.shared, s.slots, s.caches.draft),
            inputs=lambda i: (i.tables,),
        ),
        StepProgram(steps.verify, ("caches",), _models, lambda i: (i.tables, i.block)),
        StepProgram(
            steps.commit,
            donated=("slots", "controls"),
            state=lambda s, mode: (s.shared[0], s.slots, s.controls if mode in CONTROLLED_MODES else None),
            inputs=lambda i: (i.row, i.hidden, i.block, i.sampler, i.allowed, i.needed),
        ),
        StepProgram(
            steps.verify_commit,
            donated=("slots", "controls", "caches"),
            state=lambda s, _: (s.params, s.slots, s.controls, s.caches),
            inputs=lambda i: (i.tables, i.block, i.sampler, i.allowed, i.needed),
        ),
        StepProgram(steps.greedy_round, ("slots", "caches"), _models, lambda i: (i.tables,)),
        StepProgram(steps.prefill, ("slots", "caches"), _models, lambda i: (i.chunk,)),
        StepProgram(
            steps.score,
            donated=(),
            state=lambda s, _: (s.params, s.caches.target),
            inputs=lambda i: (i.chunk, i.hidden, i.plane),
        ),
        StepProgram(
            steps.copy_states,
            donated=("states",),
            state=lambda s, _: (s.params, s.slots, s.caches.states),
            inputs=lambda i: (i.moves,),
        ),
        StepProgram(set_controls, ("controls",), lambda s, _: (s.controls,), lambda i: (np.int32(0), i.controls)),
    )
}
