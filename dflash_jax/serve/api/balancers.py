"""Endpoints that routers and load balancers in front of several servers ask: how busy one is, and what it runs."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from dflash_jax.serve.answers.server_state import ServerState


def balancers_router(state: ServerState) -> APIRouter:
    """The endpoints of routers, under vLLM's and SGLang's names."""
    router = APIRouter()

    @router.get("/load", summary="Requests that run or wait")
    async def load() -> dict[str, int]:
        return {"server_load": state.client.num_requests}

    async def loads() -> dict[str, Any]:
        rank = rank_load(state)
        totals = {
            "total_running_reqs": rank["num_running_reqs"],
            "total_waiting_reqs": rank["num_waiting_reqs"],
            "total_reqs": rank["num_total_reqs"],
            "total_tokens": rank["num_used_tokens"],
            "avg_token_usage": rank["token_usage"],
        }
        timestamp = datetime.now(UTC).isoformat()
        head = {"timestamp": timestamp, "version": version("dflash-jax"), "dp_rank_count": 1}
        return head | {"loads": [rank], "aggregate": totals}

    async def get_load() -> list[dict[str, int]]:
        rank = rank_load(state)
        names = {"num_reqs": "num_total_reqs", "num_waiting_reqs": "num_waiting_reqs", "num_tokens": "num_used_tokens"}
        return [{"dp_rank": 0} | {name: rank[known_as] for name, known_as in names.items()}]

    async def server_info() -> dict[str, Any]:
        ready = state.ready
        return {
            "model_path": state.args.model,
            "served_model_name": state.model,
            "speculative_draft_model_path": state.args.draft_model,
            "speculative_algorithm": "DFLASH" if ready.num_speculative_tokens else None,
            "speculative_num_draft_tokens": ready.num_speculative_tokens + 1 if ready.num_speculative_tokens else None,
            "max_model_len": ready.max_model_len,
            "max_total_num_tokens": ready.kv_tokens,
            "max_running_requests": ready.max_num_seqs,
            "page_size": state.args.engine.page_size,
            "tp_size": state.args.engine.tensor_parallel_size,
            "dp_size": 1,
            "version": version("dflash-jax"),
        }

    for endpoint, paths, summary in (
        (loads, ("/v1/loads", "/loads"), "How busy the engine is, as SGLang says it"),
        (get_load, ("/get_load",), "The same, as SGLang said it before"),
        (server_info, ("/server_info", "/get_server_info"), "What the engine was started with"),
    ):
        for path in paths:
            router.add_api_route(path, endpoint, methods=["GET"], response_model=None, summary=summary)
    return router


def rank_load(state: ServerState) -> dict[str, Any]:
    """The load of the engine, under SGLang's names for that of one data-parallel rank; this server has one.

    Raises:
        APIError: 503; no engine serves.
    """
    stats, ready = state.client.stats, state.ready
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": round(stats.kv_cache_usage * ready.kv_tokens),
        "max_total_num_tokens": ready.kv_tokens,
        "token_usage": stats.kv_cache_usage,
        "cache_hit_rate": stats.num_prefix_hits / max(stats.num_prefix_queries, 1),
        "max_running_requests": ready.max_num_seqs,
    }
