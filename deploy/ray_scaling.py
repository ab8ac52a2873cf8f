"""How many replicas there should be. Ray's controller runs this, which imports neither the server nor JAX."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingContext


class QueueAndCache:
    """An autoscaling policy: enough replicas for the requests that there are, and for the KV cache that they hold.

    Requests alone mislead: a few long contexts fill a cache that has slots left, and what finds no pages waits or is
    computed again. Ray applies its delays, factors and bounds to the answer.

    Args:
        kv_cache_usage: share of the KV cache in use at which replicas should run, in (0, 1]; the mean over replicas.
    """

    def __init__(self, kv_cache_usage: float = 0.7):
        self._kv_cache_usage = kv_cache_usage

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, and no state."""
        running = context.current_num_replicas
        if running == 0:
            return float(context.target_num_replicas), {}
        by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        usages = (context.aggregated_metrics or {}).get("kv_cache_usage", {})
        by_cache = running * fmean(usages.values()) / self._kv_cache_usage if usages else 0.0
        return max(by_requests, by_cache), {}
