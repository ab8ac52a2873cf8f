"""The server's side of the engine process: starts it, talks to it, and notices at once when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count, zip_longest
from types import TracebackType
from typing import Any

import msgspec

from dflash_jax.base.errors import EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.values import EngineStats
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

ENGINE_PROCESS = (sys.executable, "-m", "dflash_jax.serve.engine_link.engine_process")  # and its socket's descriptor
FIRST_DELAY, LAST_DELAY = 1.0, 60.0  # seconds before a restart, doubled while restarts fail
EXIT_SECONDS = 10.0  # that a process may take to end before it is killed
ERRORS = {kind.__name__: kind for kind in (RequestError, QueueFullError, EngineDeadError, RuntimeError)}
DIED, STOPPED = "the engine process has died; see its log.", "the server is shutting down."
logger = logging.getLogger(__name__)


class EngineClient:
    """An engine process and the requests it serves.

    Args:
        start: what the process loads.
        restarts: whether it is started again when it has died.

    Attributes:
        ready: what the engine said when it was ready; None while there is none to talk to.
        cause: why there is none, in words.
        failed_at_start: what kept the very first engine from starting, None if nothing has.
    """

    def __init__(self, start: Start, *, restarts: bool):
        self.ready: Ready | None = None
        self.cause = "the engine is starting; try again later."
        self.failed_at_start: Failed | None = None
        self._start, self._restarts = start, restarts
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)
        # The engine knows each request by an id that no other ever had: what it has said of one that was left must
        # not reach the next of the same name.
        self._engine_ids: dict[str, str] = {}
        self._streams: dict[str, tuple[EngineStream, str]] = {}  # and our id, by the engine's
        self._counter = count()
        self._calls: dict[int, asyncio.Future[str | None]] = {}
        self._num_calls, self._had_engine, self._is_stopped = 0, False, False
        self._earlier, self._latest = EngineStats(), EngineStats()  # of engines that have died, and of this one
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def stats(self) -> EngineStats:
        """The engine's last known state; numbers of events go on counting when it is started again."""
        return added(self._earlier, self._latest)

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    @property
    def num_requests(self) -> int:
        """Requests that have been sent and not ended."""
        return len(self._streams)

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Keep an engine running until cancelled, or until it has died for good.

        Args:
            on_change: called when an engine is ready, and when it has died.
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
        """One life of an engine; returns whether it ever was ready."""
        was_ready = False
        failure = Failed("EngineDeadError", DIED)
        try:
            reader = await self._spawn()
            while (message := await self._receive(reader)) is not None:
                match message:
                    case Outputs():
                        self._hand_out(message)
                    case Refused():
                        self._tell(message.request_id, ERRORS[message.kind](message.message))
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
        finally:
            self._mourn(STOPPED if self._is_stopped else failure.message)
            await self._reap()
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
        with theirs:
            # A session of its own: a Ctrl-C at the terminal is the server's to answer.
            self._process = await asyncio.create_subprocess_exec(
                *(*ENGINE_PROCESS, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._start)
        return reader

    async def _receive(self, reader: asyncio.StreamReader) -> FromEngine | None:
        try:
            header = await reader.readexactly(HEADER)
            return self._decoder.decode(await reader.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _mourn(self, cause: str) -> None:
        """The engine is gone: tell everybody who waits for it."""
        self.ready, self.cause = None, cause
        self._earlier = replace(self.stats, num_running=0, num_waiting=0, kv_cache_usage=0.0)
        self._latest = EngineStats()
        for engine_id in list(self._streams):
            self._tell(engine_id, EngineDeadError(cause))
        for number in list(self._calls):
            self._answer(number, cause)

    def _answer(self, number: int, error: str | None) -> None:
        future = self._calls.pop(number)
        if not future.done():  # it is if who called has gone
            future.set_result(error)

    async def _reap(self) -> None:
        """Hang up, and see the process end."""
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
        """End the process now, and start no other; everybody who waits for it is told."""
        self._is_stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def stream(self, requests: list[Add]) -> EngineStream:
        """Have the engine serve requests; to be used as an async context manager."""
        return EngineStream(self, requests)

    def abort(self, request_id: str) -> None:
        """End a request now; its stream ends with what it has. Others are ignored."""
        engine_id = self._engine_ids.get(request_id)
        if engine_id is not None:
            self._send(Abort(engine_id))

    async def call(self, name: CallName, argument: str = "") -> None:
        """Have the engine do something between two steps; returns when it is done.

        Raises:
            EngineDeadError: there is no engine.
            RequestError: the engine could not do it.
        """
        self._need_engine()
        self._num_calls += 1
        future = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self._send(Call(self._num_calls, name, argument))
        if (error := await future) is not None:
            raise RequestError(f"{name}: {error}")

    def _need_engine(self) -> None:
        if self.ready is None:
            raise EngineDeadError(self.cause)

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        body = self._encoder.encode(message)
        self._writer.write(len(body).to_bytes(HEADER, "big") + body)

    def _hand_out(self, outputs: Outputs) -> None:
        self._latest = outputs.stats
        for delta in outputs.deltas:
            self._tell(delta.request_id, delta)

    def _tell(self, engine_id: str, news: RequestDelta | Exception) -> None:
        if engine_id not in self._streams:  # its client has gone
            return
        stream, request_id = self._streams[engine_id]
        if isinstance(news, Exception) or news.finished:
            self._forget(request_id)
        if isinstance(news, RequestDelta):
            news.request_id = request_id
        stream.put(news)

    def open(self, stream: EngineStream, requests: list[Add]) -> None:
        """Send a stream's requests, all or none."""
        self._need_engine()
        for request in requests:
            if request.request_id in self._engine_ids:
                raise RequestError(f"request_id={request.request_id!r} is taken by a running request; give another.")
        for request in requests:
            engine_id = f"{request.request_id}/{next(self._counter)}"
            self._engine_ids[request.request_id] = engine_id
            self._streams[engine_id] = stream, request.request_id
            self._send(msgspec.structs.replace(request, request_id=engine_id))

    def _forget(self, request_id: str) -> None:
        """A request has ended."""
        del self._streams[self._engine_ids.pop(request_id)]

    def close(self, stream: EngineStream) -> None:
        """Nobody reads a stream any more: abort what runs of it."""
        for request_id in stream.unfinished:
            engine_id = self._engine_ids.get(request_id)
            if engine_id is not None and self._streams[engine_id][0] is stream:
                self.abort(request_id)
                self._forget(request_id)


def added(earlier: EngineStats, latest: EngineStats) -> EngineStats:
    """The sums of two engines' numbers."""

    def of_field(name: str) -> Any:
        first, second = getattr(earlier, name), getattr(latest, name)
        if isinstance(first, tuple):
            return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))
        return first + second

    return EngineStats(**{f.name: of_field(f.name) for f in fields(EngineStats)})


class EngineStream:
    """The deltas of some requests that one client waits for. Leaving it aborts those that have not ended.

    Attributes:
        unfinished: ids of the requests whose last delta has not been read.

    Raises, on entering:
        EngineDeadError: there is no engine.
        RequestError: an id is taken.
    """

    def __init__(self, client: EngineClient, requests: list[Add]):
        self.unfinished = {request.request_id for request in requests}
        self._client, self._requests = client, requests
        self._news: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()

    async def get(self, patience: float | None = None) -> RequestDelta | None:
        """The next delta; None if there is none for that many seconds.

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
        """From the client: what the engine said of a request."""
        self._news.put_nowait(news)

    async def __aenter__(self) -> EngineStream:
        self._client.open(self, self._requests)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close(self)
