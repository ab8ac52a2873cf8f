"""The web application: routes, middleware, and errors as clients read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route

from dflash_jax.base.errors import DFlashError
from dflash_jax.serve.answers.metrics import log_stats
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.api.anthropic.messages import messages_router
from dflash_jax.serve.api.balancers import balancers_router
from dflash_jax.serve.api.openai.chat import chat_router
from dflash_jax.serve.api.openai.completions import completions_router
from dflash_jax.serve.api.openai.responses import responses_router
from dflash_jax.serve.api.openai.tokens import tokens_router
from dflash_jax.serve.api.operations import operations_router
from dflash_jax.serve.api.sglang.generate import generate_router
from dflash_jax.serve.http.errors import error_response, not_served
from dflash_jax.serve.http.middleware import BoundedBody, Guard, HeadAsGet, WithoutSlash
from dflash_jax.serve.http.page import page_router
from dflash_jax.serve.protocol import APIError, of_exception, validation_error

PROBES = ("/health", "/ping")

logger = logging.getLogger(__name__)
RETRY_AFTER = 1  # seconds after which a client may ask again; the engine may be back, or the queue shorter


def create_app(state: ServerState, on_change: Callable[[], None] = lambda: None) -> FastAPI:
    """The application of a server, which starts the engine and ends it.

    Args:
        state: the server's parts.
        on_change: called when the engine is ready, and when it has died.
    """
    args = state.args

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(state.client.run(on_change))]
        if not args.disable_log_stats:
            tasks.append(asyncio.create_task(log_stats(lambda: state.client.stats, args.log_stats_interval)))
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(
        title="dflash_jax",
        version=version("dflash-jax"),
        summary="An OpenAI-compatible server with DFlash speculative decoding",
        lifespan=lifespan,
        openapi_url="/openapi.json" if args.enable_docs else None,
        docs_url=None,  # FastAPI's pages would load scripts from other servers
        redoc_url=None,
        root_path=args.root_path,
        redirect_slashes=False,
    )
    routers = (
        chat_router(state),
        messages_router(state),
        completions_router(state),
        responses_router(state),
        generate_router(state),
        tokens_router(state),
        operations_router(state),
        balancers_router(state),
        page_router(),
    )
    for router in routers:
        app.include_router(router)
    _add_error_handlers(app, [route.path for router in routers for route in router.routes if isinstance(route, Route)])
    app.add_middleware(BoundedBody, limits=args.limits)
    app.add_middleware(HeadAsGet)
    app.add_middleware(WithoutSlash, root_path=args.root_path)
    if args.api_keys:
        app.add_middleware(Guard, keys=args.api_keys, root_path=args.root_path)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )
    return app


def _add_error_handlers(app: FastAPI, paths: Sequence[str]) -> None:
    async def explain(request: Request, error: Exception) -> Response:
        return _response(request, of_exception(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(request, validation_error(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = not_served(request.url.path, paths)
        elif isinstance(error.__cause__, UnicodeDecodeError):
            message = f"the body is not text in UTF-8 ({error.__cause__.reason}); send JSON in UTF-8, not compressed."
        answer = _response(request, APIError(message, error.status_code))
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(DFlashError, explain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, explain)  # starlette logs the traceback


def _response(request: Request, error: APIError) -> Response:
    """The answer that tells of an error; one line of the log tells the operator, whose users may see nothing of it.

    Probes ask every second while the engine starts, so that they would fill the log.
    """
    logger.log(
        logging.DEBUG if request.url.path in PROBES else logging.INFO,
        "%s %s: %d, %s",
        request.method,
        request.url.path,
        error.status,
        error.message,
    )
    headers = {"retry-after": str(RETRY_AFTER)} if error.status == 503 else None
    return error_response(request.scope, error, headers)
