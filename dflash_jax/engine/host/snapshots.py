"""Snapshots of recurrent states: when to take them, and which one a prefix hit restores. Pure host code.

A snapshot is the state after exactly its length of tokens, and serves prompts that share these tokens and go on. It
costs as much memory as the keys and values of some 2,000 tokens, so it is taken where it will be hit: at the last page
boundary of a prompt, where prompts branch, on a coarse grid of long prompts, and at the last page boundary of an
answer, with which the next turn of a conversation begins.

A state can only be had while the device has not gone beyond it. Prompts are therefore cut at their boundaries
(`Running.stops`). In rounds the host runs behind the device: before each round that might fold tokens beyond a
boundary, a copy is enqueued which writes only if the boundary has been reached; the host learns later whether it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dflash_jax.engine.host.scheduler import Running, Scheduler
from dflash_jax.state.pages import PagePool

GRID = 4096  # tokens of a prompt from one snapshot to the next, or as many as make whole pages


class Move(NamedTuple):
    """A copy between rows of recurrent states: slots are rows 0 to Q - 1, snapshots the rows behind them."""

    source: int
    target: int
    length: int  # tokens after which the state is copied


class Snapshots:
    """Decides about snapshots for a scheduler; each method returns the moves to enqueue now, in their order."""

    def __init__(self, scheduler: Scheduler, num_slots: int):
        self._scheduler, self._num_slots = scheduler, num_slots
        self.num_taken = self.num_hits = 0
        layout = scheduler.layout
        self._page_size, self._block = layout.page_size, layout.block
        self._grid = max(self._multiple(GRID, layout.page_size), layout.page_size)
        # A round crosses at most one boundary of an answer.
        self._answer_step = layout.page_size * -(-layout.block // layout.page_size)

    def at_start(self, running: Running) -> list[Move]:
        """Plan the snapshots of a sequence that was just admitted, and restore the one that its prefix hit needs."""
        pool = self._pool
        if pool is None or not pool.num_pages:
            return []
        running.next_snapshot, running.read_length = self._next_boundary(running), running.length
        if running.sequence.cache_salt is None or running.sequence.wants_prompt_logprobs:  # scored chunks are whole
            return []
        last = self._multiple(len(running.text) - 1, self._page_size)
        stops = {last, running.known_pages * self._page_size, *range(self._grid, last, self._grid)}
        running.stops = sorted(stop for stop in stops if running.prefilled < stop <= last)
        if running.prefilled == 0:
            return []
        (unit,) = pool.known([self._hash(running, running.prefilled)])
        self.num_hits += 1
        pool.share([unit])
        pool.give_back([unit])  # the most recently used now
        return [Move(self._num_slots + unit, running.slot, running.prefilled)]

    @property
    def is_active(self) -> bool:
        """Whether the target has states, so that there is anything to do after each round."""
        return self._pool is not None

    def after_chunk(self, running: Running) -> list[Move]:
        """Take a snapshot if the chunk that was just enqueued ends where one is wanted."""
        if running.prefilled not in running.stops or not self._take(running):
            return []
        move = self._move(running, running.prefilled)
        self._publish(running, running.prefilled)
        return [move]

    def before_rounds(self, rounds: Iterable[Running]) -> list[Move]:
        """What `before_round` asks for, of all sequences of a round; costs a target without states nothing."""
        return [] if not self.is_active else [move for running in rounds for move in self.before_round(running)]

    def before_round(self, running: Running) -> list[Move]:
        """Take a snapshot if the rounds in flight may have reached the next boundary of the answer."""
        if self._is_off(running):
            return []
        if running.next_snapshot < running.length:  # it was passed without a snapshot
            running.next_snapshot = self._next_boundary(running)
        reached = running.length + running.in_flight * self._block
        if reached < running.next_snapshot or not self._take(running):
            return []
        running.covered_rounds = running.num_rounds + running.in_flight
        return [self._move(running, running.next_snapshot)]

    def after_read(self, running: Running) -> list[Move]:
        """Publish the snapshot of a boundary that the tokens just read have reached.

        If none was taken it is taken now, unless a round has folded tokens beyond the boundary: that just read has
        folded those before it, one that follows those of both.
        """
        moves: list[Move] = []
        if self._is_off(running):
            return moves
        boundary = running.next_snapshot
        folded, running.read_length = running.read_length, running.length
        if running.length < boundary:
            return moves
        if running.covered_rounds < running.num_rounds:
            if running.in_flight or folded > boundary or not self._take(running):
                return moves
            moves.append(self._move(running, boundary))
        before, running.last_snapshot = running.last_snapshot, boundary
        self._publish(running, boundary)
        if before and running.length - running.deferred >= boundary:
            self._discard(running, before)  # the longer one serves the next turn
        running.next_snapshot += self._answer_step
        return moves

    def forget(self, running: Running) -> None:
        """Forget every snapshot of a sequence's text: its numbers cannot be trusted."""
        pool = self._pool
        if pool is not None:
            hashes = running.sequence.page_hashes
            pool.forget([unit for page_hash in hashes for unit in pool.known([page_hash])])

    @property
    def num_kept(self) -> int:
        """Snapshots that prefix hits can restore."""
        return 0 if self._pool is None else self._pool.num_known

    @property
    def num_evicted(self) -> int:
        """Snapshots that made room for others."""
        return 0 if self._pool is None else self._pool.num_evicted

    @property
    def _pool(self) -> PagePool | None:
        index = self._scheduler.layout.snapshots
        return None if index is None else self._scheduler.pools[index]

    def _next_boundary(self, running: Running) -> int:
        """The first boundary of the answer that lies not before the tokens that are certainly processed."""
        return -(-running.length // self._answer_step) * self._answer_step

    def _is_off(self, running: Running) -> bool:
        return running.next_snapshot == 0 or running.sequence.cache_salt is None

    def _ids(self, running: Running) -> list[int]:
        """Units that the sequence owns: one while a snapshot is being taken, else none."""
        index = self._scheduler.layout.snapshots
        assert index is not None
        return running.units[index].ids

    def _take(self, running: Running) -> bool:
        """Own a unit for the next snapshot; False if all are owned by others."""
        pool, ids = self._pool, self._ids(running)
        assert pool is not None
        if not ids and pool.num_free:
            ids += pool.take(1)
        return bool(ids)

    def _move(self, running: Running, length: int) -> Move:
        return Move(running.slot, self._num_slots + self._ids(running)[0], length)

    def _publish(self, running: Running, length: int) -> None:
        """Let others find the snapshot in the owned unit, and stop owning it."""
        pool, ids = self._pool, self._ids(running)
        assert pool is not None
        self.num_taken += 1
        pool.remember(ids[0], self._hash(running, length))
        pool.give_back([ids.pop()])

    def _discard(self, running: Running, length: int) -> None:
        pool = self._pool
        assert pool is not None
        pool.discard(pool.known([self._hash(running, length)]))

    def _hash(self, running: Running, length: int) -> bytes:
        pages = length // self._page_size
        return self._scheduler.hashes(running.sequence, pages)[pages - 1]

    @staticmethod
    def _multiple(tokens: int, step: int) -> int:
        """The greatest multiple of `step` up to so many tokens."""
        return tokens // step * step
