"""How many pages there are, and of what size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes of the paged cache.

    Attributes:
        page_size: S.
        block: G, tokens that a round may write.
        full_pages: of the group that keeps every token.
        sliding_pages: of the group of sliding drafter layers.
        window: W, the widest of these layers; None without any.
        table_width: M, pages of the longest sequence.
    """

    page_size: int
    block: int
    full_pages: int
    sliding_pages: int
    window: int | None
    table_width: int

    def pages_for(self, tokens: int) -> int:
        """Pages that hold positions 0..tokens-1."""
        return -(-tokens // self.page_size)

    def first_seen(self, length: int) -> int:
        """The first position that a query at `length` or later can see in a sliding layer."""
        assert self.window is not None
        return max(length - self.window + 1, 0)
