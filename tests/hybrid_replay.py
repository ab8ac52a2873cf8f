"""Run a hybrid over given tokens as the engine runs it over prompts and answers, through the caches of its steps.

Prompts go in chunks, answers in blocks of which a random number of tokens is accepted, and a sequence may go on from a
snapshot, in another slot. Rejected rows of a block hold random tokens, which no later output may depend on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.device.memory import STATES
from dflash_jax.engine.device.pools import make_caches
from dflash_jax.engine.device.slots import Chunk, Slots, Tables
from dflash_jax.engine.device.steps import block_positions
from dflash_jax.models.target import TargetModel
from dflash_jax.options import EngineArgs
from dflash_jax.options.engine_config import EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import TargetConfig
from dflash_jax.state.group import PageGroup, SnapshotGroup
from dflash_jax.state.layout import Layout
from tests.parity_check import Target

PAGE, BLOCK = 16, 8  # tokens of a page and of a tape
PAGES = 9  # of a sequence
SLOTS, SNAPSHOT = 4, 4  # slots are rows 0 to 3 of the states; the only snapshot is the row behind them
EVENTS = ("chunk", "block with a rejected token", "snapshot that folds", "restored snapshot")
CHUNKS = (5, 40, 63, 64, 65, 130)  # tokens of the widest chunk


@dataclass
class Running:
    """A sequence: the row of its tokens, its slot, and how many tokens are processed and belong to its prompt."""

    row: int
    slot: int
    prompt: int
    done: int = 0


class Replay:
    """A target with the caches of an engine, and the outputs that it has given for B sequences of n tokens."""

    def __init__(self, target: Target, input_ids: np.ndarray, seed: int):
        self.target, self.tokens, self.rng = target, input_ids, np.random.default_rng(seed)
        self.chunk_width, self.narrow = int(self.rng.choice(CHUNKS)), int(self.rng.integers(1, BLOCK))
        B, n = input_ids.shape
        assert n + BLOCK <= PAGES * PAGE
        config = target.config
        groups = PageGroup(B * PAGES, PAGE), PageGroup(0, PAGE), SnapshotGroup(1)
        layout = Layout(PAGE, BLOCK, PAGES, groups, snapshots=STATES if config.recurrent_layers else None)
        args = EngineArgs(dtype="float32", max_num_seqs=SLOTS)
        self.caches = make_caches(config, None, layout, EngineConfig.of(args, config, None), Mesh.of(1))
        if self.caches.states is not None:  # what lies in a slot before its first prompt must not matter
            states = jax.tree.map(lambda part: jnp.full_like(part, jnp.nan), self.caches.states.kept)
            self.caches = replace(self.caches, states=replace(self.caches.states, kept=states))
        slots = self.rng.permutation(SLOTS)
        self.running = [Running(row, int(slots[row]), int(self.rng.integers(1, n, endpoint=True))) for row in range(B)]
        self.logits = np.full((B, n, config.vocab_size), np.nan, np.float32)
        self.events: Counter[str] = Counter()  # how often something happened that a test may want to have seen
        self.hidden = np.full((config.num_hidden_layers, B, n, config.hidden_size), np.nan, np.float32)

    def run(self):
        """Process all tokens; their logits and hidden states."""
        n = self.tokens.shape[1]
        while unfinished := [one for one in self.running if one.done < n]:
            first = unfinished[self.rng.integers(len(unfinished))]
            is_chunk = first.done < first.prompt
            together = [one for one in unfinished if (one.done < one.prompt) == is_chunk]
            before = [one.done for one in together]
            self._chunk(together) if is_chunk else self._round(together)
            if self.caches.states is not None and self.rng.random() < 0.4:
                index = self.rng.integers(len(together))
                self._snapshot(together[index], together[index].done if is_chunk else before[index])
        return self.logits, self.hidden

    def _chunk(self, together):
        """Prefill a random part of what is left of each prompt."""
        rows, width = len(self.tokens) + 1, self.chunk_width
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for one in together:
            most = min(width, one.prompt - one.done)
            count = most if self.rng.random() < 0.5 else self.rng.integers(1, most, endpoint=True)
            tokens[one.row, :count] = self.tokens[one.row, one.done : one.done + count]
            positions[one.row, :count] = np.arange(one.done, one.done + count)
        nothing = jnp.zeros(rows, jnp.int32)
        chunk = Chunk(jnp.asarray(tokens), jnp.asarray(positions), nothing, nothing, nothing, self._tables(together))
        self.events["chunk"] += 1
        *outputs, self.caches = _prefill(self.target.params, self.caches, chunk, config=self.target.config)
        self._take(together, (positions >= 0).sum(axis=1), outputs)

    def _round(self, together):
        """Verify a block of each sequence, and accept a random part of it."""
        rows, width = len(self.tokens) + 1, BLOCK if self.rng.random() < 0.5 else self.narrow
        tokens = self.rng.integers(0, self.target.config.vocab_size, (rows, width), dtype=np.int32)
        accepted = np.zeros(rows, np.int32)
        for one in together:
            most = min(width, self.tokens.shape[1] - one.done)
            count = accepted[one.row] = self.rng.integers(1, most, endpoint=True)
            self.events["block with a rejected token"] += int(count < width)
            tokens[one.row, :count] = self.tokens[one.row, one.done : one.done + count]
        step = (self._slots(), self._tables(together), jnp.asarray(tokens))
        *outputs, self.caches = _verify(self.target.params, self.caches, *step, config=self.target.config)
        self._take(together, accepted, outputs)

    def _take(self, together, counts, outputs):
        """Keep the outputs of the first `counts` tokens of each row."""
        logits, hidden = (np.asarray(output) for output in outputs)
        for one in together:
            count = counts[one.row]
            places = slice(one.done, one.done + count)
            self.logits[one.row, places] = logits[one.row, :count]
            self.hidden[:, one.row, places] = hidden[:, one.row, :count]
            one.done += int(count)

    def _snapshot(self, one, folded):
        """Copy the state after some accepted token; half of the time the sequence goes on from there as a prompt."""
        length = int(self.rng.integers(folded, one.done, endpoint=True))
        self._copy(one.slot, SNAPSHOT, length)
        self.events["snapshot that folds"] += int(length > folded)
        n = self.tokens.shape[1]
        if length == n or self.rng.random() < 0.5:
            return
        self.events["restored snapshot"] += 1
        free = sorted(set(range(SLOTS)) - {other.slot for other in self.running})
        one.slot, one.done = int(self.rng.choice(free)), length
        one.prompt = int(self.rng.integers(length + 1, n, endpoint=True))
        self._copy(SNAPSHOT, one.slot, length)

    def _copy(self, source, target, length):
        moves = jnp.asarray([[source, target, length]])
        step = (self.target.params, self.caches, self._slots(), moves)
        self.caches = _copy(*step, config=self.target.config)

    def _slots(self):
        length = np.zeros(SLOTS, np.int32)
        for one in self.running:
            length[one.slot] = one.done
        return Slots.of(anchor=jnp.zeros_like(length), length=jnp.asarray(length), emitted=jnp.zeros_like(length))

    def _tables(self, together):
        """Slots and pages; rows that take no part, and one more behind them, are padding."""
        rows = len(self.tokens) + 1
        slots, pages = np.full(rows, SLOTS), np.full((rows, PAGES), -1)
        for one in together:
            slots[one.row], pages[one.row] = one.slot, one.row * PAGES + np.arange(PAGES)
        tables = Tables.pack(slots, [np.zeros_like(slots)], [pages, np.full_like(pages, -1)])
        return jax.tree.map(jnp.asarray, tables)


@partial(jax.jit, static_argnames="config", donate_argnames="caches")
def _prefill(params, caches, chunk, *, config: TargetConfig):
    model, caches = TargetModel(config).bind({"params": params}), caches.for_chunk(chunk)
    taps = tuple(range(config.num_hidden_layers - 1))  # a last layer that is tapped would not be cut short
    last, features, before, cache = model.prefill(chunk.tokens, chunk.positions, caches.of_target, taps)
    hidden = model.finish(before, chunk.positions, cache)
    hidden = hidden.at[jnp.arange(len(hidden)), chunk.positions.argmax(axis=1)].set(last[:, 0])
    layers = jnp.stack([*jnp.split(features, len(taps), axis=-1), hidden] if taps else [hidden])
    return model.logits(hidden), layers, caches.with_target(cache).pools()


@partial(jax.jit, static_argnames="config", donate_argnames="caches")
def _verify(params, caches, slots, tables, tokens, *, config: TargetConfig):
    model, caches = TargetModel(config).bind({"params": params}), caches.for_round(tables, slots)
    positions, taps = block_positions(slots, tables, tokens.shape[1]), tuple(range(config.num_hidden_layers))
    hidden, features, cache = model(tokens, positions, caches.of_target, taps)
    layers = jnp.stack(jnp.split(features, len(taps), axis=-1))
    return model.logits(hidden), layers, caches.with_target(cache).pools()


@partial(jax.jit, static_argnames="config", donate_argnames="caches")
def _copy(params, caches, slots, moves, *, config: TargetConfig):
    weights = TargetModel(config).bind({"params": params}).recurrent_weights()
    states = caches.states.copied(weights, moves[:, 0], moves[:, 1], moves[:, 2], slots.length)
    return replace(caches, states=states)
