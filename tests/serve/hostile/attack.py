"""Tools of hostile clients: raw sockets, and requests written by hand."""

import socket
import time
from contextlib import contextmanager

KEYS = ("first-key", "second-key")
PATIENCE = 60  # seconds that any answer may take on a loaded machine
NORMAL = {"prompt": "You may reproduce and distribute copies of the", "max_tokens": 96, "temperature": 0}
HELLO = {"prompt": "a", "max_tokens": 1}


@contextmanager
def connected(server):
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        yield connection


def answers(connection) -> bytes:
    """Read all that comes until the other end closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    """Status of the first answer; 0 if the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def raw(server, data: bytes) -> bytes:
    """Send data, and read all that comes until the server closes the connection."""
    with connected(server) as connection:
        connection.sendall(data)
        return answers(connection)


def is_hung_up_on(connection, data: bytes, *, times: int, pause: float = 0) -> bool:
    """Whether the server closes the connection while data is sent over and over."""
    try:
        for _ in range(times):
            connection.sendall(data)
            time.sleep(pause)
    except ConnectionError:
        return True
    return False


def request(body: bytes = b"", *, path: bytes = b"/v1/completions", method: bytes = b"POST", headers=(), key=KEYS[0]):
    lines = [
        method + b" " + path + b" HTTP/1.1",
        b"host: x",
        b"connection: close",
        b"content-type: application/json",
        b"authorization: Bearer " + key.encode(),
        *headers,
    ]
    if body:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def refused(status: int) -> bool:
    return status == 0 or 400 <= status < 500
