"""`python -m dflash_jax.serve`: loads the text side, listens, and runs until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import uvicorn

from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.base.values import SamplingParams
from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.option import flag_of
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.options.serve_command import parse_args
from dflash_jax.serve.answers.metrics import Metrics
from dflash_jax.serve.answers.server_state import ServerState, sampling_defaults
from dflash_jax.serve.app import create_app
from dflash_jax.serve.engine_link.client import EngineClient
from dflash_jax.serve.engine_link.link_messages import Start
from dflash_jax.serve.http.http_protocol import bounded_protocol
from dflash_jax.spec import read_json
from dflash_jax.text.renderer import GENERATION_FIELDS, Renderer
from dflash_jax.weights.folder import alias_drafter, resolve_folders

LAST_WORDS = 1.0  # seconds that clients have to read how their requests have ended
LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Drains at a first signal, SIGINT or SIGTERM; what runs is ended when time is up, or at a second signal.

    Args:
        config: without a timeout for the graceful shutdown: uvicorn's would cancel requests, which nobody is told.
        timeout: seconds that running requests have to end.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient, timeout: float):
        super().__init__(config)
        self._client, self._timeout = client, timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain when the process gets a first signal; at a second one, end what still runs."""
        if self.should_exit:
            self._timeout = 0.0
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        hurry = asyncio.create_task(self._hurry())
        await super().shutdown(sockets)
        hurry.cancel()

    async def _hurry(self) -> None:
        """When time is up, have every request told so, and a little later hang up on who does not read it."""
        start = time.monotonic()
        while time.monotonic() < start + self._timeout:
            await asyncio.sleep(0.05)
        self._client.stop()
        await asyncio.sleep(LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def main(arguments: list[str] | None = None) -> int:
    """Serve; returns the exit status."""
    args = parse_args(arguments)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT)
    try:
        check_drafter(args)
        listener = listen(args)
        allow_open_files()
        state = make_state(args)
        server = make_server(state, listener)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gc.collect()
    gc.freeze()  # else collections would look at all that was imported, and stall the event loop meanwhile
    try:
        server.run(sockets=[listener])
    finally:
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)
    failure = state.client.failed_at_start
    if failure is not None:
        print(f"error: {failure.message}", file=sys.stderr)
        return 2
    return 0


def check_drafter(args: ServeArgs) -> None:
    """Refuse options of speculation for a model without a drafter, before the model may have to be downloaded.

    Raises:
        ConfigError: such an option is given, and there is no drafter.
    """
    if args.model is None or args.draft_model is not None or alias_drafter(args.model) is not None:
        return
    values = {**vars(args), **vars(args.engine)}
    defaults = {**vars(ServeArgs()), **vars(EngineArgs())}
    for name in ("spec_method", "num_speculative_tokens", "draft_kv_cache_dtype", "draft_quantization"):
        if values[name] != defaults[name]:
            raise ConfigError(f"{flag_of(name)} needs a drafter; give --draft-model, or leave it out.")


def allow_open_files() -> None:
    """Let the process have as many connections as the system lets it: the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_state(args: ServeArgs) -> ServerState:
    """The server's parts; the engine has not been started.

    Raises:
        CheckpointError: the model, or its tokenizer, cannot be read.
        ConfigError: the sampling defaults are not allowed.
    """
    folder, draft_folder = resolve_folders(args.model, args.draft_model)
    renderer = Renderer(folder)
    generation_config = renderer.generation_config
    if args.generation_config not in ("auto", "vllm"):
        generation_config = read_json(Path(args.generation_config) / "generation_config.json")
    defaults = sampling_defaults(generation_config, args)
    try:
        SamplingParams(**{name: defaults[name] for name in GENERATION_FIELDS if name in defaults})
    except DFlashError as error:
        raise ConfigError(f"the sampling defaults of the generation config are not allowed: {error}") from error
    start = Start(
        model=str(folder),
        draft_model=None if draft_folder is None else str(draft_folder),
        args=asdict(args.engine),
        log_level=args.log_level,
    )
    client = EngineClient(start, restarts=args.restart_engine)
    metrics = Metrics(lambda: client.stats, prefix=args.metrics_prefix, model=args.served_model_name[0])
    return ServerState(args, renderer, client, metrics, defaults)


def listen(args: ServeArgs) -> socket.socket:
    """A socket that listens, before anything that takes time: a port in use is told at once.

    Raises:
        ConfigError: nobody can listen there.
    """
    try:
        if args.uds is not None:
            _remove_dead_socket(Path(args.uds))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(args.uds)
        else:
            family, _, _, _, address = socket.getaddrinfo(
                args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        place = args.uds or f"{args.host}:{args.port}"
        raise ConfigError(f"cannot listen at {place} ({error}); choose another --host, --port or --uds.") from error
    return listener


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a server that has not cleaned up; one that somebody listens at stays."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def url_of(args: ServeArgs, listener: socket.socket) -> str:
    """Where the server is found."""
    if args.uds is not None:
        return f"unix:{args.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if args.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{args.root_path}"


def make_server(state: ServerState, listener: socket.socket) -> Server:
    """The server, not yet running.

    Raises:
        ConfigError: a file of TLS cannot be used.
    """
    args = state.args
    url = url_of(args, listener)

    def on_change() -> None:
        if state.client.failed_at_start is not None:
            server.should_exit = True
        elif state.client.ready is not None:
            logger.info("serving %s at %s", state.model, url)

    config = uvicorn.Config(
        create_app(state, on_change),
        http=bounded_protocol(args.limits),
        loop="uvloop",
        ws="none",
        log_config=None,
        log_level=args.log_level,
        access_log=args.enable_log_requests,
        server_header=False,
        limit_concurrency=args.limits.max_concurrent_requests,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(f for f in (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs) if f is not None)
        raise ConfigError(
            f"TLS cannot be served with {files} ({error}); give PEM files that belong together."
        ) from error
    server = Server(config, state.client, args.shutdown_timeout)
    logger.info("listening at %s; the engine is starting", url)
    return server
