"""What lives on the devices (parameters, caches, state of all slots), and the calls of the steps that change it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.engine.device.acceptance import Confirm, accepted
from dflash_jax.engine.device.budget import has_room, log_peak
from dflash_jax.engine.device.controls import empty_controls
from dflash_jax.engine.device.key_rounding import key_rounding
from dflash_jax.engine.device.model import Model
from dflash_jax.engine.device.pools import make_caches
from dflash_jax.engine.device.shapes import StepShape
from dflash_jax.engine.device.slots import (
    ANY,
    CONTROLLED_MODES,
    MODES,
    Chunk,
    Controls,
    Emitted,
    FlatParams,
    Logprobs,
    Sampler,
    SamplingMode,
    Slots,
    StepSpec,
    Tables,
)
from dflash_jax.engine.host.inputs import SamplerRows, controls_of
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.engine.host.snapshots import Move
from dflash_jax.engine.programs.program import Program
from dflash_jax.engine.programs.step_program import STEPS, State, stand_ins
from dflash_jax.engine.programs.store import programs
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.parallel.platform import compiler_options
from dflash_jax.state.layout import Layout


class ModelRunner:
    """Enqueues steps on the devices, and waits for none of them.

    Attributes:
        params: parameters of target and drafter.
        slots: state of all slots, as it will be after all enqueued steps.
        caches: what is kept of processed tokens, as it will be after all enqueued steps.
        num_first_runs: calls of programs that had not run before.
    """

    def __init__(
        self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig, spec: StepSpec, layout: Layout
    ):
        self.mesh, self.spec, self._config, self._layout = mesh, spec, config, layout
        self.params = (target.params, draft.params if draft else {})
        self._kv_scales = (target.kv_scales, draft.kv_scales if draft else None)
        peers = mesh.peers(config.dtype.itemsize * max(m.config.hidden_size for m in (target, draft) if m))
        self._beside = {} if peers is None else {"peers": peers}
        self._store = programs()
        self.num_first_runs = 0
        self.confirm = accepted
        self._hand_over()
        self._key_rounding = key_rounding(self._flat_params, spec, config)
        self._make_state()
        self._has_room = has_room(self._flat_params.leaves)  # once the caches are made

    def _hand_over(self) -> None:
        """Bring the parameters into the forms that steps take."""
        target, draft = self.params
        self._flat_params = FlatParams.of(({**target, **self._beside}, draft))
        # Steps that run no layer of the target get the other parameters alone: each array costs the host time.
        outside = {name: value for name, value in target.items() if not name.startswith("layers_")}
        self._shared = ({**outside, **self._beside}, draft)

    def _make_state(self) -> None:
        slots, vocab_size = self._config.max_num_seqs, self.spec.target.vocab_size
        models, of_keys = (self.spec.target, self.spec.draft), (self._kv_scales, self._key_rounding)
        self.caches = make_caches(*models, self._layout, self._config, self.mesh, *of_keys)
        self.slots: Slots = self.mesh.replicate(Slots(jnp.zeros((slots, 3), jnp.int32)))
        self._controls: Controls = self.mesh.replicate(empty_controls(slots, vocab_size))
        self._sampler_rows = SamplerRows(slots, vocab_size)
        self._sampler: Sampler | None = None
        self._masks: dict[tuple[int, int], Any] = {}  # by rows and tokens

    def reset(self) -> None:
        """Make empty caches and slots: a failed step may have destroyed the donated ones."""
        del self.caches  # frees their memory before new ones are made
        self._make_state()

    @property
    def confirm(self) -> Confirm:
        """Decides how many drafts are kept; benchmarks replace it."""
        return self._confirm

    @confirm.setter
    def confirm(self, confirm: Confirm) -> None:
        self._confirm = confirm
        self._programs: dict[StepShape, Program] = {}

    def program(self, shape: StepShape) -> Program:
        """The program of a shape, compiled or not."""
        program = self._programs.get(shape)
        if program is None:
            step, state = STEPS[shape.step], self._state()
            made = Program(
                self._store.compile,
                str(shape),
                step.function,
                step.donated,
                (*step.state(state, shape.mode), *step.inputs(stand_ins(shape, state, self.spec))),
                step.static(spec=self.spec, length=shape.tokens, mode=shape.mode, confirm=self._confirm),
                compiler_options(self.spec.mesh.platform, has_room=self._has_room),
            )
            program = self._programs[shape] = self._store.find(made)
        return program

    def _run(self, shape: StepShape, *inputs: Any) -> Any:
        """Enqueue a step over the current state; the caller stores the state that it returns."""
        program = self.program(shape)
        self.num_first_runs += not program.has_run
        return program(*STEPS[shape.step].state(self._state(), shape.mode), *inputs)

    def _state(self) -> State:
        return State(self._flat_params, self._shared, self.slots, self.caches, self._controls, self._device_sampler())

    def is_ready(self, shapes: Seq[StepShape]) -> bool:
        """Whether these run without compiling. A program that could not be compiled counts: calling it raises why."""
        for shape in shapes:  # a plain loop: it runs for each length in each round
            program = self._programs.get(shape) or self.program(shape)
            if program.executable is None and program.error is None:
                return False
        return True

    def request(self, shapes: Seq[StepShape], *, is_urgent: bool) -> None:
        """Have these compiled in the background; urgent ones come first."""
        self._store.request([self.program(shape) for shape in shapes], is_urgent=is_urgent)

    def share_cores(self, *, has_streams: bool) -> None:
        """Say whether sequences are running, to which compiling must leave a core."""
        self._store.has_streams = has_streams

    def wait(self, timeout: float) -> None:
        """Wait until another program is ready, or for so many seconds."""
        self._store.wait(timeout)

    @property
    def is_compiling(self) -> bool:
        """Whether programs are being compiled in the background, which slows the engine down."""
        return self._store.is_compiling

    def log_peak(self) -> None:
        """Log the most memory that was taken of a device, where devices say it."""
        log_peak(self.mesh.size)

    def finish_compiling(self) -> None:
        """Wait until nothing is left to compile."""
        self._store.join()

    def compile(self, shapes: Seq[StepShape], advance: Callable[[], None]) -> int:
        """Compile or load these, several at a time; call `advance` after each, and return how many were loaded."""
        return self._store.compile_all([self.program(shape) for shape in shapes], advance)

    def replace_draft(self, draft: Model) -> None:
        """Replace the drafter by another of the same configuration, and empty the caches."""
        self.params = (self.params[0], draft.params)
        self._kv_scales = (self._kv_scales[0], draft.kv_scales)
        self._programs = {}  # with scales, or without them, caches have another structure
        self._hand_over()
        self.reset()

    def start(self, slot: int, sequence: Sequence) -> None:
        """Give a slot to another sequence."""
        self._sampler_rows.put(slot, sequence)
        self._sampler = None

    def set_controls(self, slot: int, sequence: Sequence) -> None:
        """Set the controls of a slot on the device to those of its sequence."""
        row = controls_of(sequence, self.spec.target.vocab_size)
        self._controls = self._run(StepShape("set_controls"), np.int32(slot), row)

    def place(self, tables: Tables) -> Tables:
        """Put the tables on the devices once a round, if there are several; with one device it is no faster."""
        return self.mesh.replicate(tables) if self.mesh.size > 1 else tables

    def prefill(self, chunk: Chunk) -> tuple[Float[Array, "B 1 D"], Float[Array, "B T D"]]:
        """Process a part of some prompts; returns what `commit` and `score` want of it."""
        self.slots, self.caches, last, before = self._run(chunk_shape("prefill", chunk), chunk)
        return last, before

    def score(self, chunk: Chunk, before: Float[Array, "1 T D"], following: Int[np.ndarray, "1 T"]) -> Logprobs:
        """Log-probabilities of the tokens behind those of the chunk that was just prefilled."""
        scored: Logprobs = self._run(chunk_shape("score", chunk), chunk, before, following)
        return scored

    def copy_states(self, moves: Seq[Move], rows: int) -> None:
        """Take or restore snapshots of recurrent states, `rows` of them in one call."""
        for start in range(0, len(moves), rows):
            packed = np.full((rows, 3), (-1, -1, 0), np.int32)
            part = moves[start : start + rows]
            packed[: len(part)] = part
            self.caches = replace(self.caches, states=self._run(StepShape("copy_states", rows), packed))

    def catch_up(self, tables: Tables, deferred: Int[np.ndarray, " B"]) -> None:
        """Write the drafter's context of each sequence's last `deferred` tokens, whose features waited."""
        shape = StepShape("catch_up", len(tables.packed), pages=tables.pages)
        self.caches = self.caches.with_draft(self._run(shape, tables, deferred))

    def greedy_round(self, tables: Tables, length: int) -> Emitted:
        """Run a whole round of greedy sequences that verifies `length` tokens of each."""
        shape = StepShape("greedy_round", len(tables.packed), length, tables.pages)
        self.slots, self.caches, emitted = self._run(shape, tables)
        return emitted

    def draft(self, tables: Tables) -> Int[Array, "B G"]:
        """Draft a block."""
        block, cache = self._run(StepShape("draft", len(tables.packed), pages=tables.pages), tables)
        self.caches = self.caches.with_draft(cache)
        return block

    def verify(self, tables: Tables, block: Int[Array, "B G"] | None, length: int) -> Float[Array, "B T D"]:
        """Run the target over `length` tokens of the block, or over the anchor without one; its hidden states."""
        shape = StepShape("verify", len(tables.packed), length, tables.pages)
        hidden, self.caches = self._run(shape, tables, block)
        return hidden

    def commit(
        self,
        rows: Int[np.ndarray, " B"],
        hidden: Float[Array, "B T D"],
        block: Int[Array, "B G"] | None,
        allowed: UInt32[np.ndarray, "B T X"] | None,
        *,
        mode: SamplingMode,
        needed: SamplingMode,
    ) -> Emitted:
        """Sample and emit tokens behind hidden states; the arguments are those of the step `commit`.

        Args:
            rows: slots of the sequences.
            hidden: hidden states to sample from.
            block: the drafted block, None without one.
            allowed: bits of the tokens that each row may emit; None allows all.
            mode: sampling mode of the program.
            needed: sampling mode that the most demanding sequence needs.
        """
        B, T, _ = hidden.shape
        sampling = self._sampling(B, T, allowed, mode, needed)
        shape = StepShape("commit", B, T, mode=mode)
        self.slots, controls, emitted = self._run(shape, rows, hidden, block, *sampling)
        if controls is not None:
            self._controls = controls
        return reported(emitted, needed)

    def verify_commit(
        self,
        tables: Tables,
        block: Int[Array, "B G"] | None,
        length: int,
        allowed: UInt32[np.ndarray, "B T X"] | None,
        *,
        needed: SamplingMode,
    ) -> Emitted:
        """Run `verify` and `commit` in one program that branches; arguments as for these."""
        shape = StepShape("verify_commit", len(tables.packed), length, tables.pages, ANY)
        sampling = self._sampling(len(tables.packed), length, allowed, ANY, needed)
        self.slots, self._controls, self.caches, emitted = self._run(shape, tables, block, *sampling)
        return reported(emitted, needed)

    def _sampling(
        self, B: int, T: int, allowed: UInt32[np.ndarray, "B T X"] | None, mode: SamplingMode, needed: SamplingMode
    ) -> tuple[Any, Any, Any]:
        """Sampling parameters, masks, and the index of the mode for a program that branches."""
        if mode == "greedy":
            return None, None, None
        if mode in CONTROLLED_MODES and allowed is None:
            allowed = self._all_allowed(B, T)
        return self._device_sampler(), allowed, np.int32(MODES.index(needed)) if mode == ANY else None

    def _all_allowed(self, B: int, T: int) -> Any:
        """Masks that allow every token, kept on the devices: they may take megabytes."""
        if (B, T) not in self._masks:
            words = -(-self.spec.target.vocab_size // 32)
            self._masks[B, T] = self.mesh.replicate(np.full((B, T, words), 0xFFFFFFFF, np.uint32))
        return self._masks[B, T]

    def _device_sampler(self) -> Sampler:
        if self._sampler is None:
            self._sampler = self.mesh.replicate(self._sampler_rows.snapshot())
        return self._sampler


def chunk_shape(step: str, chunk: Chunk) -> StepShape:
    """The shape of a step over a chunk."""
    rows, tokens = chunk.tokens.shape
    return StepShape(step, rows, tokens, chunk.tables.pages)


def reported(emitted: Emitted, needed: SamplingMode) -> Emitted:
    """Drop log-probabilities that no sequence asked for."""
    return emitted if needed == "reported" else replace(emitted, logprobs=None)
