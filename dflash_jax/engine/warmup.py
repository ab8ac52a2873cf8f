"""Compiling every step before the first request, and counting what is compiled after that."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import Progress

from dflash_jax.checkpoint.loader import Params
from dflash_jax.engine import round as steps
from dflash_jax.engine.controls import set_controls
from dflash_jax.engine.shapes import Shapes
from dflash_jax.engine.state import (
    CONTROLLED_MODES,
    MODES,
    Caches,
    Chunk,
    Controls,
    Sampler,
    Slots,
    StepSpec,
    Tables,
)

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax.monitoring's event, one a program
COMMIT_MODES = [(mode, False) for mode in MODES] + [(mode, True) for mode in CONTROLLED_MODES]
Job = Callable[[], jax.stages.Lowered]


class CompileCounter:
    """How many programs JAX has compiled in this process since it was first asked."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_attributes: str | int) -> None:
        self.count += event == COMPILED


@cache
def compile_counter() -> CompileCounter:
    """The counter of this process; JAX tells everybody of everything."""
    return CompileCounter()


def compile_steps(
    params: steps.FlatParams,
    shared: tuple[Params, Params],
    slots: Slots,
    caches: Caches,
    controls: Controls,
    sampler: Sampler,
    *,
    spec: StepSpec,
    shapes: Shapes,
) -> int:
    """Compile every step in every shape, several at a time; nothing is run. Shows a progress bar.

    Programs are left where calls of the same shapes find them.

    Args:
        params: the target's and the drafter's.
        shared: the same as trees, without the target's layers.
        slots: of the engine; only shapes, dtypes and places matter here, as of all that follow.
        caches: likewise.
        controls: likewise.
        sampler: likewise.
        spec: static.
        shapes: of the steps.

    Returns:
        How many programs there are.
    """
    whole = NamedSharding(spec.mesh, PartitionSpec())
    hidden_dtype, width = shared[0]["norm"].dtype, spec.target.hidden_size

    def hidden(rows: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length, width), hidden_dtype, sharding=whole)

    def block(rows: int, length: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((rows, spec.block), np.int32, sharding=whole) if length > 1 else None

    def tables(rows: int, pages: int) -> Tables:
        shape = (rows, 2 * pages + 2)
        packed: Any = _zeros(*shape)
        if spec.mesh.size > 1:  # then a round's tables are on the devices before its steps take them
            packed = jax.ShapeDtypeStruct(shape, np.int32, sharding=whole)
        return Tables(packed)

    state = (params, slots, caches)
    after_rounds = set(product(shapes.batches, shapes.lengths))
    after_prefills = {(rows, 1) for rows, _ in shapes.prefills()}
    jobs: list[Job] = []
    for pages in shapes.tables:
        for rows in shapes.batches:
            table = tables(rows, pages)
            if shapes.lengths[-1] > 1:
                jobs.append(partial(steps.draft.lower, shared, slots, caches.draft, table, spec=spec))
                late = (shared, slots, caches.draft, caches.features, table, _zeros(rows))
                jobs.append(partial(steps.catch_up.lower, *late, spec=spec))
            for length in shapes.lengths:
                static = {"spec": spec, "length": length}
                jobs.append(partial(steps.verify.lower, *state, table, block(rows, length), **static))
                jobs.append(partial(steps.greedy_round.lower, *state, table, **static, confirm=steps.accepted))
        for rows, tokens in shapes.prefills():
            plane, column = _zeros(rows, tokens), _zeros(rows)
            chunk = Chunk(plane, plane, column, column, column, Tables(_zeros(rows, 2 * pages + 2)))
            jobs.append(partial(steps.prefill.lower, *state, chunk, spec=spec))
            if rows == 1:
                scored = (params, caches.target, chunk, hidden(1, tokens), plane)
                jobs.append(partial(steps.score.lower, *scored, spec=spec))
    for (rows, length), (mode, with_logprobs) in product(sorted(after_rounds | after_prefills), COMMIT_MODES):
        if mode == "greedy" and (rows, length) not in after_prefills:
            continue  # part of `greedy_round`
        used = controls if mode in CONTROLLED_MODES else None
        words = -(-spec.target.vocab_size // 32)
        allowed = _zeros(rows, length, words, dtype=np.uint32) if mode == "constrained" else None
        given = (hidden(rows, length), block(rows, length), None if mode == "greedy" else sampler, allowed)
        options = {"spec": spec, "mode": mode, "with_logprobs": with_logprobs, "confirm": steps.accepted}
        jobs.append(partial(steps.commit.lower, shared[0], slots, used, _zeros(rows), *given, **options))
    row = jax.tree.map(lambda array: np.zeros(array.shape[1], array.dtype), controls)
    jobs.append(partial(set_controls.lower, controls, np.int32(0), row))
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled, programs = bar.add_task("Compiling", total=len(jobs)), []
        for lower in jobs:  # in this thread: what is lowered is lowered in Python, where threads wait for each other
            programs.append(pool.submit(lower().compile))
            programs[-1].add_done_callback(lambda _: bar.advance(compiled))
    for program in programs:
        program.result()
    return len(jobs)


def _zeros(*shape: int, dtype: type = np.int32) -> Any:
    """An array for its shape alone, which takes no memory."""
    return np.broadcast_to(dtype(0), shape)
