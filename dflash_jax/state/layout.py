"""How much of each kind of state there is room for."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.state.group import StateGroup


@dataclass(frozen=True)
class Layout:
    """Sizes of what is kept of sequences.

    Attributes:
        page_size: S, tokens a page; prefix hits cover whole pages.
        block: G, tokens that a round may write.
        table_width: M, pages of the longest sequence.
        groups: of layers that keep the same; the first keeps every token.
        snapshots: index of the group of recurrent states; None without such layers.
    """

    page_size: int
    block: int
    table_width: int
    groups: tuple[StateGroup, ...]
    snapshots: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences that the first group holds."""
        return self.groups[0].num_units * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold positions 0 to `tokens` - 1."""
        return -(-tokens // self.page_size)
