"""An engine in a thread of its own, which calls `Engine.step` as long as there is work."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_jax.base.errors import EngineDeadError, RequestError
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.request import Request
from dflash_jax.engine.host.sequence import Sequence

logger = logging.getLogger(__name__)
News = Callable[[Request | Exception], None]


@dataclass(frozen=True, eq=False)
class _Listener:
    request: Request
    tell: News


class EngineThread:
    """Owns an engine: others touch it only through commands, which run between two steps.

    Args:
        engine: the engine.
        after_news: called after the listeners of a step or of a command have been called.
    """

    def __init__(self, engine: Engine, after_news: Callable[[], None] = lambda: None):
        self.engine = engine
        self._after_news = after_news
        self._listeners: dict[str, _Listener] = {}  # by request id; only the engine's thread touches them
        self._owner: dict[int, _Listener] = {}  # by id() of each sequence
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # lets no command in after the inbox was emptied for the last time
        self._cause: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dflash-engine", daemon=True)
        self._thread.start()

    def add(self, request: Request, tell: News) -> None:
        """Run a request.

        Args:
            request: the request.
            tell: called in the engine's thread, with the request whenever it has gained tokens or has ended, or with
                the error that keeps it from running: its id is taken (RequestError), the queue is full
                (QueueFullError), or the engine has stopped (EngineDeadError).

        Raises:
            EngineDeadError: the engine had stopped before.
        """
        self._command(lambda: self._add(_Listener(request, tell)))

    def abort(self, request_id: str) -> None:
        """End a request now; its output keeps what was emitted. An id that does not run is ignored."""
        self._command(lambda: self._abort(self._listeners.get(request_id)))

    def abort_request(self, request: Request) -> None:
        """End this very request, which may not have been added, or whose id another request may have."""
        self._command(lambda: self._abort(self._listener_of(request)))

    def call(self, function: Callable[[Engine], Any]) -> None:
        """Call a function with the engine between two steps; an exception in it would end the engine."""
        self._command(lambda: function(self.engine))

    @property
    def is_dead(self) -> bool:
        """Whether the engine has stopped for good."""
        return self._is_closed or self._cause is not None

    @property
    def cause(self) -> str:
        """Why the engine has stopped, as a sentence for users."""
        return f"the engine has stopped ({self._cause or 'closed'}); start it again."

    def close(self) -> None:
        """End the thread; requests that run get an EngineDeadError."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until the engine has stopped."""
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self.is_dead:
                raise EngineDeadError(self.cause)
            self._inbox.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if self.engine.is_idle:
                    self._wake.wait()
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                if not self.engine.is_idle:
                    self._publish(self.engine.step())
                    self.engine.check_integrity()
        except Exception as error:
            logger.exception("the engine has failed")
            self._cause = error
        finally:
            with self._lock:
                self._is_closed = True
            while self._inbox:  # requests that came too late get the error as well
                self._inbox.popleft()()
            for listener in self._listeners.values():
                listener.tell(EngineDeadError(self.cause))
            self._after_news()

    def _add(self, listener: _Listener) -> None:
        request = listener.request
        try:
            if request.request_id in self._listeners:
                raise RequestError(f"request_id={request.request_id!r} is taken by a running request; give another.")
            if not self.is_dead:
                self.engine.add(request.sequences)
        except Exception as error:
            listener.tell(error)
            self._after_news()
            return
        self._listeners[request.request_id] = listener
        self._owner |= {id(sequence): listener for sequence in request.sequences}

    def _listener_of(self, request: Request) -> _Listener | None:
        return self._owner.get(id(request.sequences[0]))

    def _abort(self, listener: _Listener | None) -> None:
        if listener is not None and not self.is_dead:
            for sequence in listener.request.sequences:
                self.engine.abort(sequence)
            self._publish(listener.request.sequences)

    def _publish(self, changed: list[Sequence]) -> None:
        for listener in {self._owner[id(s)]: None for s in changed if id(s) in self._owner}:
            request = listener.request
            if request.finished:
                del self._listeners[request.request_id]
                for sequence in request.sequences:
                    del self._owner[id(sequence)]
            listener.tell(request)
        self._after_news()
