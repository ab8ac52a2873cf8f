"""What lives on the devices: parameters, caches, the state of all slots; and the steps that change it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.config import EngineConfig
from dflash_jax.engine import round as steps
from dflash_jax.engine.controls import controls_of, empty_controls, set_controls
from dflash_jax.engine.inputs import SamplerRows, uses_controls
from dflash_jax.engine.memory import Layout, make_caches
from dflash_jax.engine.model import Model
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.shapes import Shapes
from dflash_jax.engine.sharding import Mesh
from dflash_jax.engine.state import (
    CONTROLLED_MODES,
    Chunk,
    Controls,
    Emitted,
    Logprobs,
    Sampler,
    SamplingMode,
    Slots,
    StepSpec,
    Tables,
)
from dflash_jax.engine.warmup import compile_steps


class ModelRunner:
    """Enqueues steps on the devices and waits for none of them.

    Attributes:
        params: the target's and the drafter's.
        slots: state of all slots, as it will be when all that is enqueued is done.
        caches: likewise.
        confirm: tells how many drafts are kept; a benchmark puts another in its place.
    """

    def __init__(
        self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig, spec: StepSpec, layout: Layout
    ):
        self.mesh, self.spec, self._config, self._layout = mesh, spec, config, layout
        self.params = (target.params, draft.params if draft else {})
        self._kv_scales = (target.kv_scales, draft.kv_scales if draft else None)
        peers = mesh.peers(config.dtype.itemsize * max(m.config.hidden_size for m in (target, draft) if m))
        self._beside = {} if peers is None else {"peers": peers}
        self.confirm: steps.Confirm = steps.accepted
        self._hand_over()
        self._make_state()

    def _hand_over(self) -> None:
        """The parameters in the form that steps take them in."""
        target, draft = self.params
        self._flat_params = steps.FlatParams.of(({**target, **self._beside}, draft))
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

    def reset(self) -> None:
        """Empty the caches and the slots: a step that failed may have taken them with it."""
        del self.caches  # before there are new ones: memory may be short
        self._make_state()

    def compile(self, shapes: Shapes) -> int:
        """Compile every step for every shape that can come up; returns how many programs there are."""
        state = (self._flat_params, self._shared, self.slots, self.caches, self._controls, self._device_sampler())
        return compile_steps(*state, spec=self.spec, shapes=shapes)

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
        if uses_controls(sequence):
            own = controls_of(sequence, self.spec.target.vocab_size)
            self._controls = set_controls(self._controls, np.int32(slot), own)

    def place(self, tables: Tables) -> Tables:
        """Tables on the devices, if several: once a round, not with each step; to one device that is no faster."""
        return self.mesh.replicate(tables) if self.mesh.mesh.size > 1 else tables

    def prefill(self, chunk: Chunk) -> tuple[Float[Array, "B 1 D"], Float[Array, "B T D"]]:
        """Process a part of some prompts; what `commit` and `score` want of it."""
        self.slots, self.caches, last, before = steps.prefill(
            self._flat_params, self.slots, self.caches, chunk, spec=self.spec
        )
        return last, before

    def score(self, chunk: Chunk, before: Float[Array, "1 T D"], following: Int[np.ndarray, "1 T"]) -> Logprobs:
        """Log-probabilities of the tokens behind those of the chunk that was just prefilled."""
        return steps.score(self._flat_params, self.caches.target, chunk, before, following, spec=self.spec)

    def catch_up(self, tables: Tables, deferred: Int[np.ndarray, " B"]) -> None:
        """Write the drafter's context of each sequence's last tokens, whose features waited."""
        own = (self.slots, self.caches.draft, self.caches.features)
        self.caches = self.caches.with_draft(steps.catch_up(self._shared, *own, tables, deferred, spec=self.spec))

    def greedy_round(self, tables: Tables, length: int) -> Emitted:
        """A whole round of greedy sequences that verifies `length` tokens of each."""
        static = {"spec": self.spec, "length": length, "confirm": self.confirm}
        self.slots, self.caches, emitted = steps.greedy_round(
            self._flat_params, self.slots, self.caches, tables, **static
        )
        return emitted

    def draft(self, tables: Tables) -> Int[Array, "B G"]:
        """Draft a block."""
        block, cache = steps.draft(self._shared, self.slots, self.caches.draft, tables, spec=self.spec)
        self.caches = self.caches.with_draft(cache)
        return block

    def verify(self, tables: Tables, block: Int[Array, "B G"] | None, length: int) -> Float[Array, "B T D"]:
        """Run the target over `length` tokens of the block, or over the anchor without one; its hidden states."""
        hidden, self.caches = steps.verify(
            self._flat_params, self.slots, self.caches, tables, block, spec=self.spec, length=length
        )
        return hidden

    def commit(
        self,
        rows: Int[np.ndarray, " B"],
        hidden: Float[Array, "B T D"],
        block: Int[Array, "B G"] | None,
        allowed: UInt32[np.ndarray, "B T X"] | None,
        *,
        mode: SamplingMode,
        with_logprobs: bool,
    ) -> Emitted:
        """Sample and emit tokens behind hidden states; the arguments are those of the step `commit`."""
        state = (self.slots, self._controls if mode in CONTROLLED_MODES else None)
        sampler = None if mode == "greedy" else self._device_sampler()
        given = (rows, hidden, block, sampler, allowed)
        static = {"spec": self.spec, "mode": mode, "with_logprobs": with_logprobs, "confirm": self.confirm}
        self.slots, controls, emitted = steps.commit(self._shared[0], *state, *given, **static)
        if controls is not None:
            self._controls = controls
        return emitted

    def _device_sampler(self) -> Sampler:
        if self._sampler is None:
            self._sampler = self.mesh.replicate(self._sampler_rows.snapshot())
        return self._sampler
