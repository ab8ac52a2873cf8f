"""Endpoints of operators: models, health, metrics, and what changes the engine while it runs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.http.documented import errors, plain
from dflash_jax.serve.http.same_origin import same_origin_guard
from dflash_jax.serve.http.streaming import json_response
from dflash_jax.serve.protocol import APIError


class AbortRequest(BaseModel):
    """Which requests to end: all of an id that a client chose (SGLang's `rid`) or an answer has, or all that run."""

    rid: str | None = None
    request_id: str | None = None
    abort_all: bool = False


def operations_router(state: ServerState) -> APIRouter:
    """The endpoints of operators."""
    router = APIRouter(responses=errors(statuses=()))
    _add_reports(router, state)
    _add_actions(router, state)
    return router


def _add_reports(router: APIRouter, state: ServerState) -> None:
    """Endpoints that only tell."""

    @router.get("/v1/models", summary="The served model, under each of its names")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(state, name) for name in state.args.served_model_name]}

    @router.get(
        "/v1/models/{name:path}", responses=errors(statuses=(404,)), summary="The served model under one of its names"
    )
    async def model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return _model(state, name)

    down: dict[int | str, dict[str, Any]] = {503: {"description": "The engine starts, or has died"}}

    @router.get("/health", response_class=Response, responses=down, summary="200 while the engine serves, else 503")
    async def health() -> Response:
        return Response(status_code=200) if state.ready else Response(status_code=503)

    @router.get("/ping", response_class=Response, responses=down, summary="The same, for SageMaker")
    async def ping() -> Response:
        return await health()

    @router.get("/metrics", response_class=Response, responses=plain("Metrics"), summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", summary="Of this server")
    async def get_version() -> dict[str, str]:
        return {"version": version("dflash-jax")}


def _add_actions(router: APIRouter, state: ServerState) -> None:
    """Endpoints that change what the engine does, and that pages of other sites may not call."""
    guarded = [Depends(same_origin_guard(state.args.allowed_origins))]

    @router.post(
        "/abort_request",
        response_model=None,
        responses=errors(),
        dependencies=guarded,
        summary="End a request; it answers with what it has",
    )
    async def abort_request(body: AbortRequest) -> Response:
        wanted = body.rid or body.request_id
        if wanted is None and not body.abort_all:
            raise APIError("neither rid nor abort_all is given: say which request to end.", param="rid")
        for abort_id, engine_ids in list(state.running.items()):
            if body.abort_all or abort_id == wanted:
                for engine_id in engine_ids:
                    state.client.abort(engine_id)
        return json_response({})

    @router.post(
        "/flush_cache",
        response_class=Response,
        responses=plain("Done"),
        dependencies=guarded,
        summary="Empty the prefix cache",
    )
    async def flush_cache() -> Response:
        await state.client.call("flush_cache")
        return Response("Cache flushed.\n", media_type="text/plain")

    # SGLang's clients, DFlash's own benchmark among them, ask with GET. It stays, since the guard keeps pages out.
    router.add_api_route(
        "/flush_cache",
        flush_cache,
        methods=["GET"],
        response_class=Response,
        responses=plain("Done"),
        dependencies=guarded,
        summary="The same, as SGLang's clients ask",
    )

    @router.post(
        "/start_profile",
        response_model=None,
        dependencies=guarded,
        summary="Begin a JAX profiler trace in --profile-dir",
    )
    async def start_profile() -> Response:
        folder = _profile_dir(state)
        await state.client.call("start_profile", str(folder))
        return json_response({"profile_dir": str(folder)})

    @router.post("/stop_profile", response_model=None, dependencies=guarded, summary="End the trace and write it")
    async def stop_profile() -> Response:
        folder = _profile_dir(state)
        await state.client.call("stop_profile")
        return json_response({"profile_dir": str(folder)})


def _profile_dir(state: ServerState) -> Path:
    if state.args.profile_dir is None:
        raise APIError("profiling is off; start the server with --profile-dir.", 400)
    return Path(state.args.profile_dir).absolute()


def _model(state: ServerState, name: str) -> dict[str, Any]:
    tokenizer, ready = state.renderer.tokenizer, state.client.ready
    has_template = bool(state.args.chat_template) or (tokenizer is not None and tokenizer.has_chat_template)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "dflash_jax",
        "root": state.args.model or name,
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
        "chat_template": has_template,
        "speculation": bool(ready and ready.num_speculative_tokens),
        "permission": [],
    }
