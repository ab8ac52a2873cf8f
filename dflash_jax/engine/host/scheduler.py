"""Who runs: slots and pages for sequences, first come first served. Pure host code.

A sequence is admitted when a slot and pages for its prompt are free, is prefilled in chunks, then takes part in every
round. Its pages are reserved ahead of the rounds that are in flight. When pages run out, the sequence that came last
gives its own back and waits again; what it has emitted becomes part of its prompt. After a step that failed, the
sequences of it run alone until each has got through a round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.state.layout import Layout
from dflash_jax.state.pages import NO_PAGE, IntegrityError, PageHash, PagePool, extend_hashes


@dataclass(eq=False)
class Running:
    """A sequence that holds a slot and pages.

    Attributes:
        sequence: what it completes.
        slot: its row on the device.
        text: tokens to prefill: the prompt, and all that was emitted before a preemption but the last token.
        prefilled: how many of them are in the cache.
        in_flight: rounds that are enqueued and not yet read.
        last_round: number of the last round that was planned for it, among all that the planner has numbered.
        deferred: tokens whose features wait to become context of the drafter, the last ones of the rounds enqueued.
        has_controls: whether the device knows its penalties, biases and stops.
        full: pages of the full group.
        sliding: pages of the sliding group from page `sliding_start` on.
        remembered: whole pages that the prefix cache knows of, counted from the first.
    """

    sequence: Sequence
    slot: int
    text: list[int]
    prefilled: int
    full: list[int] = field(default_factory=list)
    sliding: deque[int] = field(default_factory=deque)
    sliding_start: int = 0
    remembered: int = 0
    in_flight: int = 0
    last_round: int = 0
    deferred: int = 0
    has_controls: bool = False
    released: bool = False

    @property
    def is_prefilled(self) -> bool:
        """Whether it takes part in rounds."""
        return self.prefilled == len(self.text)

    @property
    def length(self) -> int:
        """Tokens that the target has certainly processed; rounds in flight will have processed more."""
        return max(len(self.text), len(self.sequence.prompt_token_ids) + len(self.sequence.output.token_ids) - 1)

    @property
    def may_emit(self) -> bool:
        """Whether the rounds in flight leave it anything to emit."""
        emitted = max(len(self.sequence.output.token_ids), 1) + self.in_flight
        return not self.released and self.is_prefilled and emitted < self.sequence.max_new_tokens


class Scheduler:
    """Waiting and running sequences, their slots, pages and page tables."""

    def __init__(self, layout: Layout, max_num_seqs: int):
        self.layout = layout
        self.full, self.sliding = PagePool(layout.full_pages), PagePool(layout.sliding_pages)
        self.num_preemptions = self.num_prompt_tokens = self.num_prefix_queries = self.num_prefix_hits = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Running] = []  # oldest first
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.full_table = np.full((max_num_seqs, layout.table_width), NO_PAGE, np.int32)
        self.sliding_table = self.full_table.copy()
        self.sliding_from = np.zeros(max_num_seqs, np.int32)

    def admit(self) -> list[Running]:
        """Start waiting sequences while there are slots and pages for them."""
        admitted = []
        while self.waiting and self._free_slots and self._may_start(self.waiting[0]):
            running = self._start(self.waiting[0])
            if running is None:
                break
            self.waiting.popleft()
            admitted.append(running)
        return admitted

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether nothing speaks against a waiting sequence but pages."""
        if sequence.suspect or any(r.sequence.suspect for r in self.running):
            return not self.running
        # The first completion of a prompt fills the pages that the others share.
        return not any(r.sequence is sequence.first and not r.is_prefilled for r in self.running)

    def reserve_round(self, running: Running) -> bool:
        """Own the pages that a further round may write; False, and nothing changed, if there are too few."""
        layout, length = self.layout, running.length
        ends = layout.pages_for(length + (running.in_flight + 1) * layout.block)
        if layout.window is not None:
            self._recycle(running, length)
        kept = running.sliding_start + len(running.sliding)
        if ends <= len(running.full) and (layout.window is None or ends <= kept):
            return True
        more = max(ends - len(running.full), 0)
        more_sliding = 0 if layout.window is None else max(ends - kept, 0)
        if more > self.full.num_free or more_sliding > self.sliding.num_free:
            return False
        self._grow(running, self.full.take(more), self.sliding.take(more_sliding))
        return True

    def remember(self, running: Running) -> None:
        """Let others share the whole pages that are certainly written."""
        if running.sequence.cache_salt is None:
            return
        written = running.length - running.deferred if running.is_prefilled else running.prefilled
        pages, first = written // self.layout.page_size, running.remembered
        if pages <= first:
            return
        hashes = self._hashes(running.sequence, pages)
        for index in range(first, pages):
            self.full.remember(running.full[index], hashes[index])
            if index >= running.sliding_start and running.sliding:
                self.sliding.remember(running.sliding[index - running.sliding_start], hashes[index])
        running.remembered = pages

    def release(self, running: Running) -> None:
        """Give back the slot and the pages of a sequence."""
        running.released = True
        self.running.remove(running)
        self._free_slots.append(running.slot)
        self._free_slots.sort(reverse=True)  # low slots first: rounds run over the first few
        self.full.give_back(running.full)
        self.sliding.give_back(running.sliding)
        self.full_table[running.slot] = self.sliding_table[running.slot] = NO_PAGE

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; one that does neither is ignored."""
        self.waiting = deque(waiting for waiting in self.waiting if waiting is not sequence)
        for running in [r for r in self.running if r.sequence is sequence]:
            self.release(running)

    def preempt_last(self) -> Running:
        """Make the sequence that came last wait again, in front of all others."""
        last = self.running[-1]
        self.release(last)
        self.waiting.appendleft(last.sequence)
        self.num_preemptions += 1
        return last

    def forget(self, running: Running) -> None:
        """Let nobody take up the pages of a sequence whose keys and values cannot be trusted."""
        self.full.forget(running.full)
        self.sliding.forget(running.sliding)

    def flush_cache(self) -> None:
        """Empty the prefix cache; what runs keeps its pages."""
        self.full.forget_all()
        self.sliding.forget_all()

    def requeue(self) -> list[Sequence]:
        """After a failed step: everything in the cache is lost, and who ran waits again, in front of all others.

        Returns:
            Who ran, oldest first.
        """
        lost = [running.sequence for running in self.running]
        for running in list(self.running):
            self.release(running)
        self._forget_everything()
        self.waiting.extendleft(reversed(lost))
        return lost

    def reset(self) -> None:
        """Start the books anew while nothing runs: every page and every slot is free, the prefix cache empty."""
        assert not self.running
        self._forget_everything()
        self._free_slots = list(range(len(self.full_table) - 1, -1, -1))

    def _forget_everything(self) -> None:
        self.full, self.sliding = PagePool(self.layout.full_pages), PagePool(self.layout.sliding_pages)

    def check_integrity(self) -> None:
        """Check that every page is owned as often as counted, and that no page and no slot is lost.

        Raises:
            IntegrityError: something disagrees.
        """
        self.full.check_integrity([r.full for r in self.running])
        self.sliding.check_integrity([r.sliding for r in self.running])
        if len(self._free_slots) + len(self.running) != len(self.full_table):
            raise IntegrityError(
                f"of {len(self.full_table)} slots {len(self._free_slots)} are free and {len(self.running)} in use"
            )

    def _start(self, sequence: Sequence) -> Running | None:
        """Give a waiting sequence a slot and pages; None, and nothing changed, if there are too few pages."""
        layout, emitted = self.layout, sequence.output.token_ids
        length = len(sequence.prompt_token_ids) + max(len(emitted) - 1, 0)
        hashes: list[PageHash] = []
        if sequence.cache_salt is not None and not sequence.wants_prompt_logprobs:
            # The last token of a prompt is always processed: its logits are wanted.
            whole_pages = (length - 1) // layout.page_size
            hashes = self._hashes(sequence, whole_pages)[:whole_pages]
        full = self.full.known(hashes)
        hit = len(full)
        sliding, start = self._known_window(hashes[:hit], length)
        ends = layout.pages_for(length + layout.block)
        more = ends - hit
        more_sliding = 0 if layout.window is None else ends - start - len(sliding)
        if not (self.full.has_room(full, more) and self.sliding.has_room(sliding, more_sliding)):
            return None
        text = sequence.tokens_between(0, length)
        running = Running(sequence, self._free_slots.pop(), text, prefilled=hit * layout.page_size)
        running.remembered, running.sliding_start = hit, start
        if not emitted:
            sequence.num_cached_tokens = running.prefilled
            self.num_prompt_tokens += length
            self.num_prefix_hits += running.prefilled
            self.num_prefix_queries += length if hashes else 0
        self.sliding_from[running.slot] = (start if sliding else hit) * layout.page_size
        self.full.share(full)
        self.sliding.share(sliding)
        self._grow(running, [*full, *self.full.take(more)], [*sliding, *self.sliding.take(more_sliding)])
        self.running.append(running)
        return running

    def _hashes(self, sequence: Sequence, pages: int) -> list[PageHash]:
        """Hashes of so many whole pages of a sequence or more; each is made once, however long the sequence waits."""
        made, size = len(sequence.page_hashes), self.layout.page_size
        if made < pages:
            tokens = sequence.tokens_between(made * size, pages * size)
            extend_hashes(sequence.page_hashes, tokens, size, sequence.cache_salt or b"")
        return sequence.page_hashes

    def _known_window(self, hashes: list[PageHash], length: int) -> tuple[list[int], int]:
        """The known sliding pages right before a hit's end that a text of this length still sees.

        Returns:
            The pages, and the index of the first page that the text keeps. What the window would see before it is
            masked: it costs some acceptance, never the hit.
        """
        if self.layout.window is None:
            return [], 0
        first = self.layout.first_seen(length) // self.layout.page_size
        pages: deque[int] = deque()
        for index in range(len(hashes) - 1, first - 1, -1):
            known = self.sliding.known([hashes[index]])
            if not known:
                break
            pages.appendleft(known[0])
        return list(pages), max(first, len(hashes) - len(pages))

    def _grow(self, running: Running, full: list[int], sliding: list[int]) -> None:
        start = len(running.full)
        running.full += full
        self.full_table[running.slot, start : len(running.full)] = full
        start = running.sliding_start + len(running.sliding)
        running.sliding.extend(sliding)
        self.sliding_table[running.slot, start : start + len(sliding)] = sliding

    def _recycle(self, running: Running, length: int) -> None:
        """Give back sliding pages that neither the window, `length` tokens on, nor a coming write can touch."""
        seen = self.layout.first_seen(length) // self.layout.page_size
        while running.sliding and running.sliding_start < seen:
            self.sliding.give_back([running.sliding.popleft()])
            self.sliding_table[running.slot, running.sliding_start] = NO_PAGE
            running.sliding_start += 1
