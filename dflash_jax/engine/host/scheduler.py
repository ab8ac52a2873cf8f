"""Which sequences run: slots and units of state for them, first come first served. Pure host code.

A sequence is admitted when a slot and units for its prompt are free, is prefilled in chunks, then takes part in every
round. Units are reserved ahead of the rounds in flight. When they run out, the sequence that came last is preempted: it
gives its units back and waits again, and what it has emitted becomes part of its prompt. After a failed step each of
its sequences is suspect, and runs alone until it has completed a round.

What units are (pages, of every token or of a window) is the business of the groups in the layout.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.base.errors import QueueFullError
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.state.group import Units
from dflash_jax.state.layout import Layout
from dflash_jax.state.pages import NO_PAGE, IntegrityError, PageHash, PagePool, extend_hashes

CHECK_SECONDS = 60.0  # from one check of the books to the next
logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Running:
    """A sequence that holds a slot and units.

    Attributes:
        sequence: the prompt and its completion.
        slot: its row in the state on the device.
        text: tokens to prefill: the prompt and, after a preemption, all emitted tokens but the last.
        prefilled: how many tokens of `text` are in the cache.
        in_flight: rounds that are enqueued and not yet read.
        last_round: number of the last round in which it took part and others did not, as the planner numbers rounds.
        deferred: newest processed tokens whose features wait to become context of the drafter.
        has_controls: whether the device knows its penalties, biases and stops.
        released: whether it has given its slot and units back; results that are still in flight are dropped.
        known_pages: whole pages of `text` whose keys and values were known when it was admitted.
        stops: tokens of `text` at which a chunk must end, since the recurrent state is wanted there, ascending.
        next_snapshot: tokens at which the recurrent state is wanted next in rounds; 0 for never.
        last_snapshot: tokens of the last snapshot that rounds have taken; 0 for none.
        num_rounds: rounds that have been read.
        read_length: its length before the round that is in flight for longest.
        covered_rounds: rounds after which a copy of the state at `next_snapshot` was enqueued last.
        most_tokens: that prompt and completion may come to.
        units: what it owns in each group of the layout.
        reserved: positions that its units hold in every group.
        remembered: whole pages that the prefix cache knows of, counted from the first.
    """

    sequence: Sequence
    slot: int
    text: list[int]
    prefilled: int
    known_pages: int = 0
    stops: list[int] = field(default_factory=list)
    next_snapshot: int = 0
    last_snapshot: int = 0
    num_rounds: int = 0
    read_length: int = 0
    covered_rounds: int = -1
    units: list[Units] = field(default_factory=list)
    reserved: int = 0
    remembered: int = 0
    in_flight: int = 0
    last_round: int = 0
    deferred: int = 0
    has_controls: bool = False
    released: bool = False
    most_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_tokens = len(self.sequence.prompt_token_ids) + self.sequence.max_new_tokens

    @property
    def is_prefilled(self) -> bool:
        """Whether it takes part in rounds."""
        return self.prefilled == len(self.text)

    @property
    def chunk_end(self) -> int:
        """Tokens of `text` up to which the next chunk may reach."""
        return next((stop for stop in self.stops if stop > self.prefilled), len(self.text))

    @property
    def length(self) -> int:
        """Tokens that the target has processed for certain; rounds in flight will add more."""
        sequence, prefilled = self.sequence, len(self.text)
        processed = len(sequence.prompt_token_ids) + len(sequence.output.token_ids) - 1
        return processed if processed > prefilled else prefilled  # max() would cost a round of 32 sequences 5 us

    @property
    def may_emit(self) -> bool:
        """Whether it may emit tokens beyond those of the rounds in flight."""
        if self.released or self.prefilled != len(self.text):  # as `is_prefilled`; each round asks this of all twice
            return False
        sequence = self.sequence
        return (len(sequence.output.token_ids) or 1) + self.in_flight < sequence.max_new_tokens


def begin_round(rounds: list[Running]) -> None:
    """Count a round that was enqueued for these sequences."""
    for running in rounds:
        running.in_flight += 1


class Scheduler:
    """Waiting and running sequences, their slots, units of state and tables of these.

    Attributes:
        waiting: in the order in which they start.
        running: oldest first.
        pools: units of each group of the layout.
        tables: of each group, the units of every slot, int32 [Q, M]; `NO_PAGE` where nothing is kept.
        valid_from: of each group, the first position of every slot that is kept, int32 [Q].
    """

    def __init__(self, layout: Layout, max_num_seqs: int):
        self.layout = layout
        self.num_preemptions = self.num_prompt_tokens = self.num_prefix_queries = self.num_prefix_hits = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Running] = []  # oldest first
        self.tables = [np.full((max_num_seqs, layout.table_width), NO_PAGE, np.int32) for _ in layout.groups]
        self.valid_from = [np.zeros(max_num_seqs, np.int32) for _ in layout.groups]
        self._max_num_seqs, self._next_check = max_num_seqs, 0.0  # as `time.monotonic` counts
        self._is_short = False  # whether the last `admit` had too few slots or pages
        self._start_books()

    def _start_books(self) -> None:
        """Every unit and every slot is free, and the prefix cache knows nothing."""
        self.pools = [PagePool(group.num_units) for group in self.layout.groups]
        self._free_slots = list(range(self._max_num_seqs - 1, -1, -1))

    @property
    def usage(self) -> float:
        """Share of the first group's units that sequences own, in [0, 1]."""
        return 1 - self.pools[0].num_free / self.pools[0].num_pages

    @property
    def num_open_slots(self) -> int:
        """Slots that newcomers can get from the next `admit`: none while others already wait for slots or pages."""
        return 0 if self._is_short else len(self._free_slots)

    def queue(self, sequences: list[Sequence], limit: int | None) -> None:
        """Let sequences wait, all or none; those that get a slot from the next `admit` do not count.

        Args:
            sequences: in the order in which they start.
            limit: how many may wait; None lets all.

        Raises:
            QueueFullError: more would wait than may.
        """
        waiting = len(self.waiting)
        if limit is not None and waiting + len(sequences) > limit + self.num_open_slots:
            raise QueueFullError(
                f"the queue is full: {waiting} sequences wait, {len(sequences)} more have come, and at most "
                f"max_num_queued_seqs={limit} may wait (a server's --max-num-queued-reqs); try again later."
            )
        self.waiting.extend(sequences)

    def admit(self) -> list[Running]:
        """Start waiting sequences while there are slots and pages for them."""
        admitted = []
        self._is_short = False
        while self.waiting and self._may_start(self.waiting[0]):
            running = self._start(self.waiting[0]) if self._free_slots else None
            if running is None:
                self._is_short = True
                break
            self.waiting.popleft()
            admitted.append(running)
        return admitted

    @property
    def has_suspects_behind(self) -> bool:
        """Whether a suspect waits for others to end that have proved to be none: only suspects must run alone."""
        is_next = bool(self.waiting) and self.waiting[0].suspect and bool(self.running)
        return is_next and not any(running.sequence.suspect for running in self.running)

    def set_aside(self) -> None:
        """Preempt all, who wait behind the suspects from now on."""
        aside = [running.sequence for running in self.running]
        for running in list(self.running):
            self.release(running)
        self.num_preemptions += len(aside)
        suspects = [sequence for sequence in self.waiting if sequence.suspect]
        others = [sequence for sequence in self.waiting if not sequence.suspect]
        self.waiting = deque([*suspects, *aside, *others])

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may start if there are units for it."""
        if sequence.suspect or any(r.sequence.suspect for r in self.running):
            return not self.running
        # The other completions of a prompt wait until the first has filled the pages that they share.
        return not any(r.sequence is sequence.first and not r.is_prefilled for r in self.running)

    def reserve_round(self, running: Running) -> bool:
        """Own the units that a further round may write; False, and no unit taken, if there are too few."""
        length, groups = running.length, self.layout.groups
        needed = length + (running.in_flight + 1) * self.layout.block
        if needed <= running.reserved:
            return True
        self._recycle(running, length)
        missing = [max(g.units_for(needed) - u.end, 0) for g, u in zip(groups, running.units, strict=True)]
        if any(number > pool.num_free for number, pool in zip(missing, self.pools, strict=True)):
            return False
        for index, number in enumerate(missing):
            self._grow(running, index, self.pools[index].take(number))
        running.reserved = min(g.holds(u.end) for g, u in zip(groups, running.units, strict=True))
        return True

    def remember(self, running: Running) -> None:
        """Let others share the whole pages that are certainly written."""
        if running.sequence.cache_salt is None:
            return
        is_prefilled = running.prefilled == len(running.text)
        written = running.length - running.deferred if is_prefilled else running.prefilled
        pages, first = written // self.layout.page_size, running.remembered
        if pages <= first:
            return
        hashes = self.hashes(running.sequence, pages)
        for group, pool, units in zip(self.layout.groups, self.pools, running.units, strict=True):
            start, shareable = group.whole_pages(units, first, pages)
            for unit, page_hash in zip(shareable, hashes[start:pages], strict=False):  # a group without layers has none
                pool.remember(unit, page_hash)
        running.remembered = pages

    def release(self, running: Running) -> None:
        """Give back the slot and the units of a sequence."""
        running.released = True
        self.running.remove(running)
        self._free_slots.append(running.slot)
        self._free_slots.sort(reverse=True)  # low slots first: rounds run over the first few
        for pool, table, units in zip(self.pools, self.tables, running.units, strict=True):
            pool.give_back(units.ids)
            table[running.slot] = NO_PAGE

    def drop(self, sequence: Sequence) -> None:
        """Stop a sequence that waits or runs; ignore one that does neither."""
        self.waiting = deque(waiting for waiting in self.waiting if waiting is not sequence)
        self._is_short = self._is_short and bool(self.waiting)
        for running in [r for r in self.running if r.sequence is sequence]:
            self.release(running)

    def preempt_last(self) -> Running:
        """Preempt the sequence that came last: it waits again, in front of all others."""
        last = self.running[-1]
        self.release(last)
        self.waiting.appendleft(last.sequence)
        self.num_preemptions += 1
        return last

    def forget(self, running: Running) -> None:
        """Let nobody take up what a sequence has written: its keys and values cannot be trusted."""
        for pool, units in zip(self.pools, running.units, strict=True):
            pool.forget(units.ids)

    def flush_cache(self) -> None:
        """Empty the prefix cache; what runs keeps its units."""
        for pool in self.pools:
            pool.forget_all()

    def requeue(self) -> list[Sequence]:
        """Preempt all sequences and forget the cache, whose contents a failed step has lost.

        Returns:
            The sequences that ran, oldest first; they wait in front of all others.
        """
        lost = [running.sequence for running in self.running]
        for running in list(self.running):
            self.release(running)
        self._start_books()
        self.waiting.extendleft(reversed(lost))
        return lost

    def repair(self) -> None:
        """Check the books while nothing runs, at most once in `CHECK_SECONDS`.

        Books that contradict themselves are logged as an error and made anew, which costs the prefix cache: a page may
        otherwise have two owners, or none for ever.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            self.check_integrity()
        except IntegrityError:
            logger.exception("the books of pages contradict themselves, which is a bug; the prefix cache is emptied")
            self._start_books()

    def check_integrity(self) -> None:
        """Check that every unit is owned as often as counted, and that no unit and no slot is lost.

        Raises:
            IntegrityError: something disagrees.
        """
        for index, pool in enumerate(self.pools):
            pool.check_integrity([running.units[index].ids for running in self.running])
        free, used = len(self._free_slots), len(self.running)
        if free + used != self._max_num_seqs:
            raise IntegrityError(f"{free} slots are free and {used} in use, of {self._max_num_seqs}")

    def _start(self, sequence: Sequence) -> Running | None:
        """Give a waiting sequence a slot and units; None, and nothing changed, if there are too few units."""
        layout, emitted = self.layout, sequence.output.token_ids
        groups, length = layout.groups, len(sequence.prompt_token_ids) + max(len(emitted) - 1, 0)
        hashes: list[PageHash] = []
        if sequence.cache_salt is not None and not sequence.wants_prompt_logprobs:
            # No hit covers the last token of a prompt: its logits are needed.
            whole_pages = (length - 1) // layout.page_size
            hashes = self.hashes(sequence, whole_pages)[:whole_pages]
        hit = known_pages = groups[0].longest_hit(self.pools[0], hashes)
        for group, pool in zip(groups[1:], self.pools[1:], strict=True):
            hit = group.longest_hit(pool, hashes[:hit])
        shared = [group.shared(pool, hashes[:hit], length) for group, pool in zip(groups, self.pools, strict=True)]
        needed = [group.units_for(length + layout.block) for group in groups]
        missing = [max(number - s.start - len(s.ids), 0) for number, s in zip(needed, shared, strict=True)]
        if not all(p.has_room(s.ids, number) for p, s, number in zip(self.pools, shared, missing, strict=True)):
            return None
        text = sequence.tokens_between(0, length)
        running = Running(sequence, self._free_slots.pop(), text, prefilled=hit * layout.page_size)
        running.remembered, running.known_pages = hit, known_pages
        if sequence.started is None:  # not again after a preemption or a failed step
            sequence.num_cached_tokens = running.prefilled
            self.num_prompt_tokens += length
            self.num_prefix_hits += running.prefilled
            self.num_prefix_queries += length if hashes else 0
        for index, (pool, taken_over) in enumerate(zip(self.pools, shared, strict=True)):
            pool.share(taken_over.ids)
            running.units.append(Units(taken_over.start))
            self.valid_from[index][running.slot] = taken_over.valid_from
            self._grow(running, index, [*taken_over.ids, *pool.take(missing[index])])
        self.running.append(running)
        return running

    def hashes(self, sequence: Sequence, pages: int) -> list[PageHash]:
        """Hashes of so many whole pages of a sequence or more; each is made once, however long the sequence waits."""
        made, size = len(sequence.page_hashes), self.layout.page_size
        if made < pages:
            tokens = sequence.tokens_between(made * size, pages * size)
            extend_hashes(sequence.page_hashes, tokens, size, sequence.cache_salt or b"")
        return sequence.page_hashes

    def _grow(self, running: Running, index: int, ids: list[int]) -> None:
        """Append units to those that a sequence owns in the group of this index."""
        units = running.units[index]
        start = units.end
        units.ids += ids
        self.tables[index][running.slot, start : start + len(ids)] = ids

    def _recycle(self, running: Running, length: int) -> None:
        """Give back the units that neither a query `length` tokens on nor a coming write can touch."""
        for group, pool, table, units in zip(self.layout.groups, self.pools, self.tables, running.units, strict=True):
            first = group.first_kept(length)
            while units.ids and units.start < first:
                pool.give_back([units.ids.pop(0)])
                table[running.slot, units.start] = NO_PAGE
                units.start += 1
