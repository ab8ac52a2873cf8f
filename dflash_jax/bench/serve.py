"""`bench serve`: load on an OpenAI-compatible server, and the latencies that its clients see.

Times are taken when bytes are read from the socket.

TTFT: to the first chunk that brings text, reasoning, a tool call, token ids or the end; a role alone does not count.
E2EL: to the last such chunk.
TPOT: (last - first such chunk) / (tokens - 1), of each request.
ICL: between such chunks. With speculation a chunk brings several tokens.
ITL: ICL divided among the tokens of its chunk, each token being one sample (see `RequestRecord.inter_token`).

Numbers of tokens are the server's usage; chunks are never counted as tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import uvloop

from dflash_jax.base.acceptance import Acceptance
from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.bench import report, workload
from dflash_jax.bench.acceptance import of_prometheus, of_requests
from dflash_jax.bench.client import CHAT, COMPLETIONS, complete, quote, request_body
from dflash_jax.bench.http import HttpClient, RequestFailedError
from dflash_jax.bench.options import LoadOptions, ServerOptions
from dflash_jax.bench.stats import RequestRecord, spread
from dflash_jax.options.flags import add_options, options_from
from dflash_jax.progress import phase
from dflash_jax.text.request_files import SampleRequest

HELP = "load an OpenAI-compatible server and measure latency, throughput and acceptance"
TICK = 0.01  # seconds between two measurements of the lag of the event loop
MOST_LAG = 10.0  # ms at p99; above it the generator, not the server, decides the figures
MOST_FILES = 65_536
Send = Callable[[int], Coroutine[Any, Any, None]]  # sends the request with this number, and waits for its end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. Names are vLLM's where it has them."""
    add_options(parser.add_argument_group("server"), ServerOptions)
    add_options(parser.add_argument_group("load").add_mutually_exclusive_group(), LoadOptions)
    workload.add_arguments(parser)
    parser.add_argument("--random-text", action="store_true", help="random words, not token ids; chats always are")
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; returns the exit status.

    Raises:
        ConfigError: an option is wrong.
        DFlashError: the server cannot be reached, or a warm-up failed.
    """
    path = report.output_path(args)
    _raise_file_limit()
    return report.finish(uvloop.run(measure(args)), path)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, as `report.build_result` makes it."""
    endpoint = _check(args)
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    client = HttpClient(args.base_url, headers)
    with phase("making the workload"):
        load = workload.load(args, as_text=endpoint.endswith("/chat/completions") or args.random_text)
    with phase(f"asking {args.base_url} for its models"):
        model = args.model or await _first_model(client)
    options = {"model": model, "temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {})
    generator = Generator(client, endpoint, options | (args.extra_body or {}), args.request_timeout)
    try:
        if load.warmups:
            await _warm_up(generator, load.warmups, args.max_concurrency)
        before = await _text(client, "/metrics")
        records, lag = await generator.run(load.requests, args)
        after = await _text(client, "/metrics")
        return report.build_result(
            args,
            records,
            model=model,
            server={"base_url": args.base_url, "endpoint": endpoint, "version": await _version(client)},
            acceptance=_acceptance(records, before, after),
            generator=lag,
            warnings=[*load.warnings, *_lag_warnings(lag)],
        )
    finally:
        client.close()


def _check(args: argparse.Namespace) -> str:
    """Check options; returns the path of the endpoint.

    Raises:
        ConfigError: an option is out of range.
    """
    options_from(args, ServerOptions)  # checks them
    options_from(args, LoadOptions)
    if (args.extra_body or {}).get("n", 1) != 1:
        raise ConfigError("--extra-body with n above 1 cannot be measured: the completions' times are not told apart.")
    path: str = {"chat": CHAT, "completions": COMPLETIONS}.get(args.endpoint, args.endpoint)
    if not path.startswith("/") or not path.endswith("/completions"):
        raise ConfigError(f"--endpoint {args.endpoint!r} must be chat, completions, or a path that ends with these.")
    return path


class Generator:
    """Sends workloads to one endpoint; all bodies are made before the clock starts.

    Args:
        client: of the server.
        endpoint: path.
        options: fields of every request.
        timeout_seconds: until a request has failed.
    """

    def __init__(self, client: HttpClient, endpoint: str, options: dict[str, Any], timeout_seconds: float):
        self._client, self._endpoint, self._options, self._timeout = client, endpoint, options, timeout_seconds

    async def run(
        self, requests: Sequence[SampleRequest], args: argparse.Namespace
    ) -> tuple[list[RequestRecord], dict[str, Any]]:
        """Run a workload; returns the records, whose times count from the start, and what the generator itself cost."""
        with report.counting("measuring", len(requests)) as advance:
            records: dict[int, RequestRecord] = {}
            send = self.sender(requests, records, advance)
            gc.collect()
            gc.freeze()  # collections then skip all imported modules; they would stall the event loop
            clock, cpu = time.perf_counter(), time.process_time()
            lags: list[float] = []
            watch = asyncio.create_task(_watch(lags))
            if args.max_concurrency is not None:
                await closed_loop(send, len(requests), args.max_concurrency)
            else:
                await open_loop(send, workload.arrival_times(len(requests), args.request_rate, args.seed))
            watch.cancel()
            await asyncio.wait([watch])
            cost = _cost(lags, time.perf_counter() - clock, time.process_time() - cpu)
            gc.unfreeze()
        return [_since(clock, records[number]) for number in range(len(requests))], cost

    def sender(
        self,
        requests: Sequence[SampleRequest],
        records: dict[int, RequestRecord],
        advance: Callable[[RequestRecord], None],
    ) -> Send:
        """A function that sends a request by its number and keeps its record."""
        bodies = [request_body(request, self._endpoint, self._options) for request in requests]

        async def send(number: int) -> None:
            records[number] = await complete(
                self._client,
                self._endpoint,
                bodies[number],
                requests[number].output_len,
                timeout_seconds=self._timeout,
            )
            advance(records[number])

        return send


async def closed_loop(send: Send, num: int, concurrency: int) -> None:
    """Keep a fixed number of requests running: a new one starts when one ends."""
    numbers = iter(range(num))

    async def work() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(work() for _ in range(min(concurrency, num))))


async def open_loop(send: Send, arrivals: Sequence[float]) -> None:
    """Start each request at its time, in seconds from now, whatever became of the others."""
    clock = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            wait = arrival - (time.perf_counter() - clock)
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(send(number))


async def _watch(lags: list[float]) -> None:
    """Measure by how many ms the event loop is late, again and again, until cancelled."""
    while True:
        due = time.perf_counter() + TICK
        try:
            await asyncio.sleep(TICK)
        finally:  # a stall at the end counts as well
            lags.append(1e3 * max(time.perf_counter() - due, 0.0))


def _cost(lags: list[float], seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Cost of the generator: lag of its event loop in ms, and its CPU time as a number of cores."""
    return {
        **spread("loop_lag_ms", lags),
        "max_loop_lag_ms": max(lags, default=None),
        "cpu_cores": cpu_seconds / seconds,
    }


def _lag_warnings(lag: dict[str, Any]) -> list[str]:
    late = lag["p99_loop_lag_ms"]
    if late is None or late <= MOST_LAG:
        return []
    return [
        f"the generator's own event loop was {late:.1f} ms late at p99 (limit {MOST_LAG:g} ms): the latencies are "
        "partly the generator's; lower the load, or give it a core of its own."
    ]


def _since(clock: float, record: RequestRecord) -> RequestRecord:
    """A record with times that count from the start of the run."""
    record.start, record.end = record.start - clock, record.end - clock
    record.arrivals = [(at - clock, tokens) for at, tokens in record.arrivals]
    return record


def _acceptance(records: Sequence[RequestRecord], before: str, after: str) -> Acceptance | None:
    """Acceptance as the requests reported it, which leaves out requests of others; else from the server's counters."""
    good = [r for r in records if r.error_kind is None]
    reported = of_requests(r.speculative_decoding for r in good if r.speculative_decoding is not None)
    return reported or of_prometheus(before, after)


async def _warm_up(generator: Generator, warmups: Sequence[SampleRequest], concurrency: int | None) -> None:
    """Run the warm-ups.

    Raises:
        DFlashError: one failed.
    """
    records: dict[int, RequestRecord] = {}
    with report.counting("warming up", len(warmups)) as advance:
        send = generator.sender(warmups, records, advance)
        await closed_loop(send, len(warmups), concurrency or len(warmups))
    for record in records.values():
        if record.error_kind is not None:
            raise DFlashError(f"a warm-up request failed: {record.error_kind}: {record.error}")


async def _first_model(client: HttpClient) -> str:
    """The first model that the server lists.

    Raises:
        DFlashError: it lists none.
    """
    try:
        status, body = await client.fetch("GET", "/v1/models")
        if status == 200:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        reason = f"HTTP {status}: {quote(body)}"
    except RequestFailedError as failure:
        reason = f"{failure.kind}: {failure}"
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise DFlashError(f"the models of the server cannot be listed ({reason}); check --base-url, or give --model.")


async def _text(client: HttpClient, path: str) -> str:
    """The body of a path; empty if the server does not answer it."""
    with suppress(RequestFailedError):
        status, body = await client.fetch("GET", path)
        if status == 200:
            return body.decode(errors="replace")
    return ""


async def _version(client: HttpClient) -> str | None:
    """The server's version, if it states one."""
    with suppress(msgspec.DecodeError, LookupError, TypeError):
        return str(msgspec.json.decode(await _text(client, "/version"))["version"])
    return None


def _raise_file_limit() -> None:
    """Raise the limit of open sockets as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
