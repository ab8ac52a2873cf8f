"""How many drafts a server accepted: by vLLM's block on usage chunks, or its Prometheus counters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from dflash_jax.base.acceptance import Acceptance

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
COUNTERS = {
    "num_drafts": "spec_decode_num_drafts_total",
    "num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}


class SpeculativeDecoding(msgspec.Struct):
    """vLLM's `metrics.speculative_decoding` of one request.

    Attributes:
        num_spec_steps: rounds.
        num_draft_tokens: tokens drafted.
        num_accepted_draft_tokens: drafts accepted.
        acceptance_histogram: entry j counts the rounds that accepted j drafts.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = []

    @property
    def is_consistent(self) -> bool:
        """Whether its sums agree with its histogram."""
        histogram = self.acceptance_histogram
        return (
            sum(histogram) == self.num_spec_steps
            and sum(j * count for j, count in enumerate(histogram)) == self.num_accepted_draft_tokens
            and self.num_accepted_draft_tokens <= self.num_draft_tokens
        )


def of_requests(blocks: Iterable[SpeculativeDecoding]) -> Acceptance | None:
    """Sum over the requests whose reports are consistent; None if there is none."""
    counted = [block for block in blocks if block.is_consistent]
    if not counted:
        return None
    histogram = [0] * max(len(block.acceptance_histogram) for block in counted)
    for block in counted:
        for j, count in enumerate(block.acceptance_histogram):
            histogram[j] += count
    return Acceptance(
        "requests",
        sum(block.num_spec_steps for block in counted),
        sum(block.num_draft_tokens for block in counted),
        sum(block.num_accepted_draft_tokens for block in counted),
        histogram,
    )


def of_prometheus(before: str, after: str) -> Acceptance | None:
    """The growth of vLLM's counters between two readings of /metrics, under any prefix; None if they are absent."""
    first, last = _counters(before), _counters(after)
    if not set(COUNTERS) <= set(last):
        return None
    grown = {name: int(value - first.get(name, 0.0)) for name, value in last.items()}
    return Acceptance("prometheus", **grown, histogram=None)


def _counters(text: str) -> dict[str, float]:
    """The counters by our names. If a server exports one under several prefixes, the first is read."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in SAMPLE.findall(text):
        if name.endswith(tuple(COUNTERS.values())):
            sums[name] += float(value)
    counters = {}
    for ours, suffix in COUNTERS.items():
        names = sorted(name for name in sums if name.endswith(suffix))
        if names:
            counters[ours] = sums[names[0]]
    return counters
