"""How many drafts the rounds of an engine or a server accepted: sums, and their histogram for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BAR_WIDTH = 40  # characters of the longest bar of a histogram


@dataclass(frozen=True)
class Acceptance:
    """Sums over rounds.

    Attributes:
        source: who counted: "requests" (each reported its own rounds), "prometheus" (counters of the server, over all
            that it did meanwhile) or "engine".
        num_drafts: rounds; vLLM's name.
        num_draft_tokens: tokens drafted.
        num_accepted_tokens: drafts accepted; the bonus token of a round is not counted.
        histogram: entry j counts the rounds that accepted j drafts; None if unknown.
    """

    source: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    histogram: list[int] | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON, with the mean acceptance length (bonus included) and the draft acceptance rate."""
        drafts, drafted, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        return {
            "source": self.source,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "num_drafts": drafts,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "histogram": self.histogram,
        }


def of_engine(acceptance_lengths: Sequence[int], num_draft_tokens: int) -> Acceptance:
    """Sum the engine's rounds.

    Args:
        acceptance_lengths: tokens that each round emitted, bonus included: at least 1.
        num_draft_tokens: tokens drafted in all of them.
    """
    histogram = [0] * max(acceptance_lengths, default=0)
    for length in acceptance_lengths:
        histogram[length - 1] += 1
    accepted = sum(acceptance_lengths) - len(acceptance_lengths)
    return Acceptance("engine", len(acceptance_lengths), num_draft_tokens, accepted, histogram)


def histogram_lines(counts: Sequence[int], *, first: int) -> list[str]:
    """A line with a bar for each count; entry j counts rounds of length `first` + j."""
    largest = max([1, *counts])
    return [
        f"{length:4d} {'#' * round(BAR_WIDTH * count / largest):{BAR_WIDTH}} {count}"
        for length, count in enumerate(counts, start=first)
    ]
