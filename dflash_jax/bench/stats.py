"""From records of requests to figures: pure arithmetic on times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_jax.bench.acceptance import SpeculativeDecoding

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestRecord:
    """Observations of one request; times are in seconds of one clock.

    Attributes:
        output_len: limit of tokens that it asked for.
        start: when it was sent, connecting included.
        end: when its stream ended or failed.
        arrivals: times at which parts of the answer arrived, and their tokens, 0 where the server did not say. Parts in
            one read of the socket have one time.
        prompt_tokens: of the server's usage.
        completion_tokens: of the server's usage.
        finish_reason: the server's.
        speculative_decoding: the server's report of the request, if it sends one.
        error_kind: None if the request succeeded.
        error: what failed.
    """

    output_len: int
    start: float = 0.0
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    speculative_decoding: SpeculativeDecoding | None = None
    error_kind: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first arrival."""
        return self.arrivals[0][0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds to the last arrival."""
        return self.arrivals[-1][0] - self.start

    @property
    def tpot(self) -> float | None:
        """(last - first arrival) / (tokens - 1); None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals."""
        return [after - before for (before, _), (after, _) in pairwise(self.arrivals)]

    @property
    def inter_token(self) -> list[tuple[float, float]]:
        """(seconds a token, tokens) of each arrival but the first: its gap, divided among its tokens.

        With speculation several tokens arrive at once. Where the server states the tokens of every arrival
        (`token_ids`) and their sum is its usage, these are used; else all tokens but the first are spread evenly over
        the gaps.
        """
        if sum(tokens for _, tokens in self.arrivals) == self.completion_tokens:
            counted = [(time, tokens) for time, tokens in self.arrivals if tokens]
            return [((after - before) / tokens, tokens) for (before, _), (after, tokens) in pairwise(counted)]
        gaps = self.gaps
        if not gaps or self.completion_tokens < 2:
            return []
        share = (self.completion_tokens - 1) / len(gaps)
        return [(gap / share, share) for gap in gaps]

    def to_dict(self) -> dict[str, Any]:
        """The record as the detailed result holds it, times in seconds after the start of the run."""
        is_good = self.error_kind is None
        return {
            "start": self.start,
            "end": self.end,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "output_len": self.output_len,
            "finish_reason": self.finish_reason,
            "ttft_ms": 1e3 * self.ttft if is_good else None,
            "e2el_ms": 1e3 * self.e2el if is_good else None,
            "arrivals": self.arrivals,
            "error_kind": self.error_kind,
            "error": self.error,
        }


def spread(name: str, samples: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float | None]:
    """`mean_<name>`, `p50_<name>` and so on of samples; None without samples. A weight counts its sample that often."""
    keys = [f"mean_{name}", *(f"p{p}_{name}" for p in PERCENTILES)]
    if not samples:
        return dict.fromkeys(keys)
    if weights is None:
        values = np.percentile(samples, PERCENTILES)
    else:
        values = np.percentile(samples, PERCENTILES, weights=weights, method="inverted_cdf")
    return dict(zip(keys, [float(np.average(samples, weights=weights)), *values.tolist()], strict=True))


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Largest number of requests that ran at one time."""
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def summarize(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Figures of a run under vLLM's names; times are in ms except `duration`.

    Only requests without an error count for throughput, over the time from the first start to the last end of all.
    """
    good = [r for r in records if r.error_kind is None]
    duration = max(r.end for r in records) - min(r.start for r in records)
    input_tokens = sum(r.prompt_tokens for r in good)
    output_tokens = sum(r.completion_tokens for r in good)
    arrivals = sum(len(r.arrivals) for r in good)
    inter_token = [pair for r in good for pair in r.inter_token]
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": errors(records),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration if duration else None,
        "output_throughput": output_tokens / duration if duration else None,
        "total_token_throughput": (input_tokens + output_tokens) / duration if duration else None,
        "max_concurrent_requests": peak_concurrency(records),
        "num_ended_early": sum(r.completion_tokens < r.output_len for r in good),
        "tokens_per_chunk": output_tokens / arrivals if arrivals else None,
        **spread("ttft_ms", [1e3 * r.ttft for r in good]),
        **spread("tpot_ms", [1e3 * r.tpot for r in good if r.tpot is not None]),
        **spread("itl_ms", [1e3 * seconds for seconds, _ in inter_token], [tokens for _, tokens in inter_token]),
        **spread("icl_ms", [1e3 * gap for r in good for gap in r.gaps]),
        **spread("e2el_ms", [1e3 * r.e2el for r in good]),
    }


def errors(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Number of failed requests by kind, most frequent first, with the message of the first of each kind."""
    kinds: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error_kind is not None:
            kinds.setdefault(record.error_kind, {"count": 0, "example": record.error})["count"] += 1
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["count"]))
