"""The server's side of the engine process: starts it, exchanges messages with it, and notices at once when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from itertools import zip_longest
from types import TracebackType
from typing import Any

import msgspec

from dflash_jax.base.errors import EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.outputs import EngineStats
from dflash_jax.serve.engine_link.link_messages import (
    HEADER,
    Abort,
    Add,
    Call,
    CallName,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Reply,
    RequestDelta,
    Start,
    ToEngine,
)

# The command of the engine process; the descriptor of its socket follows as the last argument.
ENGINE_PROCESS = (sys.executable, "-m", "dflash_jax.serve.engine_link.engine_process")
FIRST_DELAY, LAST_DELAY = 1.0, 60.0  # seconds before a restart; doubled after each failed one, from first to last
EXIT_SECONDS = 10.0  # seconds that a process may take to end before it is killed
ERRORS = {kind.__name__: kind for kind in (RequestError, QueueFullError, EngineDeadError, RuntimeError)}
DIED, STOPPED = "the engine process has died; see its log.", "the server is shutting down."
UNREADABLE = "the engine process was ended, since a message of it could not be handled"
logger = logging.getLogger(__name__)


class EngineClient:
    """An engine process and the requests that it serves.

    Requests are known by the ids of their `Add`, which must differ from those of all earlier requests: then a late
    message about a request whose client has left cannot reach another client.

    Args:
        start: what the process loads.
        restarts: whether the process is started again after it has died.

    Attributes:
        ready: the engine's first message; None while no engine serves.
        cause: why no engine serves, as a sentence for clients.
        failed_at_start: what kept the very first engine from starting; None if nothing did.
    """

    def __init__(self, start: Start, *, restarts: bool):
        self.ready: Ready | None = None
        self.cause = "the engine is starting; try again later."
        self.failed_at_start: Failed | None = None
        self._start, self._restarts = start, restarts
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, EngineStream] = {}  # by the ids of their running requests
        self._num_unfinished: dict[str, int] = {}  # sequences of these requests
        self._calls: dict[int, asyncio.Future[str | None]] = {}
        self._num_calls, self._had_engine, self._is_stopped = 0, False, False
        self._earlier, self._latest = EngineStats(), EngineStats()  # sums of the dead engines; the running engine's
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()  # held by the stream that sends its requests
        self._process: asyncio.subprocess.Process | None = None

    @property
    def stats(self) -> EngineStats:
        """The engine's last known state. Counters of events go on across restarts."""
        return added(self._earlier, self._latest)

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def num_requests(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self._streams)

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Keep an engine running until this task is cancelled or the engine has died for good.

        Args:
            on_change: called when an engine is ready, and when one has died.
        """
        delay = FIRST_DELAY
        while True:
            was_ready = await self._run_once(on_change)
            if self.failed_at_start is not None or self._is_stopped or not self._restarts:
                return
            delay = FIRST_DELAY if was_ready else min(2 * delay, LAST_DELAY)
            logger.warning("the engine is started again in %.0f s", delay)
            await asyncio.sleep(delay)

    async def _run_once(self, on_change: Callable[[], None]) -> bool:
        """Start an engine and handle its messages until it dies; returns whether it ever was ready."""
        was_ready = False
        failure = Failed("EngineDeadError", DIED)
        try:
            reader = await self._spawn()
            while (message := await self._receive(reader)) is not None:
                match message:
                    case Outputs():
                        self._hand_out(message)
                    case Refused():
                        self._deliver(message.request_id, ERRORS.get(message.kind, RuntimeError)(message.message))
                    case Reply():
                        self._answer(message.number, message.error)
                    case Ready():
                        self.ready, was_ready = message, True
                        logger.info("the engine is ready (process %s)", self.pid)
                        on_change()
                    case Failed():
                        failure = message
                        break
        except asyncio.CancelledError:
            self._is_stopped = True
            raise
        except OSError as error:
            failure = Failed("EngineDeadError", f"the engine process cannot be started ({error}).")
        except Exception as error:  # a message of another version, or our own mistake: this task must not die unseen
            logger.exception("a message of the engine process cannot be handled; the process is ended")
            failure = Failed("EngineDeadError", f"{UNREADABLE} ({type(error).__name__}).")
        finally:
            self._fail_all(STOPPED if self._is_stopped else failure.message)
            await self._end_process()
        if self._is_stopped:
            return was_ready
        if not (was_ready or self._had_engine):
            self.failed_at_start = failure
        self._had_engine |= was_ready
        logger.error("%s", failure.message)
        on_change()
        return was_ready

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # The process gets a session of its own, so that Ctrl-C at the terminal reaches the server alone.
                self._process = await asyncio.create_subprocess_exec(
                    *(*ENGINE_PROCESS, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._send(self._start)
        return reader

    async def _receive(self, reader: asyncio.StreamReader) -> FromEngine | None:
        """The next message; None at the end of the connection."""
        try:
            header = await reader.readexactly(HEADER)
            return self._decoder.decode(await reader.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _fail_all(self, cause: str) -> None:
        """The engine is gone: end every stream and every call with this cause."""
        self.ready, self.cause = None, cause
        self._earlier = replace(self.stats, num_running=0, num_waiting=0, kv_cache_usage=0.0, num_snapshots=0)
        self._latest = EngineStats()
        for request_id in list(self._streams):
            self._deliver(request_id, EngineDeadError(cause))
        for number in list(self._calls):
            self._answer(number, cause)

    def _answer(self, number: int, error: str | None) -> None:
        future = self._calls.pop(number, None)
        if future is None:
            logger.warning("the engine has replied to call %s, which nobody waits for", number)
        elif not future.done():  # it is done if the caller was cancelled
            future.set_result(error)

    async def _end_process(self) -> None:
        """Close the connection, which ends the process; kill a process that stays."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def stop(self) -> None:
        """Kill the process and start no other; running requests end with an `EngineDeadError`."""
        self._is_stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def stream(self, requests: list[Add]) -> EngineStream:
        """A stream of the requests' deltas, to be entered as an async context manager, which sends the requests."""
        return EngineStream(self, requests)

    def abort(self, request_id: str) -> None:
        """End a running request now; its stream ends with what it has. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(Abort(request_id))

    async def call(self, name: CallName, argument: str = "") -> None:
        """Have the engine do something between two steps; returns after it was done.

        Raises:
            EngineDeadError: no engine serves.
            RequestError: the engine could not do it.
        """
        self._check_engine()
        self._num_calls += 1
        future = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self._send(Call(self._num_calls, name, argument))
        if (error := await future) is not None:
            raise RequestError(f"{name}: {error}")

    def _check_engine(self) -> Ready:
        if self.ready is None:
            raise EngineDeadError(self.cause)
        return self.ready

    def _send(self, message: ToEngine) -> None:
        body = self._encoder.encode(message)
        self._connected().write(len(body).to_bytes(HEADER, "big") + body)

    def _connected(self) -> asyncio.StreamWriter:
        assert self._writer is not None
        return self._writer

    def _hand_out(self, outputs: Outputs) -> None:
        self._latest = outputs.stats
        for delta in outputs.deltas:
            self._deliver(delta.request_id, delta)

    def _deliver(self, request_id: str, news: RequestDelta | Exception) -> None:
        """Put news of a request on its stream; without a stream its client has left."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if isinstance(news, Exception) or news.finished:
            self._forget(request_id)
        else:
            self._num_unfinished[request_id] -= sum(part.finish_reason is not None for part in news.completions)
        stream.put(news)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id], self._num_unfinished[request_id]

    async def open(self, stream: EngineStream, requests: list[Add]) -> None:
        """Send the requests of a stream.

        Waits until the engine process has read most of what was sent before, and lets in one stream at a time: prompts
        that the process has no time to read must not pile up in the socket's buffer. A full queue is told here, since
        the engine's thread reads what has come between two steps, which may take seconds.

        Raises:
            EngineDeadError: no engine serves.
            QueueFullError: too many sequences wait already.
            RequestError: the stream has more sequences than can ever wait.
        """
        self._check_engine()
        async with self._turn:
            with suppress(ConnectionError):  # of an engine that has died, as the check below tells
                await self._connected().drain()
            self._check_room(sum(request.params.n for request in requests))
            for request in requests:
                self._streams[request.request_id] = stream
                self._num_unfinished[request.request_id] = request.params.n
                self._send(request)

    def _check_room(self, count: int) -> None:
        """Check that the engine can take so many sequences, all or none."""
        ready = self._check_engine()
        if ready.max_num_queued_seqs is None:
            return
        most, present = ready.max_num_seqs + ready.max_num_queued_seqs, sum(self._num_unfinished.values())
        said = f"{ready.max_num_seqs} may run and {ready.max_num_queued_seqs} wait (--max-num-queued-reqs)"
        if count > most:
            raise RequestError(f"the request has {count} completions, and at most {said}; send it in parts.")
        if present + count > most:
            raise QueueFullError(
                f"the queue is full: {present} sequences run or wait, {count} more have come, and at most {said}; "
                "try again later."
            )

    def close(self, stream: EngineStream) -> None:
        """Abort the running requests of a stream that is read no more."""
        for request_id in stream.unfinished:
            if request_id in self._streams:
                self.abort(request_id)
                self._forget(request_id)


def added(earlier: EngineStats, latest: EngineStats) -> EngineStats:
    """The sums of two engines' statistics, field by field; tuples are added position by position."""

    def total(name: str) -> Any:
        first, second = getattr(earlier, name), getattr(latest, name)
        if isinstance(first, tuple):
            return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))
        return first + second

    return EngineStats(**{f.name: total(f.name) for f in fields(EngineStats)})


class EngineStream:
    """The deltas of requests that one client waits for. Leaving the context aborts requests that have not ended.

    Attributes:
        unfinished: ids of the requests whose last delta has not been read.

    Raises:
        EngineDeadError: on entering; no engine serves.
    """

    def __init__(self, client: EngineClient, requests: list[Add]):
        self.unfinished = {request.request_id for request in requests}
        self._client, self._requests = client, requests
        self._news: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()

    async def get(self, patience: float | None = None) -> RequestDelta | None:
        """The next delta; None if none comes for `patience` seconds.

        Raises:
            RequestError: a request cannot be served.
            QueueFullError: too many sequences wait already.
            EngineDeadError: the engine has died.
        """
        try:
            async with asyncio.timeout(patience):
                news = await self._news.get()
        except TimeoutError:
            return None
        if isinstance(news, Exception):
            raise news
        if news.finished:
            self.unfinished.discard(news.request_id)
        return news

    def put(self, news: RequestDelta | Exception) -> None:
        """Append what the engine said of a request, or the error that ended it; called by the client."""
        self._news.put_nowait(news)

    async def __aenter__(self) -> EngineStream:
        await self._client.open(self, self._requests)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close(self)
