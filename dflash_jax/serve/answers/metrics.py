"""Prometheus metrics under vLLM's names, and the statistics that are logged every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_jax.base.outputs import EngineStats

logger = logging.getLogger(__name__)

# Upper bounds of histogram buckets, as in vLLM: the first three in seconds, then tokens, then completions.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
COMPLETIONS = (1, 2, 5, 10, 20)

GAUGES = {
    "num_requests_running": ("num_running", "Sequences that run."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait."),
    "state_snapshots": ("num_snapshots", "Snapshots of recurrent states that prefix hits can restore."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV cache's pages in use, 1 is all."),
}
COUNTERS = {
    "prefix_cache_queries": ("num_prefix_queries", "Tokens of prompts looked up in the prefix cache."),
    "prefix_cache_hits": ("num_prefix_hits", "Tokens of prompts that the prefix cache had."),
    "state_snapshots_taken": ("num_snapshots_taken", "Snapshots of recurrent states that were taken."),
    "state_snapshot_hits": ("num_snapshot_hits", "Snapshots of recurrent states that were restored."),
    "state_snapshots_evicted": ("num_snapshots_evicted", "Snapshots of recurrent states that made room for others."),
    "num_preemptions": ("num_preemptions", "Times a sequence gave its pages back and was computed again."),
    "num_compiles": ("num_compiles", "Programs compiled while the engine served."),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("num_generation_tokens", "Tokens emitted."),
    "spec_decode_num_drafts": ("num_drafts", "Rounds of a sequence that verified drafts."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafts that were verified."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafts that were accepted."),
}


@dataclass(frozen=True)
class Finished:
    """A request that has ended; times in seconds, None for a stage that it did not reach.

    Attributes:
        reason: finish_reason of each completion; "abort" if the client left.
        num_prompt_tokens: tokens of all prompts.
        num_tokens: tokens emitted, over all completions.
        n: number of completions.
        max_tokens: tokens asked for; None for all that fit.
        queue: from arrival to the start of the prefill.
        first_token: from arrival to the first token.
        total: from arrival to the end.
    """

    reason: tuple[str, ...]
    num_prompt_tokens: int
    num_tokens: int
    n: int
    max_tokens: int | None
    queue: float | None
    first_token: float | None
    total: float


class Metrics:
    """All that /metrics shows.

    Args:
        stats: returns the engine's current statistics.
        prefix: of all names.
        model: the value of the label `model_name`.
    """

    def __init__(self, stats: Callable[[], EngineStats], *, prefix: str, model: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self.registry.register(_EngineCollector(stats, prefix, self._labels))
        self._finished = Counter(
            f"{prefix}request_success", "Completions that ended.", [*self._labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"{prefix}{name}", about, [*self._labels], buckets=buckets, registry=self.registry)
            return family.labels(**self._labels)

        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self._between_tokens = histogram("inter_token_latency_seconds", "Between tokens, mean of a chunk.", PER_TOKEN)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean of a request.", PER_TOKEN)
        self._total = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST)
        self._queue = histogram("request_queue_time_seconds", "Arrival to the start of the prefill.", REQUEST)
        self._prefill = histogram("request_prefill_time_seconds", "Start of the prefill to first token.", REQUEST)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", REQUEST)
        self._inference = histogram("request_inference_time_seconds", "Start of the prefill to last token.", REQUEST)
        self._prompt_tokens = histogram("request_prompt_tokens", "Of prompts.", TOKENS)
        self._tokens = histogram("request_generation_tokens", "Of answers.", TOKENS)
        self._n = histogram("request_params_n", "Completions asked for.", COMPLETIONS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens asked for.", TOKENS)

    def observe_chunk(self, seconds: float, num_tokens: int) -> None:
        """Count the tokens of a chunk that came `seconds` after the chunk before it."""
        if num_tokens:
            self._between_tokens.observe(seconds / num_tokens)

    def observe(self, request: Finished) -> None:
        """Count a request that has ended."""
        for reason in request.reason:
            self._finished.labels(**self._labels, finished_reason=reason).inc()
        self._total.observe(request.total)
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._tokens.observe(request.num_tokens)
        self._n.observe(request.n)
        if request.max_tokens is not None:
            self._max_tokens.observe(request.max_tokens)
        if request.queue is not None:
            self._queue.observe(request.queue)
            self._inference.observe(request.total - request.queue)
        if request.first_token is not None:
            decode = request.total - request.first_token
            self._first_token.observe(request.first_token)
            self._prefill.observe(request.first_token - (request.queue or 0))
            self._decode.observe(decode)
            if request.num_tokens > request.n:
                self._per_token.observe(decode * request.n / (request.num_tokens - request.n))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's statistics when Prometheus asks for them."""

    def __init__(self, stats: Callable[[], EngineStats], prefix: str, labels: dict[str, str]):
        self._stats, self._prefix, self._labels = stats, prefix, labels

    def collect(self) -> Iterable[Metric]:
        stats, names, values = self._stats(), list(self._labels), list(self._labels.values())
        for name, (attribute, about) in GAUGES.items():
            gauge = GaugeMetricFamily(self._prefix + name, about, labels=names)
            gauge.add_metric(values, getattr(stats, attribute))
            yield gauge
        for name, (attribute, about) in COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, about, labels=names)
            counter.add_metric(values, getattr(stats, attribute))
            yield counter
        name = f"{self._prefix}spec_decode_num_accepted_tokens_per_pos"
        by_position = CounterMetricFamily(name, "Accepted drafts by position.", labels=[*names, "position"])
        for position, accepted in enumerate(stats.num_accepted_tokens_per_pos):
            by_position.add_metric([*values, str(position)], accepted)
        yield by_position


def _counts(before: EngineStats, now: EngineStats) -> dict[str, int]:
    """The events of each counter between two states of an engine."""
    return {name: getattr(now, name) - getattr(before, name) for name, _ in COUNTERS.values()}


async def log_stats(stats: Callable[[], EngineStats], interval: float) -> None:
    """Log throughput and acceptance every `interval` seconds, if the engine did anything; runs until cancelled."""
    before, then = stats(), time.perf_counter()
    while True:
        await asyncio.sleep(interval)
        now, seconds = stats(), time.perf_counter() - then
        for line in stats_lines(before, now, seconds):
            logger.info("%s", line)
        before, then = now, then + seconds


def stats_lines(before: EngineStats, now: EngineStats, seconds: float) -> list[str]:
    """The lines that vLLM logs about the time between two states of an engine; none if it did nothing.

    Args:
        before: statistics at the beginning.
        now: statistics at the end.
        seconds: in between.
    """
    counts = _counts(before, now)
    if min(counts.values()) < 0:  # the engine was started again and counts from 0
        before = EngineStats()
        counts = _counts(before, now)
    if not (counts["num_prompt_tokens"] or counts["num_generation_tokens"] or now.num_running or now.num_waiting):
        return []
    hits = counts["num_prefix_hits"] / max(counts["num_prefix_queries"], 1)
    lines = [
        f"Avg prompt throughput: {counts['num_prompt_tokens'] / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {counts['num_generation_tokens'] / seconds:.1f} tokens/s, "
        f"Running: {now.num_running} reqs, Waiting: {now.num_waiting} reqs, "
        f"GPU KV cache usage: {now.kv_cache_usage:.1%}, Prefix cache hit rate: {hits:.1%}"
    ]
    drafts, drafted, accepted = (counts[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts:
        earlier = (*before.num_accepted_tokens_per_pos, *[0] * len(now.num_accepted_tokens_per_pos))
        rates = [(a - b) / drafts for a, b in zip(now.num_accepted_tokens_per_pos, earlier, strict=False)]
        lines.append(
            f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
            f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
            f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
            f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
            f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
            f"Avg Draft acceptance rate: {accepted / drafted:.1%}"
        )
    return lines
