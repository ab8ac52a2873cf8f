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
    """vLLM's `metrics.speculative_decoding` of one request; entry j of the histogram counts steps that accept j."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = []

    @property
    def is_consistent(self) -> bool:
        """Whether its sums agree."""
        histogram = self.acceptance_histogram
        return (
            sum(histogram) == self.num_spec_steps
            and sum(j * count for j, count in enumerate(histogram)) == self.num_accepted_draft_tokens
            and self.num_accepted_draft_tokens <= self.num_draft_tokens
        )


def of_requests(blocks: Iterable[SpeculativeDecoding]) -> Acceptance | None:
    """The sum over requests whose own sums agree; None if there are none."""
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
    """What two readings of /metrics tell by vLLM's counters, under any prefix; None if they are not there."""
    first, last = _counters(before), _counters(after)
    if not set(COUNTERS) <= set(last):
        return None
    grown = {name: int(value - first.get(name, 0.0)) for name, value in last.items()}
    return Acceptance("prometheus", **grown, histogram=None)


def _counters(text: str) -> dict[str, float]:
    """The counters by our names. A server may export one under several prefixes: one of them is read."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in SAMPLE.findall(text):
        if name.endswith(tuple(COUNTERS.values())):
            sums[name] += float(value)
    found = {}
    for ours, suffix in COUNTERS.items():
        names = sorted(name for name in sums if name.endswith(suffix))
        if names:
            found[ours] = sums[names[0]]
    return found
