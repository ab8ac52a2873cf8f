"""uvicorn's HTTP protocol with the bounds that it lacks: on the size of headers, and on the time a request may take."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dflash_jax.options.serve_args import Limits
from dflash_jax.serve.protocol import APIError, error_body


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """A protocol class of these limits, for uvicorn, which makes an instance of it for each connection."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})


class _AnyLength(int):
    """The length of a body that ends where the connection does, for uvicorn, which counts down what is left of it."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if the headers are too large, or if a request arrives too slowly.

    Attributes:
        limits: of the server; a subclass sets them.
    """

    limits: Limits
    _timer: asyncio.TimerHandle | None = None
    _closes = False  # whether to close after the answer to the request whose body is being read
    _is_in_body = False
    _num_bytes = 0  # received since the parser last completed something other than a header

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect("the headers have", self.limits.request_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._timer is None:  # a further request over the same connection
            self._expect("the headers have", self.limits.request_header_timeout)
        super().data_received(data)
        self._check_size(self._num_bytes)  # catches headers without an end, and trailers behind a body

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if not self._check_size(size):
            raise ValueError("headers too large")  # stops the parser
        self._num_bytes = 0
        self._is_in_body = True
        self._expect("the body has", self.limits.request_body_timeout)
        super().on_headers_complete()
        # The connection stays open until the body has come, even if the client has asked to close it: a client
        # that is still sending may lose an answer that is followed by a close.
        self._closes, self.cycle.keep_alive = not self.cycle.keep_alive, True
        if self.scope["http_version"] == "1.0":  # which has no chunks, and nginx before 1.29.7 speaks it unless told
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        self._is_in_body = False
        self._expect_nothing()
        if self._closes:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._hang_up(APIError(msg, 400))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: clients that offer HTTP/2 are answered in HTTP/1.1."""

    def _check_size(self, size: int) -> bool:
        if size <= self.limits.max_header_bytes:
            return True
        allowed = self.limits.max_header_bytes
        self._hang_up(APIError(f"the headers have more than the {allowed} bytes that are allowed; send less.", 431))
        return False

    def _expect(self, what: str, seconds: float) -> None:
        self._expect_nothing()
        self._timer = self.loop.call_later(seconds, self._too_late, what, seconds)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self, what: str, seconds: float) -> None:
        if self.pipeline or (self._is_answering and not self._is_in_body):
            self._expect(what, seconds)  # an earlier request is being answered, and this one may wait
        else:
            self._hang_up(APIError(f"{what} not come within {seconds:g} s; send faster.", 408))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _hang_up(self, error: APIError) -> None:
        """Close, and answer with the error unless an answer has begun."""
        if self.transport.is_closing():
            return
        if not self._is_answering or (self._is_in_body and not (self.cycle.response_started or self.pipeline)):
            body = msgspec.json.encode(error_body(error))
            headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + headers + body)
        self.transport.close()
