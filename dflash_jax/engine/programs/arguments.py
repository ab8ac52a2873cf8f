"""What each step is called with: arguments that have the shapes, dtypes and places of those that an engine gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflash_jax.engine.device import steps
from dflash_jax.engine.device.acceptance import Confirm
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
    Slots,
    StepSpec,
    Tables,
)
from dflash_jax.weights.loader import Params


@dataclass(frozen=True)
class State:
    """What an engine keeps on its devices and hands to steps.

    Attributes:
        params: the target's and the drafter's.
        shared: the same as trees, without the target's layers.
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


@dataclass(frozen=True)
class Arguments:
    """Arguments of a step, positional and static."""

    positional: tuple[Any, ...]
    static: dict[str, Any]


def arguments_of(shape: StepShape, state: State, spec: StepSpec, confirm: Confirm) -> Arguments:
    """Arguments of one program; only shapes, dtypes and places of them mean anything.

    Args:
        shape: of the program.
        state: of the engine.
        spec: static, as of every step but "set_controls".
        confirm: static, of steps that commit.
    """
    rows, tokens, pages, mode = shape.rows, shape.tokens, shape.pages, shape.mode
    state_of_models = (state.params, state.slots, state.caches)

    def on_devices(*sizes: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=spec.mesh.whole)

    # A round's tables are on the devices before its steps take them if there are several.
    packed: Any = (on_devices if spec.mesh.size > 1 else zeros)(rows, Tables.width(pages))
    hidden = on_devices(rows, tokens, spec.target.hidden_size, dtype=state.shared[0]["norm"].dtype)
    block = on_devices(rows, spec.block) if tokens > 1 else None
    sampling: tuple[Any, ...] = (None, None, None)
    controls = state.controls if mode in CONTROLLED_MODES else None
    if mode is not None and mode != "greedy":
        allowed = on_devices(rows, tokens, -(-spec.target.vocab_size // 32), dtype=np.uint32)
        sampling = (
            state.sampler,
            allowed if mode in CONTROLLED_MODES else None,
            np.int32(0) if mode == ANY else None,
        )
    match shape.step:
        case "catch_up":
            late = (state.shared, state.slots, state.caches.draft, state.caches.features, Tables(packed), zeros(rows))
            return Arguments(late, {"spec": spec})
        case "draft":
            return Arguments((state.shared, state.slots, state.caches.draft, Tables(packed)), {"spec": spec})
        case "verify":
            return Arguments((*state_of_models, Tables(packed), block), {"spec": spec, "length": tokens})
        case "commit":
            sampled = (state.shared[0], state.slots, controls, zeros(rows), hidden, block, *sampling)
            return Arguments(sampled, {"spec": spec, "mode": mode, "confirm": confirm})
        case "verify_commit":
            verified = (state.params, state.slots, controls, state.caches, Tables(packed), block, *sampling)
            return Arguments(verified, {"spec": spec, "length": tokens, "mode": mode, "confirm": confirm})
        case "greedy_round":
            static = {"spec": spec, "length": tokens, "confirm": confirm}
            return Arguments((*state_of_models, Tables(packed)), static)
        case "prefill":
            return Arguments((*state_of_models, _chunk(rows, tokens, pages)), {"spec": spec})
        case "score":
            scored = (state.params, state.caches.target, _chunk(rows, tokens, pages), hidden, zeros(rows, tokens))
            return Arguments(scored, {"spec": spec})
        case "set_controls":
            row = jax.tree.map(lambda array: np.zeros(array.shape[1], array.dtype), state.controls)
            return Arguments((state.controls, np.int32(0), row), {})
        case other:
            raise ValueError(f"there is no step {other!r}")


def function_of(step: str) -> Any:
    """The function of a step by its name."""
    return set_controls if step == "set_controls" else getattr(steps, step)


def zeros(*shape: int, dtype: Any = np.int32) -> Any:
    """An array for its shape alone, which takes no memory."""
    return np.broadcast_to(dtype(0), shape)


def _chunk(rows: int, tokens: int, pages: int) -> Chunk:
    plane, column = zeros(rows, tokens), zeros(rows)
    return Chunk(plane, plane, column, column, column, Tables(zeros(rows, Tables.width(pages))))
