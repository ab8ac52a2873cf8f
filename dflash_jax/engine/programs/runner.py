"""What lives on the devices: parameters, caches, the state of all slots; and the steps that change it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.engine.device import steps
from dflash_jax.engine.device.acceptance import Confirm, accepted
from dflash_jax.engine.device.controls import empty_controls
from dflash_jax.engine.device.memory import make_caches
from dflash_jax.engine.device.model import Model
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
from dflash_jax.engine.programs.program import Program
from dflash_jax.engine.programs.step_program import STEPS, State, stand_ins
from dflash_jax.engine.programs.store import programs
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.state.layout import Layout


class ModelRunner:
    """Enqueues steps on the devices and waits for none of them.

    Attributes:
        params: the target's and the drafter's.
        slots: state of all slots, as it will be when all that is enqueued is done.
        caches: likewise.
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
        self.confirm = accepted
        self._hand_over()
        self._make_state()

    def _hand_over(self) -> None:
        """The parameters in the form that steps take them in."""
        target, draft = self.params
        self._flat_params = FlatParams.of(({**target, **self._beside}, draft))
        # What steps need that run no layer of the target: each array handed to a step costs the host time.
        outside = {name: value for name, value in target.items() if not name.startswith("layers_")}
        self._shared = ({**outside, **self._beside}, draft)

    def _make_state(self) -> None:
        slots, vocab_size = self._config.max_num_seqs, self.spec.target.vocab_size
        layout, config = self._layout, self._config
        self.caches = make_caches(self.spec.target, self.spec.draft, layout, config, self.mesh, self._kv_scales)
        self.slots: Slots = self.mesh.replicate(Slots(jnp.zeros((slots, 3), jnp.int32)))
        self._controls: Controls = self.mesh.replicate(empty_controls(slots, vocab_size))
        self._sampler_rows = SamplerRows(slots, vocab_size)
        self._sampler: Sampler | None = None
        self._masks: dict[tuple[int, int], Any] = {}  # by rows and tokens

    def reset(self) -> None:
        """Empty the caches and the slots: a step that failed may have taken them with it."""
        del self.caches  # before there are new ones: memory may be short
        self._make_state()

    @property
    def confirm(self) -> Confirm:
        """Tells how many drafts are kept; a benchmark puts another in its place."""
        return self._confirm

    @confirm.setter
    def confirm(self, confirm: Confirm) -> None:
        self._confirm = confirm
        self._programs: dict[StepShape, Program] = {}

    def program(self, shape: StepShape) -> Program:
        """The program of a shape, which may not be compiled."""
        if shape not in self._programs:
            step, state = STEPS[shape.step], self._state()
            program = Program(
                self._store.compile,
                str(shape),
                step.function,
                step.donated,
                (*step.state(state, shape.mode), *step.inputs(stand_ins(shape, state, self.spec))),
                step.static(spec=self.spec, length=shape.tokens, mode=shape.mode, confirm=self._confirm),
                steps.compiler_options(self.spec.mesh.platform),
            )
            self._programs[shape] = self._store.find(program)
        return self._programs[shape]

    def _run(self, shape: StepShape, *inputs: Any) -> Any:
        """Enqueue a step over the state of now; what it changes in place is for the caller to put back."""
        return self.program(shape)(*STEPS[shape.step].state(self._state(), shape.mode), *inputs)

    def _state(self) -> State:
        return State(self._flat_params, self._shared, self.slots, self.caches, self._controls, self._device_sampler())

    def is_ready(self, shapes: Seq[StepShape]) -> bool:
        """Whether these run without compiling anything; what could not be compiled is ready, too, and raises why."""
        for shape in shapes:  # once for each length of a round, each round
            program = self._programs.get(shape) or self.program(shape)
            if program.executable is None and program.error is None:
                return False
        return True

    def request(self, shapes: Seq[StepShape], *, is_urgent: bool) -> None:
        """Have these compiled beside this thread; urgent ones come first."""
        self._store.request([self.program(shape) for shape in shapes], is_urgent=is_urgent)

    def share_cores(self, *, has_streams: bool) -> None:
        """Say whether anything runs that compiling must leave a core to."""
        self._store.has_streams = has_streams

    def wait(self, timeout: float) -> None:
        """Until a program is ready that was not, or so many seconds have passed."""
        self._store.wait(timeout)

    @property
    def is_compiling(self) -> bool:
        """Whether anything is compiled beside the engine, which then runs slower."""
        return self._store.is_compiling

    def finish_compiling(self) -> None:
        """Wait until nothing is compiled any more."""
        self._store.join()

    def compile(self, shapes: Seq[StepShape], advance: Callable[[], None]) -> None:
        """Compile these, several at a time, and say so each time that one is done."""
        self._store.compile_all([self.program(shape) for shape in shapes], advance)

    def replace_draft(self, draft: Model) -> None:
        """Draft with another drafter of the same configuration from now on, over empty caches."""
        self.params = (self.params[0], draft.params)
        self._kv_scales = (self._kv_scales[0], draft.kv_scales)
        self._hand_over()
        self.reset()

    def start(self, slot: int, sequence: Sequence) -> None:
        """A slot has got another sequence."""
        self._sampler_rows.put(slot, sequence)
        self._sampler = None

    def set_controls(self, slot: int, sequence: Sequence) -> None:
        """Tell the device what its sampling of a slot's sequence must know of each token."""
        row = controls_of(sequence, self.spec.target.vocab_size)
        self._controls = self._run(StepShape("set_controls"), np.int32(slot), row)

    def place(self, tables: Tables) -> Tables:
        """Tables on the devices, if several: once a round, not with each step; to one device that is no faster."""
        return self.mesh.replicate(tables) if self.mesh.size > 1 else tables

    def prefill(self, chunk: Chunk) -> tuple[Float[Array, "B 1 D"], Float[Array, "B T D"]]:
        """Process a part of some prompts; returns what `commit` and `score` want of it."""
        self.slots, self.caches, last, before = self._run(chunk_shape("prefill", chunk), chunk)
        return last, before

    def score(self, chunk: Chunk, before: Float[Array, "1 T D"], following: Int[np.ndarray, "1 T"]) -> Logprobs:
        """Log-probabilities of the tokens behind those of the chunk that was just prefilled."""
        scored: Logprobs = self._run(chunk_shape("score", chunk), chunk, before, following)
        return scored

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
            rows: of the step.
            hidden: of the step.
            block: of the step.
            allowed: None allows all tokens.
            mode: of the program.
            needed: what the most demanding sequence needs.
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
        """`verify` and `commit` in one program that branches; arguments are theirs."""
        shape = StepShape("verify_commit", len(tables.packed), length, tables.pages, ANY)
        sampling = self._sampling(len(tables.packed), length, allowed, ANY, needed)
        self.slots, self._controls, self.caches, emitted = self._run(shape, tables, block, *sampling)
        return reported(emitted, needed)

    def _sampling(
        self, B: int, T: int, allowed: UInt32[np.ndarray, "B T X"] | None, mode: SamplingMode, needed: SamplingMode
    ) -> tuple[Any, Any, Any]:
        """Sampling parameters, masks, and what a program that branches is told to do."""
        if mode == "greedy":
            return None, None, None
        if mode in CONTROLLED_MODES and allowed is None:
            allowed = self._all_allowed(B, T)
        return self._device_sampler(), allowed, np.int32(MODES.index(needed)) if mode == ANY else None

    def _all_allowed(self, B: int, T: int) -> Any:
        """Masks that allow every token; they stay on the devices, since they may be megabytes."""
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
    """What was emitted, without the log-probabilities that nobody asked for."""
    return emitted if needed == "reported" else replace(emitted, logprobs=None)
