"""`python -m dflash_jax.serve`: loads tokenizer and template, listens, and serves until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

import uvicorn

from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.base.logs import log_to_stderr
from dflash_jax.base.values import SamplingParams
from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.option import flag_of
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.options.serve_command import parse_args
from dflash_jax.serve.answers.metrics import Metrics
from dflash_jax.serve.answers.server_state import ServerState, most_tokens, sampling_defaults
from dflash_jax.serve.app import create_app
from dflash_jax.serve.engine_link.client import EngineClient
from dflash_jax.serve.engine_link.link_messages import Start
from dflash_jax.serve.http.http_protocol import bounded_protocol
from dflash_jax.spec import read_json
from dflash_jax.text.parsing import parsers_of, takes_tools
from dflash_jax.text.renderer import GENERATION_FIELDS, Renderer
from dflash_jax.weights.folder import alias_drafter, resolve_folders

GOODBYE_SECONDS = 1.0  # seconds that clients have to read how their requests ended
logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server with a shutdown that tells clients how their requests ended.

    A first SIGINT or SIGTERM lets running requests end; when the time is up, or at a second signal, they are aborted.

    Args:
        config: without uvicorn's own timeout of a graceful shutdown, which cancels requests without an answer.
        client: of the engine.
        timeout: seconds that running requests have to end.
    """

    def __init__(self, config: uvicorn.Config, client: EngineClient, timeout: float):
        super().__init__(config)
        self._client, self._timeout = client, timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let requests end after the first signal; leave them no more time after the second."""
        if self.should_exit:
            self._timeout = 0.0
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait until all requests have ended."""
        hurry = asyncio.create_task(self._hurry())
        await super().shutdown(sockets)
        hurry.cancel()

    async def _hurry(self) -> None:
        """When the time is up, abort all requests, and close the connections of clients that do not read the answer."""
        start = time.monotonic()
        while time.monotonic() < start + self._timeout:
            await asyncio.sleep(0.05)
        self._client.stop()
        await asyncio.sleep(GOODBYE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal stops the server; returns the exit status, 2 if it cannot start."""
    args = parse_args(arguments)
    log_to_stderr(args.log_level)
    try:
        check_drafter(args)
        listener = listen(args)
        allow_open_files()
        state = make_state(args)
        server = make_server(state, listener)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    freeze_garbage()
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


def freeze_garbage() -> None:
    """Let later collections skip all that was imported, which would stall the event loop."""
    gc.collect()
    gc.freeze()


def allow_open_files() -> None:
    """Raise the limit of open files, which bounds the connections, from the usual 1024 to what the system allows."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def with_parsers(args: ServeArgs, template: str | None) -> ServeArgs:
    """The options with the parsers of answers, which the chat template chooses where no flag does."""
    chosen = parsers_of(template)

    def parser(flag: str | None, by_template: str | None) -> str | None:
        return None if flag == "none" else by_template if flag is None else flag

    reasoning, tools = parser(args.reasoning_parser, chosen.reasoning), parser(args.tool_call_parser, chosen.tools)
    logger.info(
        "Parsers of answers: %s for reasoning, %s for tool calls; --reasoning-parser and --tool-call-parser choose "
        "others.",
        reasoning or "none",
        tools or "none",
    )
    if tools is not None and not takes_tools(template):
        logger.warning("The chat template takes no tools: requests may send some, and the model will not see them.")
    return replace(args, reasoning_parser=reasoning, tool_call_parser=tools, enable_auto_tool_choice=tools is not None)


def make_state(args: ServeArgs) -> ServerState:
    """The server's parts, before the engine is started.

    Raises:
        CheckpointError: the model or its tokenizer cannot be read.
        ConfigError: the sampling defaults are outside their ranges.
    """
    folder, draft_folder = resolve_folders(args.model, args.draft_model)
    renderer = Renderer(folder)
    args = with_parsers(args, renderer.chat_template(args.chat_template))
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
    return ServerState(args, renderer, client, metrics, defaults, most_tokens(defaults, args))


def listen(args: ServeArgs) -> socket.socket:
    """A listening socket; it comes before all that takes time, so that a port in use is reported at once.

    Raises:
        ConfigError: the address cannot be listened at.
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
    """Remove the socket that a killed server left behind; one at which a server listens stays."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def url_of(args: ServeArgs, listener: socket.socket) -> str:
    """The server's URL, with the port that the system chose if `--port` is 0."""
    if args.uds is not None:
        return f"unix:{args.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if args.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{args.root_path}"


def make_server(state: ServerState, listener: socket.socket) -> Server:
    """The server, ready to run.

    Raises:
        ConfigError: the files of TLS cannot be used.
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
    except OSError as error:  # among them ssl.SSLError
        files = ", ".join(f for f in (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs) if f is not None)
        raise ConfigError(
            f"TLS cannot be served with {files} ({error}); give PEM files that belong together."
        ) from error
    server = Server(config, state.client, args.shutdown_timeout)
    logger.info("listening at %s; the engine is starting", url)
    return server
