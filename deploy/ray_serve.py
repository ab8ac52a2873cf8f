"""Replicas of the server on Ray Serve: `serve run deploy/ray_serve.yaml`; docs/scale.md says how.

A replica is the whole server: our ASGI application in an actor, and the engine process that it starts, which sees the
GPUs that Ray gave to the actor. Ray's own HTTP server takes the place of ours.
"""

import asyncio  # and no annotations from __future__: Ray reads those of `build` as they are
import logging

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp

from dflash_jax.base.errors import ConfigError, EngineDeadError
from dflash_jax.options.option import flag_of
from dflash_jax.options.serve_args import Limits, ServeArgs
from dflash_jax.options.serve_command import read_args
from dflash_jax.serve.app import create_app
from dflash_jax.serve.server import LOG_FORMAT, check_drafter, freeze_garbage, make_state

# Options of the HTTP server, which is Ray's here, and what to do instead of setting them.
RAYS = {
    "host": "set http_options.host",
    "port": "set http_options.port",
    "uds": "set http_options.host and http_options.port",
    "root_path": "set http_options.root_path",
    "ssl_certfile": "set http_options.ssl_certfile",
    "ssl_keyfile": "set http_options.ssl_keyfile",
    "shutdown_timeout": "set graceful_shutdown_timeout_s",
    "restart_engine": "leave it out: Ray replaces a replica whose engine has died",
    "max_header_bytes": "leave it out: Ray has a limit of its own",
    "request_header_timeout": "leave it out: Ray has a timeout of its own",
    "max_concurrent_requests": "set max_ongoing_requests and max_queued_requests",
}


class Replicas(BaseModel):
    """The `args` of the application in Ray's configuration file.

    Attributes:
        flags: those of `python -m dflash_jax.serve`; `--config=FILE` reads them from a file.
        gpus: GPUs of a replica; as many as `--tensor-parallel-size` says unless given, 0 serves on the CPU.
    """

    model_config = ConfigDict(extra="forbid")

    flags: list[str] = []
    gpus: int | None = Field(None, ge=0)


def build(replicas: Replicas) -> serve.Application:
    """Make the application that `import_path` names.

    Raises:
        ConfigError: a flag is unknown, impossible or without effect under Ray.
    """
    args = read_args(replicas.flags)
    refuse_without_effect(args)
    check_drafter(args)
    gpus = args.engine.tensor_parallel_size if replicas.gpus is None else replicas.gpus
    return Server.options(ray_actor_options={"num_gpus": gpus}).bind(args)


def refuse_without_effect(args: ServeArgs) -> None:
    """Refuse flags of the HTTP server.

    Raises:
        ConfigError: names the first, and what to do instead.
    """
    defaults = {**vars(ServeArgs()), **vars(Limits())}
    values = {**vars(args), **vars(args.limits)}
    for name, instead in RAYS.items():
        if values[name] != defaults[name]:
            raise ConfigError(f"{flag_of(name)} has no effect under Ray Serve; {instead}.")


@serve.deployment(name="Server")
@serve.ingress()
class Server:
    """One replica.

    Args:
        args: options of the server, those of the HTTP server unused.
    """

    def __init__(self, args: ServeArgs):
        logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT)
        self._state = make_state(args)
        freeze_garbage()
        self._changed = asyncio.Event()  # the engine is ready, or has died

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, whose lifespan starts the engine and ends it."""
        return create_app(self._state, self._changed.set)

    async def check_health(self) -> None:
        """Wait for the engine at the start, so that Ray sends no request before; later, tell at once whether it serves.

        Raises:
            EngineDeadError: no engine serves; Ray replaces the replica.
        """
        await self._changed.wait()
        if self._state.client.ready is None:
            raise EngineDeadError(self._state.client.cause)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `QueueAndCache` reads beside Ray's own count of requests."""
        stats = self._state.client.stats
        return {"kv_cache_usage": stats.kv_cache_usage, "num_waiting": float(stats.num_waiting)}
