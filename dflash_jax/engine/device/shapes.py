"""The few shapes that steps are compiled for; calls are padded to the next larger shape.

Padding costs time, more shapes cost programs. On a CPU work grows with each row and token, and a program takes seconds
and memory maps to compile; but loops can end where the keys do, and branches cost nothing. So on CPUs there are many
numbers of rows, lengths and chunks, but one width of page tables and one sampling mode. On an accelerator a few rows
cost as much as one, unless each touches further experts, and a sampling mode that is not needed costs a pass over the
logits: there are few lengths at few rows, but several widths of tables and all modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from dflash_jax.engine.device.slots import ANY, CONTROLLED_MODES, MODES, SamplingMode

CHUNK_GROWTH = 4  # from one chunk size to the next
TABLE_GROWTH = 8  # from one width of page tables to the next
CPU_LEAST_CHUNK = 16  # tokens of a prompt in the smallest chunk
CPU_MOST_CHUNK = 256  # tokens of a prompt in the largest chunk: larger ones are 3 % faster for a prompt of 1,024
CPU_MOST_TOKENS = 256  # of a prefill: 1,024 are hardly faster on a CPU, and streams would have to wait for them
LEAST_CHUNK = 64  # tokens in an accelerator's smallest chunk: 16 take as long
LEAST_TABLE = 4096  # tokens of the narrowest table: so few pages cost the host nothing to hand over
FEW_ROWS = 4  # rows of 16 tokens: an accelerator verifies these 64 tokens in the time of a few


class StepShape(NamedTuple):
    """What one program of an engine is compiled for.

    Attributes:
        step: name of the step.
        rows: sequences.
        tokens: tokens of each sequence.
        pages: pages of each sequence's tables.
        mode: sampling mode; None for steps that do not sample.
    """

    step: str
    rows: int = 0
    tokens: int = 0
    pages: int = 0
    mode: SamplingMode | None = None

    def __str__(self) -> str:
        parts = [self.step]
        if self.rows:
            parts.append(f"of {self.rows} sequences" if self.rows > 1 else "of 1 sequence")
        if self.tokens:
            parts.append(f"x {self.tokens} tokens")
        if self.pages:
            parts.append(f"with tables of {self.pages} pages")
        if self.mode is not None:
            parts.append(f"({self.mode})")
        return " ".join(parts)


@dataclass(frozen=True)
class Load:
    """What an engine will be asked to do, as far as it decides which programs are needed.

    Attributes:
        num_seqs: most sequences side by side.
        prompt_lengths: tokens of each prompt.
        total_tokens: tokens of the longest prompt and its completion.
        modes: sampling modes; they make no difference on CPUs.
        speculates: whether any request uses the drafter.
        is_scored: whether log-probabilities of prompts are wanted.
    """

    num_seqs: int
    prompt_lengths: frozenset[int]
    total_tokens: int
    modes: frozenset[SamplingMode] = frozenset(MODES)
    speculates: bool = True
    is_scored: bool = False


@dataclass(frozen=True)
class Shapes:
    """Sizes of compiled steps.

    Attributes:
        batches: sequences of a round, ascending.
        chunks: tokens that a prefill takes of each prompt, ascending.
        max_num_batched_tokens: most tokens of a prefill, over all its prompts.
        tables: pages of a sequence's tables, ascending.
        lengths: tokens that a round may verify, ascending; the last is the whole block.
        modes: sampling modes that are compiled; only "any" where programs branch at run time.
        moves: snapshots that one program takes or restores; 0 for a target without recurrent states.
        few_rows: rows of a round up to which a part of the block takes an accelerator as long as the whole.
    """

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    max_num_batched_tokens: int
    tables: tuple[int, ...]
    lengths: tuple[int, ...]
    modes: tuple[SamplingMode, ...]
    moves: int = 0
    few_rows: int = FEW_ROWS

    @staticmethod
    def of(
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        page_size: int,
        table_width: int,
        block: int,
        adaptive: bool,
        on_cpu: bool,
        has_snapshots: bool = False,
        has_experts: bool = False,
    ) -> Shapes:
        """The shapes of an engine.

        Args:
            max_num_seqs: most sequences of a round.
            max_num_batched_tokens: most tokens of a prefill.
            max_model_len: most tokens of a prompt.
            page_size: tokens a page.
            table_width: pages of the longest sequence.
            block: G.
            adaptive: whether rounds may verify a part of the block, beside the whole block and the anchor alone.
            on_cpu: whether one CPU runs the steps.
            has_snapshots: whether the target keeps recurrent states, of which snapshots are taken.
            has_experts: whether a round of more tokens reads more weights: of Qwen3.5-35B's 256 experts a layer, 8
                tokens touch 22 %, 16 touch 40 %.
        """
        least_table = -(-LEAST_TABLE // page_size)
        # A table of more than half the greatest width saves too little to be worth a program.
        narrow = tuple(w for w in ladder(least_table, TABLE_GROWTH, table_width) if w * 2 <= table_width)
        least_chunk = CPU_LEAST_CHUNK if on_cpu else LEAST_CHUNK
        most_chunk = min(max_num_batched_tokens, max_model_len)
        if on_cpu:
            max_num_batched_tokens = min(max_num_batched_tokens, CPU_MOST_TOKENS)
            most_chunk = min(most_chunk, CPU_MOST_CHUNK)
        return Shapes(
            batches=ladder(1, 2, max_num_seqs),
            chunks=ladder(least_chunk, CHUNK_GROWTH, most_chunk),
            max_num_batched_tokens=max_num_batched_tokens,
            tables=(table_width,) if on_cpu else (*narrow, table_width),
            lengths=tuple(sorted({1, -(-block // 4), -(-block // 2), block} if adaptive else {1, block})),
            modes=(ANY,) if on_cpu else MODES,
            moves=(1 if on_cpu else max_num_seqs) if has_snapshots else 0,  # padding costs a CPU as much as a move
            few_rows=0 if has_experts else FEW_ROWS,
        )

    @property
    def branches(self) -> bool:
        """Whether programs branch at run time on how to sample."""
        return self.modes == (ANY,)

    @property
    def chunk_for_all(self) -> int:
        """Tokens of the chunk that is compiled first: it can prefill any prompt, some of them faster by another."""
        return next((size for size in self.chunks if size >= LEAST_CHUNK), self.chunks[-1])

    def of_lone_requests(self) -> list[StepShape]:
        """Programs that a single request needs: for a first greedy answer, then for speculation, then for controls."""
        pages, longest = self.tables[-1], self.lengths[-1]
        prefill = self.of_prefill(1, self.chunk_for_all, pages, "greedy", is_scored=False)
        plain, drafted = (
            self.of_round(1, length, pages, "greedy", catches_up=longest > 1 == length) for length in (1, longest)
        )
        return list(dict.fromkeys([*prefill, *reversed(plain), *drafted, StepShape("set_controls")]))

    def batch(self, sequences: int) -> int:
        """Rows of a round of so many sequences."""
        return next(size for size in self.batches if size >= sequences)

    def lengths_at(self, rows: int) -> tuple[int, ...]:
        """Tokens that a round of so many rows may verify.

        On a CPU a quarter of the block is 2.4 times the work of plain decoding at 8 rows and more, and seldom pays.
        """
        if self.branches:
            return self.lengths if rows <= FEW_ROWS or len(self.lengths) < 4 else (1, *self.lengths[2:])
        return self.lengths if rows > self.few_rows else tuple(dict.fromkeys((1, self.lengths[-1])))

    def scored_chunk(self, longest: int) -> tuple[int, int]:
        """Rows and tokens of the next prefill of a prompt whose log-probabilities are wanted; the rows are 1."""
        return (1, self.chunk_for_all) if self.branches else self.chunk(1, longest)

    def table(self, pages: int) -> int:
        """Width of the page tables of sequences of up to so many pages."""
        return next((width for width in self.tables if width >= pages), self.tables[-1])

    def chunk(self, prompts: int, longest: int) -> tuple[int, int]:
        """Rows, and tokens a row, of the next prefill.

        A smaller chunk is taken where padding would fill half of the larger one or more.

        Args:
            prompts: how many prompts wait.
            longest: tokens left of the longest of them.
        """
        width = max((size for size in self.chunks if size < 2 * longest), default=self.chunks[0])
        return max(rows for rows in self.chunk_rows(width) if rows == 1 or rows < 2 * prompts), width

    def cuts(self, length: int) -> Iterator[int]:
        """Tokens of each chunk in which a single prompt of this length is prefilled."""
        while length > 0:
            _, width = self.chunk(1, length)
            yield width
            length -= width

    def chunk_rows(self, width: int) -> list[int]:
        """Rows that a prefill of so many tokens a row may have."""
        return [rows for rows in self.batches[::2] if rows == 1 or rows * width <= self.max_num_batched_tokens]

    def prefills(self) -> Iterator[tuple[int, int]]:
        """Rows and tokens of every prefill."""
        return ((rows, width) for width in self.chunks for rows in self.chunk_rows(width))

    def mode(self, needed: SamplingMode) -> SamplingMode:
        """The mode of the programs that sample in the `needed` mode."""
        return ANY if self.branches else needed

    def of_round(self, rows: int, length: int, pages: int, mode: SamplingMode, *, catches_up: bool) -> list[StepShape]:
        """The steps of a round.

        Args:
            rows: rows of the round.
            length: tokens to verify.
            pages: pages that its tables must have at least.
            mode: sampling mode that the most demanding sequence needs.
            catches_up: whether deferred context of the drafter must be written first.
        """
        widest = self.tables[-1]
        steps = [StepShape("catch_up", rows, pages=widest)] if catches_up else []
        if mode == "greedy" and not self.branches:
            return [*steps, StepShape("greedy_round", rows, length, self.table(pages))]
        if length > 1:
            steps.append(StepShape("draft", rows, pages=widest))
        if self.branches:
            return [*steps, StepShape("verify_commit", rows, length, widest, ANY)]
        return [*steps, StepShape("verify", rows, length, widest), StepShape("commit", rows, length, mode=mode)]

    def of_prefill(
        self, rows: int, width: int, pages: int, mode: SamplingMode | None, *, is_scored: bool
    ) -> list[StepShape]:
        """The steps of a prefill; `mode` is None if no prompt ends in it."""
        pages = self.tables[-1] if is_scored else self.table(pages)
        steps = [StepShape("prefill", rows, width, pages)]
        if is_scored:
            steps.append(StepShape("score", 1, width, pages))
        if self.moves:
            steps.append(self.copy)
        return steps if mode is None else [*steps, StepShape("commit", rows, 1, mode=self.mode(mode))]

    @property
    def copy(self) -> StepShape:
        """The step that takes and restores snapshots."""
        return StepShape("copy_states", self.moves)

    def programs(self, load: Load | None = None, *, max_pages: int | None = None) -> list[StepShape]:
        """Every program of an engine, or those that a load needs; those of few rows come first.

        Args:
            load: what will be asked; None is anything.
            max_pages: pages of the longest sequence of the load; None is the widest table.
        """
        if load is None:
            load = Load(self.batches[-1], frozenset(self.chunks), 0, speculates=True, is_scored=True)
        widths = sorted({width for length in load.prompt_lengths for width in self.cuts(length)})
        tables = [width for width in self.tables if max_pages is None or width <= self.table(max_pages)]
        kinds = [(pages, mode) for pages in tables for mode in MODES if mode in load.modes]
        num_seqs = min(load.num_seqs, self.batches[-1])
        catches_up = self.lengths[-1] > 1
        shapes: dict[StepShape, None] = {}  # an ordered set
        for rows in self.batches[: self.batches.index(self.batch(num_seqs)) + 1]:
            for width in widths:
                if rows in self.chunk_rows(width) and (rows == 1 or rows < 2 * num_seqs):
                    for kind in kinds:
                        shapes |= dict.fromkeys(self.of_prefill(rows, width, *kind, is_scored=False))
                    if rows == 1 and load.is_scored:
                        _, scored = self.scored_chunk(width)
                        shapes |= dict.fromkeys(self.of_prefill(1, scored, tables[-1], None, is_scored=True))
            lengths = reversed(self.lengths_at(rows)) if load.speculates else (1,)
            for length, kind in product(lengths, kinds):
                shapes |= dict.fromkeys(self.of_round(rows, length, *kind, catches_up=catches_up))
        if not load.modes.isdisjoint(CONTROLLED_MODES):
            shapes[StepShape("set_controls")] = None
        return list(shapes)


def ladder(least: int, growth: int, most: int) -> tuple[int, ...]:
    """`least` times each power of `growth` while below `most`, then `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return (*sizes, most)
