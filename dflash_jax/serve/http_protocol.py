"""uvicorn's HTTP protocol with bounds on headers, which it has none of its own for."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dflash_jax.serve.args import Limits


def bounded_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """A protocol that hangs up on clients whose headers are too large, or take too long."""

    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _num_bytes = 0
        _in_headers = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._num_bytes += len(data)
                if self._timer is None:  # of a further request over the same connection
                    self._expect_headers()
            super().data_received(data)
            if self._in_headers and self._num_bytes > limits.max_header_bytes and not self.transport.is_closing():
                self._hang_up(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._in_headers, self._num_bytes = False, 0
            self._unset_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_headers = True
            super().on_message_complete()

        def _expect_headers(self) -> None:
            self._timer = self.loop.call_later(limits.request_header_timeout, self._hang_up, b"408 Request Timeout")

        def _unset_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _hang_up(self, status: bytes) -> None:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    return BoundedProtocol
