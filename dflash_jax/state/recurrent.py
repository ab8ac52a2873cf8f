"""Recurrent states of Gated DeltaNet layers on the device: one a slot, one a snapshot, and how steps advance them.

A row is what one layer keeps of one sequence: its state S after the first n tokens, in float32, and the tape, which is
the raw inputs of the tokens that the last round verified. A rejected draft never reaches S: the accepted beginning of
the tape is folded into it at the start of the next step, whatever that step is. So a round reads each state once and
writes it once, and a sequence needs one state, not one for each draft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DecoderConfig, GatedDelta
from pallas_kernels import gated_delta
from pallas_kernels.gated_delta import Kept, Weights

_HEADS, _ROW_HEADS, _WHOLE = PartitionSpec("tp"), PartitionSpec(None, None, "tp"), PartitionSpec()
_KEPT = Kept._make((PartitionSpec(None, "tp"), _ROW_HEADS, _ROW_HEADS))
_WEIGHTS = Weights._make((_HEADS, _HEADS, _HEADS))
_NO_ROW = -1
ADDRESSABLE_ELEMENTS = 2**31 - 1  # of a pool: kernels count elements in 32 bits


class StatePlace(NamedTuple):
    """Where a layer keeps its rows: its pool, and its first row in the pool."""

    pool: int
    first_row: int | Int[Array, ""]


@runtime_checkable
class Step(Protocol):
    """How a step advances the states of B sequences."""

    @property
    def slots(self) -> Int[Array, " B"]:
        """The slot of each sequence; beyond the last one for a row of padding."""
        ...

    def run(
        self,
        kept: Kept,
        weights: Weights,
        rows: Int[Array, " B"],
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        length: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T HV dv"], Kept]:
        """Advance one layer's rows by the first `length` of T tokens."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verifying:
    """A round: `count` tokens of each tape are accepted, and a block follows them."""

    slots: Int[Array, " B"]
    count: Int[Array, " B"]

    def run(self, kept, weights, rows, inputs, gates, length):
        """Fold the accepted tokens, and leave the block as the new tape."""
        return gated_delta.verify(kept, weights, rows, self.count, inputs, gates, length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefilling:
    """A chunk of prompts; `is_first` says that a sequence begins in it, whatever its slot held before."""

    slots: Int[Array, " B"]
    is_first: Bool[Array, " B"]

    def run(self, kept, weights, rows, inputs, gates, length):
        """Write the state after the chunk."""
        return gated_delta.prefill(kept, weights, rows, self.is_first, inputs, gates, length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentStates:
    """Rows of Q slots and of M snapshots in every Gated DeltaNet layer; donated to every step and written in place.

    Attributes:
        kept: pools; each holds the R = Q + M rows of its layers, one layer after another.
        folded: how many tokens of its sequence each row's state contains; the same in every layer.
        step: what the current step does; None between steps.
        places: where each layer keeps its rows; None for layers with attention.
        offset: added to the first row of each layer; None is 0.
        num_slots: Q.
        block: G, tokens of a tape.
        mesh: devices; key heads are split over its axis `tp` where they divide evenly.
    """

    kept: list[Kept]
    folded: Int[Array, " R"]
    step: Step | None = None
    places: tuple[StatePlace | None, ...] = field(default=(), metadata={"static": True})
    offset: Int[Array, ""] | None = field(default=None, kw_only=True)
    num_slots: int = field(kw_only=True, metadata={"static": True})
    block: int = field(kw_only=True, metadata={"static": True})
    mesh: Mesh = field(kw_only=True, metadata={"static": True})

    def verifying(self, slots: Int[Array, " B"], length: Int[Array, " B"]) -> RecurrentStates:
        """States for a round over sequences of which the target has processed `length` tokens."""
        count = jnp.clip(length - self.folded.at[slots].get(mode="clip"), 0, self.block)
        folded = self.folded.at[self._within(slots)].set(length, mode="drop")
        return replace(self, folded=folded, step=Verifying(slots, count))

    def prefilling(self, slots: Int[Array, " B"], positions: Int[Array, "B T"]) -> RecurrentStates:
        """States for a chunk of prompts with tokens at these positions, -1 for padding behind them."""
        folded = self.folded.at[self._within(slots)].set(positions.max(axis=1) + 1, mode="drop")
        return replace(self, folded=folded, step=Prefilling(slots, positions[:, 0] == 0))

    @jax.named_scope("gated_delta")  # profiles tell the recurrence from projections by this name
    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], RecurrentStates]:
        """See `models.caches.RecurrentCache.advance`."""
        assert self.step is not None
        place = self._place(layer)
        length = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        specs = (_KEPT, _WEIGHTS, _WHOLE, _WHOLE, _ROW_HEADS, _ROW_HEADS, _WHOLE)
        run = self._per_device(_run, specs, (_ROW_HEADS, _KEPT), inputs.shape[2])
        rows = self._rows(place, self._within(self.step.slots))
        outputs, kept = run(self.kept[place.pool], weights, rows, self.step, inputs, gates, length)
        return outputs, self._with_kept(place, kept)

    def copied(
        self,
        weights: Mapping[int, Weights],
        sources: Int[Array, " B"],
        targets: Int[Array, " B"],
        length: Int[Array, " B"],
        processed: Int[Array, " Q"],
    ) -> RecurrentStates:
        """Write to rows `targets` what rows `sources` hold after exactly `length` tokens: takes or restores snapshots.

        Slots are rows 0 to Q - 1, snapshots the rows behind them. Nothing is written where a source has no such state:
        it has gone on already, or has not come so far.

        Args:
            weights: of each Gated DeltaNet layer.
            sources: rows to read; negative ones are padding.
            targets: rows to write.
            length: tokens.
            processed: tokens that the target has processed of each slot's sequence.
        """
        count = length - self.folded.at[sources].get(mode="clip")
        may_fold = (sources < self.num_slots) & (processed.at[sources].get(mode="clip") >= length)
        exists = (sources >= 0) & ((count == 0) | (may_fold & (count > 0) & (count <= self.block)))
        targets = jnp.where(exists, targets, _NO_ROW)
        count = jnp.where(exists, count, 0)
        states = replace(self, folded=self.folded.at[_dropped(targets, len(self.folded))].set(length, mode="drop"))
        for layer, of_layer in weights.items():
            place = self._place(layer)
            specs = (_KEPT, _WEIGHTS, _WHOLE, _WHOLE, _WHOLE)
            fold = self._per_device(gated_delta.fold, specs, _KEPT, of_layer.conv.shape[0])
            rows = (self._rows(place, sources), count, self._rows(place, targets))
            states = states._with_kept(place, fold(states.kept[place.pool], of_layer, *rows))
        return states

    def of_layer(self, layer: int) -> RecurrentStates:
        """See `models.caches.DividedCache.of_layer`: the pool."""
        if self.places[layer] is None:
            return replace(self, kept=[], places=(None,) * len(self.places))
        pool, first_row = self._place(layer)
        places, offset = (StatePlace(0, 0),) * len(self.places), jnp.asarray(first_row, jnp.int32)
        return replace(self, kept=[self.kept[pool]], places=places, offset=offset)

    def with_layer_of(self, layer: int, part: RecurrentStates) -> RecurrentStates:
        """Take over the pool of `of_layer` after a step."""
        return self if self.places[layer] is None else self._with_kept(self._place(layer), part.kept[0])

    def between_steps(self) -> RecurrentStates:
        """Remove what concerned one step."""
        return replace(self, step=None)

    def _within(self, slots: Int[Array, " B"]) -> Int[Array, " B"]:
        """Slots; behind all rows for padding, where writes are dropped."""
        return jnp.where(slots < self.num_slots, slots, len(self.folded))

    def _rows(self, place: StatePlace, rows: Int[Array, " B"]) -> Int[Array, " B"]:
        """Rows of a layer in its pool, -1 for a row that does not exist."""
        return jnp.where((rows >= 0) & (rows < len(self.folded)), place.first_row + rows, _NO_ROW)

    def _place(self, layer: int) -> StatePlace:
        place = self.places[layer]
        assert place is not None
        return place if self.offset is None else place._replace(first_row=place.first_row + self.offset)

    def _with_kept(self, place: StatePlace, kept: Kept) -> RecurrentStates:
        pools = list(self.kept)
        pools[place.pool] = kept
        return replace(self, kept=pools)

    def _per_device(self, function, in_specs, out_specs, key_heads: int):
        """The function on each device's share of the key heads, or on all of them where they do not divide evenly."""
        if key_heads % self.mesh.size:
            in_specs, out_specs = jax.tree.map(lambda _: PartitionSpec(), (in_specs, out_specs))
        return self.mesh.on_each(function, in_specs, out_specs)


def _run(kept, weights, rows, step, inputs, gates, length):
    return step.run(kept, weights, rows, inputs, gates, length)


def _dropped(rows: Int[Array, " B"], num_rows: int) -> Int[Array, " B"]:
    """Rows for a write that drops those behind the last: a negative index would count from the end."""
    return jnp.where(rows < 0, num_rows, rows)


def shapes_of(delta: GatedDelta, rows: int, block: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the arrays of `Kept`, for so many rows with tapes of `block` tokens."""
    channels = 2 * delta.key_dim + delta.value_heads // delta.key_heads * delta.value_dim
    return (
        jax.ShapeDtypeStruct((rows, delta.value_heads, delta.key_dim, delta.value_dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, delta.conv_width - 1 + block, delta.key_heads, channels), dtype),
        jax.ShapeDtypeStruct((rows, block, delta.value_heads, 2), dtype),
    )


def row_bytes(config: DecoderConfig, block: int, dtype: jnp.dtype) -> int:
    """Bytes that all layers together keep of one sequence, tapes included; 0 without Gated DeltaNet layers."""
    if config.gated_delta is None:
        return 0
    of_layer = shapes_of(config.gated_delta, 1, block, dtype)
    return len(config.recurrent_layers) * sum(math.prod(part.shape) * part.dtype.itemsize for part in of_layer)


def make_states(
    config: DecoderConfig, slots: int, snapshots: int, block: int, dtype: jnp.dtype, mesh: Mesh
) -> RecurrentStates:
    """Make the rows of a model's slots and snapshots; what they hold means nothing until a prompt begins in them.

    As many layers as one array can hold share a pool, since each array costs the host time in every round.
    """
    delta, rows = config.gated_delta, slots + snapshots
    assert delta is not None
    per_layer = math.prod(shapes_of(delta, rows, block, dtype)[0].shape)
    per_pool = max(ADDRESSABLE_ELEMENTS // per_layer, 1)
    places: list[StatePlace | None] = [None] * config.num_hidden_layers
    specs = _KEPT if delta.key_heads % mesh.size == 0 else (_WHOLE, _WHOLE, _WHOLE)
    kept: list[Kept] = []
    for start in range(0, len(config.recurrent_layers), per_pool):
        layers = config.recurrent_layers[start : start + per_pool]
        for index, layer in enumerate(layers):
            places[layer] = StatePlace(len(kept), index * rows)
        pool = shapes_of(delta, rows * len(layers), block, dtype)
        kept.append(Kept._make(_zeros(part, spec, mesh) for part, spec in zip(pool, specs, strict=True)))
    folded = mesh.replicate(jnp.zeros(rows, jnp.int32))
    return RecurrentStates(kept, folded, places=tuple(places), num_slots=slots, block=block, mesh=mesh)


def _zeros(part: jax.ShapeDtypeStruct, spec: Any, mesh: Mesh) -> Array:
    return jnp.zeros(part.shape, part.dtype, device=NamedSharding(mesh.devices, spec))
