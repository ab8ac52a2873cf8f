"""The few shapes that steps are compiled for; what runs is padded to the next of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LEAST_CHUNK = 16  # tokens
CHUNK_GROWTH = 4
LEAST_TABLE = 512  # tokens
TABLE_GROWTH = 8


@dataclass(frozen=True)
class Shapes:
    """Sizes of compiled steps.

    Attributes:
        batches: sequences of a round, ascending.
        chunks: tokens that a prefill takes of each prompt, ascending.
        max_num_batched_tokens: most tokens of a prefill over all of its prompts.
        tables: pages a sequence, ascending.
        lengths: tokens that a round may verify, ascending; the last is the whole block.
    """

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    max_num_batched_tokens: int
    tables: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(
        *, max_num_seqs: int, max_num_batched_tokens: int, table_width: int, page_size: int, block: int, adaptive: bool
    ) -> Shapes:
        """The shapes of an engine.

        Args:
            max_num_seqs: most sequences of a round.
            max_num_batched_tokens: most tokens of a prefill.
            table_width: pages of the longest sequence.
            page_size: tokens a page.
            block: G.
            adaptive: whether rounds may verify parts of the block; none of it, or the whole, they always may.
        """
        # A table of more than half the greatest width saves too little to be compiled for.
        least_table = -(-LEAST_TABLE // page_size)
        return Shapes(
            batches=ladder(1, 2, max_num_seqs),
            chunks=ladder(LEAST_CHUNK, CHUNK_GROWTH, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            tables=tuple(w for w in ladder(least_table, TABLE_GROWTH, table_width) if w * 2 <= table_width)
            + (table_width,),
            lengths=tuple(sorted({1, -(-block // 4), -(-block // 2), block} if adaptive else {1, block})),
        )

    def batch(self, sequences: int) -> int:
        """Rows of a round of so many sequences."""
        return next(size for size in self.batches if size >= sequences)

    def table(self, pages: int) -> int:
        """Width of the page tables of sequences of up to so many pages."""
        return next((width for width in self.tables if width >= pages), self.tables[-1])

    def chunk(self, prompts: int, longest: int) -> tuple[int, int]:
        """Rows and tokens a row of the next prefill, when so many prompts wait for it.

        A prompt is cut where padding would be more than half of the chunk.
        """
        fitting = [size for size in self.chunks if size < 2 * longest]
        width = max(fitting, default=self.chunks[0])
        return max(rows for rows in self.chunk_rows(width) if rows == 1 or rows < 2 * prompts), width

    def chunk_rows(self, width: int) -> list[int]:
        """Rows that a prefill of so many tokens a row may have."""
        return [rows for rows in self.batches[::2] if rows == 1 or rows * width <= self.max_num_batched_tokens]

    def prefills(self) -> Iterator[tuple[int, int]]:
        """Rows and tokens of every prefill."""
        return ((rows, width) for width in self.chunks for rows in self.chunk_rows(width))


def ladder(least: int, growth: int, most: int) -> tuple[int, ...]:
    """`least` and its multiples by powers of `growth` that are below `most`, and `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return (*sizes, most)
