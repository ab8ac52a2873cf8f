"""The engine process: `python -m dflash_jax.serve.engine_link.engine_process FD`, with a socket to the server at FD.

Nothing that the server does delays a round: rendering, tokenising and parsing happen in the server's process. Here one
thread reads messages, one compiles grammars, one runs the engine and one writes messages. The process ends when its
server ends; the server goes on when this process ends.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import msgspec

from dflash_jax.base.errors import DFlashError, EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.logs import log_to_stderr
from dflash_jax.base.values import TokensPrompt
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.request import Request
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.engine.thread import EngineThread
from dflash_jax.frontend import Frontend, load
from dflash_jax.options import EngineArgs
from dflash_jax.serve.engine_link.link_messages import (
    HEADER,
    Abort,
    Add,
    Call,
    CompletionDelta,
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

logger = logging.getLogger(__name__)


class Connection:
    """Sends and receives messages over a socket; a thread of its own writes, so that a slow reader delays no round."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)
        self._outbox: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="dflash-writer", daemon=True)
        self._writer.start()

    def send(self, message: FromEngine) -> None:
        """Hand a message to the thread that writes."""
        self._outbox.put(message)

    def receive(self) -> ToEngine | None:
        """The next message; None at the end of the connection."""
        header = self._read(HEADER)
        body = self._read(int.from_bytes(header, "big")) if header else None
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        """Write the messages that were handed over, and close the socket."""
        self._outbox.put(None)
        self._writer.join(timeout=5)
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            body = self._encoder.encode(message)
            try:
                self._socket.sendall(len(body).to_bytes(HEADER, "big") + body)
            except OSError:  # the server is gone: `receive` returns None, which ends the process
                return


@dataclass(eq=False)
class Sent:
    """How much of a completion the server has.

    Attributes:
        text: characters.
        tokens: tokens.
        rounds: rounds of drafting and verifying.
        is_finished: whether it knows that the completion has ended.
    """

    text: int = 0
    tokens: int = 0
    rounds: int = 0
    is_finished: bool = False

    def delta(self, sequence: Sequence) -> CompletionDelta | None:
        """The completion's gain since the last call; None if there is none."""
        sequence.publish_text()
        output = sequence.output
        gained = len(output.token_ids) > self.tokens or len(output.text) > self.text
        if self.is_finished or not (gained or sequence.finished):
            return None
        delta = CompletionDelta(
            index=output.index,
            text=output.text[self.text :],
            token_ids=output.token_ids[self.tokens :],
            logprobs=None if output.logprobs is None else output.logprobs[self.tokens :],
            rounds=list(
                zip(sequence.draft_lengths[self.rounds :], sequence.acceptance_lengths[self.rounds :], strict=True)
            ),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
        )
        self.text, self.tokens, self.rounds = len(output.text), len(output.token_ids), len(sequence.draft_lengths)
        self.is_finished = sequence.finished
        return delta


@dataclass(eq=False)
class Progress:
    """How much of a request the server has.

    Attributes:
        streams: whether it wants deltas while the request runs.
        sent: of each completion; empty before the first delta.
        has_prompt_logprobs: whether they were sent.
    """

    streams: bool
    sent: list[Sent] = field(default_factory=list)
    has_prompt_logprobs: bool = False

    def delta(self, request: Request) -> RequestDelta | None:
        """The request's gain since the last call; None if there is nothing to send yet."""
        request.touch()
        if not (self.streams or request.finished):
            return None
        self.sent = self.sent or [Sent() for _ in request.sequences]
        deltas = [sent.delta(s) for sent, s in zip(self.sent, request.sequences, strict=True)]
        completions = [delta for delta in deltas if delta is not None]
        if not completions:
            return None
        first = request.sequences[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None and not self.has_prompt_logprobs:
            self.has_prompt_logprobs = True
            prompt_logprobs = [None, *first.prompt_logprobs]
        return RequestDelta(
            request_id=request.request_id,
            completions=completions,
            finished=request.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            queue_seconds=request.queue_time,
            first_token_seconds=request.first_token_time,
        )


def kind_of(error: Exception) -> str:
    """The name under which the server knows the class of an error; unforeseen errors are all "RuntimeError"."""
    kinds = (kind.__name__ for kind in (RequestError, QueueFullError, EngineDeadError) if isinstance(error, kind))
    return next(kinds, "RuntimeError")


def grammar_error(request: Request) -> RequestError | None:
    """The error of a completion whose grammar has failed, which is the client's; None if none has."""
    for sequence in request.sequences:
        if sequence.output.error is not None and sequence.constraint is not None and sequence.constraint.error:
            reason = sequence.constraint.error
            return RequestError(f"structured_outputs cannot be followed any further ({reason}); simplify them.")
    return None


class EngineServer:
    """Carries out the server's messages."""

    def __init__(self, connection: Connection, frontend: Frontend, engine: Engine):
        self._connection, self._frontend, self._engine = connection, frontend, engine
        self._deltas: list[RequestDelta] = []  # of the current step; used by the engine's thread alone
        self._thread = EngineThread(engine, self._flush)
        # A grammar may take seconds to compile; other requests and aborts must not wait for it.
        self._grammars = ThreadPoolExecutor(1, "dflash-grammars")
        self._compiling: dict[str, Add] = {}  # requests that wait for their grammar, by id
        self._lock = threading.Lock()  # of `_compiling`, so that an abort finds a request either there or in the engine

    def serve(self) -> None:
        """Handle messages until the server closes the connection, as it also does after a `Failed`."""
        while (message := self._connection.receive()) is not None:
            with suppress(EngineDeadError):  # `_flush` has sent `Failed`
                self._take(message)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Add() if message.params.structured_outputs is not None:
                self._compiling[message.request_id] = message
                self._grammars.submit(self._add_compiled, message)
            case Add():
                if (request := self._request(message)) is not None:
                    self._add(message, request)
            case Abort():
                self._abort(message.request_id)
            case Call():
                self._thread.call(partial(self._call, message))

    def _add_compiled(self, message: Add) -> None:
        """Compile a request's grammar, in the thread of grammars, and add the request unless it was aborted."""
        if message.request_id not in self._compiling:
            return
        request = self._request(message)
        with self._lock, suppress(EngineDeadError):
            if message.request_id in self._compiling:
                del self._compiling[message.request_id]
                if request is not None:
                    self._add(message, request)

    def _request(self, message: Add) -> Request | None:
        """The engine's form of a request; None if it was refused."""
        prompt: TokensPrompt = {"prompt_token_ids": message.prompt_token_ids}
        if message.cache_salt is not None:
            prompt["cache_salt"] = message.cache_salt
        try:
            return self._frontend.request(prompt, message.params, message.request_id)
        except Exception as error:
            if not isinstance(error, DFlashError):
                logger.exception("a request cannot be read")
            self._refuse(message.request_id, error)
            return None

    def _add(self, message: Add, request: Request) -> None:
        progress = Progress(message.streams)
        self._thread.add(request, lambda news: self._tell(message.request_id, progress, news))

    def _abort(self, request_id: str) -> None:
        with self._lock:
            message = self._compiling.pop(request_id, None)
            if message is None:
                self._thread.abort(request_id)
            else:
                self._thread.call(lambda _engine: self._tell_aborted(message))

    def _tell_aborted(self, message: Add) -> None:
        """Send the end of a request that was aborted while its grammar was being compiled."""
        completions = [CompletionDelta(i, "", [], None, [], "abort", None, None) for i in range(message.params.n)]
        self._deltas.append(RequestDelta(message.request_id, completions, True, None, 0, None, None))
        self._flush()

    def _tell(self, request_id: str, progress: Progress, news: Request | Exception) -> None:
        if isinstance(news, Exception):
            self._refuse(request_id, news)
        elif (error := grammar_error(news)) is not None:
            self._refuse(request_id, error)
            self._thread.abort(request_id)  # the request's other completions: nobody waits for them any more
        elif (delta := progress.delta(news)) is not None:
            self._deltas.append(delta)

    def _refuse(self, request_id: str, error: Exception) -> None:
        self._connection.send(Refused(request_id, kind_of(error), str(error)))

    def _flush(self) -> None:
        """Send the deltas of a step and the engine's statistics in one message, also if there are no deltas."""
        deltas, self._deltas = self._deltas, []
        self._connection.send(Outputs(deltas, self._engine.stats))
        if self._thread.is_dead:
            self._connection.send(Failed("EngineDeadError", self._thread.cause))

    def _call(self, call: Call, engine: Engine) -> None:
        try:
            match call.name:
                case "flush_cache":
                    engine.scheduler.flush_cache()
                case "start_profile":
                    jax.profiler.start_trace(call.argument)
                case "stop_profile":
                    jax.profiler.stop_trace()
        except Exception as error:  # a failure of the profiler must not stop the engine
            self._connection.send(Reply(call.number, f"{type(error).__name__}: {error}"))
        else:
            self._connection.send(Reply(call.number))


def end_with_server(connection: socket.socket) -> None:
    """End the process if its server ends while the engine loads and compiles, which may take minutes."""
    if not connection.recv(1, socket.MSG_PEEK):
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Serve the socket whose descriptor is the only argument; returns the exit status."""
    server_socket = socket.socket(fileno=int(arguments[0]))
    connection = Connection(server_socket)
    start: Any = connection.receive()
    if not isinstance(start, Start):
        return 1
    threading.Thread(target=end_with_server, args=[server_socket], daemon=True).start()
    log_to_stderr(start.log_level)
    try:
        frontend, engine = load(start.model, start.draft_model, EngineArgs.of(start.args))
    except Exception as error:
        if not isinstance(error, DFlashError):
            logger.exception("the engine could not start")
        connection.send(Failed(type(error).__name__, str(error)))
        connection.close()
        return 1
    # A full garbage collection of all that was imported and traced would stop every stream for 170 to 240 ms (2 cores).
    gc.collect()
    gc.freeze()
    server = EngineServer(connection, frontend, engine)
    config = engine.config
    connection.send(
        Ready(
            max_model_len=config.max_model_len,
            vocab_size=engine.spec.target.vocab_size,
            num_speculative_tokens=config.num_speculative_tokens,
            kv_tokens=engine.layout.num_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_queued_seqs=config.max_num_queued_seqs,
        )
    )
    server.serve()
    engine.runner.log_peak()
    os._exit(0)  # the server is gone, so no step, compilation or grammar is waited for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
