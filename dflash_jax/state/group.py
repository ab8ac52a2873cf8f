"""What layers keep of a sequence, by group: how many units it needs, which of them stay, what a prefix hit shares.

Layers that keep the same thing form a group and share one table of units. A unit is whatever is allocated, shared and
given back as a whole: a page of S tokens, or one recurrent state. The scheduler owns units by group and asks the group
all that depends on its kind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from dflash_jax.state.pages import PageHash, PagePool

UNLIMITED = sys.maxsize  # positions: of a group whose units never run out, however long the sequence


@dataclass(eq=False)
class Units:
    """The units that a sequence owns in one group: those of index `start` to `end` - 1 of its table.

    Attributes:
        start: index of the first.
        ids: numbers of the units in their pool, in order.
    """

    start: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index behind the last."""
        return self.start + len(self.ids)


class Shared(NamedTuple):
    """What a prefix hit takes over in one group.

    Attributes:
        ids: units to own besides those who own them already.
        start: index of the first unit that the sequence keeps.
        valid_from: first position that is kept; what lies before it is masked.
    """

    ids: list[int]
    start: int
    valid_from: int


@runtime_checkable
class StateGroup(Protocol):
    """Layers that keep the same thing of a sequence."""

    @property
    def num_units(self) -> int:
        """Units of its pool; 0 where the model has no such layers."""
        ...

    def units_for(self, length: int) -> int:
        """Units that hold positions 0 to `length` - 1, counted from the first, kept or not."""
        ...

    def holds(self, units: int) -> int:
        """Positions that so many units hold: the greatest length whose `units_for` is no more than `units`."""
        ...

    def first_kept(self, length: int) -> int:
        """Index of the first unit that a query at position `length` or later can need."""
        ...

    def longest_hit(self, pool: PagePool, hashes: Sequence[PageHash]) -> int:
        """Whole pages of a text that a prefix hit may cover, for all that this group knows of them.

        Args:
            pool: its units.
            hashes: of the text's whole pages, as of `extend_hashes`.
        """
        ...

    def shared(self, pool: PagePool, hashes: Sequence[PageHash], length: int) -> Shared:
        """What a hit of these pages takes over for a text of `length` tokens; owns nothing yet."""
        ...

    def whole_pages(self, units: Units, first: int, last: int) -> tuple[int, list[int]]:
        """Return the units of written pages `first` to `last` - 1 that others may share, behind the first's index."""
        ...


@dataclass(frozen=True)
class PageGroup:
    """Layers whose keys and values lie in pages: of every token, or of a window.

    Attributes:
        num_units: pages of the pool; 0 where the model has no such layers.
        page_size: S, tokens a page.
        window: W, tokens that a query sees, itself included; None keeps every token.
    """

    num_units: int
    page_size: int
    window: int | None = None

    def units_for(self, length: int) -> int:
        """Pages that hold positions 0 to `length` - 1."""
        return -(-length // self.page_size) if self.num_units else 0

    def holds(self, units: int) -> int:
        """Positions that so many pages hold."""
        return units * self.page_size if self.num_units else UNLIMITED

    def first_kept(self, length: int) -> int:
        """Index of the page in which the window of a query at `length` begins."""
        return 0 if self.window is None else max(length - self.window + 1, 0) // self.page_size

    def longest_hit(self, pool: PagePool, hashes: Sequence[PageHash]) -> int:
        """Pages whose every token is known; a window limits no hit, since what it lacks is masked."""
        keeps_all = self.num_units and self.window is None
        return len(pool.known(hashes)) if keeps_all else len(hashes)

    def shared(self, pool: PagePool, hashes: Sequence[PageHash], length: int) -> Shared:
        """The known pages right before the hit's end that a text of this length still sees.

        What the window would see before them is masked: it costs some acceptance of drafts, never the hit.
        """
        first = self.first_kept(length)
        ids = pool.known_end(hashes[first:])
        start = max(first, len(hashes) - len(ids))
        return Shared(ids, start, (start if ids else len(hashes)) * self.page_size)

    def whole_pages(self, units: Units, first: int, last: int) -> tuple[int, list[int]]:
        """Return the pages among `first` to `last` - 1 that the sequence still owns, behind the index of the first."""
        start = max(first, units.start)
        return start, units.ids[start - units.start : max(last - units.start, 0)]


@dataclass(frozen=True)
class SnapshotGroup:
    """Layers that keep one recurrent state of a sequence, in its slot: a unit is a snapshot of such a state.

    A running sequence needs no unit. A snapshot is known by the hash of the page that ends at its length, and a prefix
    hit ends exactly where there is one.

    Attributes:
        num_units: snapshots of the pool.
    """

    num_units: int

    def units_for(self, length: int) -> int:
        """No units: the state is in the slot."""
        return 0

    def holds(self, units: int) -> int:
        """Any length."""
        return UNLIMITED

    def first_kept(self, length: int) -> int:
        """Nothing is ever given back."""
        return 0

    def longest_hit(self, pool: PagePool, hashes: Sequence[PageHash]) -> int:
        """Pages up to the longest snapshot of the text."""
        return next((pages for pages in range(len(hashes), 0, -1) if pool.known([hashes[pages - 1]])), 0)

    def shared(self, pool: PagePool, hashes: Sequence[PageHash], length: int) -> Shared:
        """No units: the snapshot is copied to the slot."""
        return Shared([], 0, 0)

    def whole_pages(self, units: Units, first: int, last: int) -> tuple[int, list[int]]:
        """No units: pages say nothing about states."""
        return first, []
