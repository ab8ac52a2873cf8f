"""HTTP that is wrong, slow or endless, and bytes that are not HTTP; a stream beside them goes on unharmed."""

import json
import threading

import pytest

from tests.serve.hostile.attack import (
    HELLO,
    NORMAL,
    PATIENCE,
    answers,
    connected,
    is_hung_up_on,
    raw,
    refused,
    request,
    status_of,
)
from tests.serve.live import NAME

MEGABYTES_30 = 30 * 1024**2


def test_a_body_of_30_megabytes(server):
    answer = raw(server, request(b"x" * MEGABYTES_30))
    assert status_of(answer) == 413


def test_chunks_of_30_megabytes(server):
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    chunks = chunk * (MEGABYTES_30 // 0x100000) + b"0\r\n\r\n"
    assert status_of(raw(server, request(headers=[b"transfer-encoding: chunked"]) + chunks)) == 413


def test_chunks_without_end(server):
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with connected(server) as connection:
        connection.sendall(request(headers=[b"transfer-encoding: chunked"]))
        assert is_hung_up_on(connection, chunk, times=10**9)


@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_trailers_without_end(server, method):
    path = b"/v1/completions" if method == b"POST" else b"/v1/models"
    with connected(server) as connection:
        connection.sendall(request(method=method, path=path, headers=[b"transfer-encoding: chunked"]) + b"0\r\n")
        assert is_hung_up_on(connection, b"x: " + b"y" * 10_000 + b"\r\n", times=1000, pause=0.001)


def test_a_body_that_never_comes(server):
    answer = raw(server, request(headers=[b"content-length: 100"]))
    assert status_of(answer) == 408
    assert b"the body has not come within 3 s" in answer


def drip(server, start: bytes, letter: bytes) -> bytes:
    """Send a byte every now and then until the server has had enough; returns what it says."""
    with connected(server) as connection:
        connection.sendall(start)
        try:
            for _ in range(PATIENCE * 5):
                connection.sendall(letter)
                connection.settimeout(0.2)
                try:
                    if said := connection.recv(65536):
                        return said
                    return b""
                except TimeoutError:
                    pass
        except ConnectionError:
            return b""
    raise AssertionError("the server has waited forever")


def test_a_slow_body(server):
    assert status_of(drip(server, request(headers=[b"content-length: 100000"]), b" ")) == 408


def test_a_slow_body_of_a_get(server):
    """It is answered before its body has come, and its connection is closed if the body does not come."""
    with connected(server) as connection:
        connection.sendall(request(method=b"GET", path=b"/v1/models").replace(b"close", b"keep-alive")[:-2])
        connection.sendall(b"content-length: 100000\r\n\r\n")
        assert status_of(connection.recv(65536)) == 200
        assert is_hung_up_on(connection, b"x", times=5 * PATIENCE, pause=0.2)


def test_slow_headers_on_many_connections(server):
    results = []
    loris = [
        threading.Thread(target=lambda: results.append(drip(server, b"GET / HTTP/1.1\r\nx: ", b"a"))) for _ in range(16)
    ]
    for thread in loris:
        thread.start()
    assert server.is_healthy()
    for thread in loris:
        thread.join(PATIENCE)
    assert [status_of(result) for result in results] == [408] * 16


def test_silence(server):
    with connected(server) as connection:
        assert status_of(answers(connection)) == 408


@pytest.mark.parametrize(
    "headers",
    [
        [b"x: " + b"y" * 100_000],
        [b"x%d: y" % i for i in range(10_000)],
        [b"x" * 70_000 + b": y"],
        [b"authorization: Bearer " + b"k" * 70_000],
    ],
)
def test_a_flood_of_headers(server, headers):
    assert status_of(raw(server, request(b"{}", headers=headers))) in (431, 0)


def test_headers_without_end(server):
    with connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert is_hung_up_on(connection, b"x: " + b"y" * 10_000 + b"\r\n", times=1000, pause=0.001)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\xcbT / HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nbad header: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        request(headers=[b"transfer-encoding: chunked"]) + b"zz\r\n{}\r\n0\r\n\r\n",
        request(b"{}", headers=[b"content-encoding: gzip"]),
    ],
)
def test_what_is_no_request(server, data):
    assert refused(status_of(raw(server, data)))


@pytest.mark.parametrize(
    "headers",
    [
        [b"content-length: 6", b"transfer-encoding: chunked"],
        [b"transfer-encoding: chunked", b"content-length: 6"],
        [b"transfer-encoding: xchunked"],
        [b"transfer-encoding: chunked, identity"],
        [b"transfer-encoding : chunked"],
        [b"transfer-encoding: chunked", b"transfer-encoding: identity"],
    ],
)
def test_a_smuggled_request_is_not_served(server, headers):
    inner = request(method=b"GET", path=b"/v1/models")
    answer = raw(server, request(headers=headers) + b"0\r\n\r\n" + inner)
    assert refused(status_of(answer))
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert NAME.encode() not in answer


def test_pipelined_requests_are_answered_in_order(server):
    one = request(method=b"GET", path=b"/version").replace(b"close", b"keep-alive")
    two = request(json.dumps(NORMAL).encode()).replace(b"close", b"keep-alive")
    answer = raw(server, one + two + one * 50 + request(b"{", key="wrong"))
    assert answer.count(b"HTTP/1.1 200 OK") == 52
    assert answer.count(b"HTTP/1.1 401 ") == 1
    assert json.dumps(server.expected)[1:-1].encode() in answer


def test_a_byte_behind_a_request_does_not_end_its_answer(server):
    """Old clients send an empty line after a body; the time for headers passes while the answer is streamed."""
    slow = {"prompt": ["a"] * 8, "max_tokens": 1000, "ignore_eos": True, "speculation": False, "stream": True}
    body = json.dumps(NORMAL | slow).encode()
    with connected(server) as connection:
        connection.sendall(request(body))
        first = connection.recv(1)
        connection.sendall(b"\r\n")
        answer = first + answers(connection)
    assert status_of(answer) == 200
    assert b"408" not in answer.partition(b"\r\n\r\n")[0]
    assert b"data: [DONE]" in answer


def test_http_1_0_and_offers_to_upgrade(server):
    answer = raw(server, request(json.dumps(NORMAL).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status_of(answer) == 200
    for upgrade in (b"h2c", b"websocket"):
        headers = [b"connection: upgrade", b"upgrade: " + upgrade]
        data = request(method=b"GET", path=b"/v1/models", headers=headers).replace(b"connection: close\r\n", b"")
        with connected(server) as connection:
            connection.sendall(data)
            assert status_of(connection.recv(65536)) == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"GET", b"/v1/completions", 405),
        (b"DELETE", b"/v1/models", 405),
        (b"PUT", b"/v1/chat/completions", 405),
        (b"TRACE", b"/", 405),
        (b"PROPFIND", b"/v1/models", 405),
        (b"GET", b"/v1//models", 404),
        (b"GET", b"//v1/models", 404),
        (b"GET", b"/nothing", 404),
        (b"GET", b"/v1/models/../../etc/passwd", 404),
        (b"GET", b"/../../../../etc/passwd", 404),
        (b"GET", b"/%2e%2e/%2e%2e/etc/passwd", 404),
        (b"GET", b"/..%2f..%2fetc%2fpasswd", 404),
        (b"GET", b"/page.js%00.html", 404),
        (b"GET", b"/%00", 404),
        (b"GET", b"/v1/models/%ff%fe%00", 404),
        (b"GET", b"/v1/models/" + b"a" * 60_000, 404),
        (b"GET", b"/" + b"a/" * 30_000, 404),
        (b"GET", b"/" + b"a" * 100_000, 431),
    ],
)
def test_wrong_methods_and_paths(server, method, path, status):
    answer = raw(server, request(method=method, path=path))
    assert status_of(answer) == status
    assert b"root:" not in answer
    assert len(answer) < 2000


def test_clients_that_hang_up(server):
    """Clients may leave at any point of a request, and nothing is left of them."""
    complete = request(json.dumps(NORMAL | {"max_tokens": 2000, "ignore_eos": True, "stream": True}).encode())
    for end in (1, 20, len(complete) - 40, len(complete)):
        for _ in range(5):
            with connected(server) as connection:
                connection.sendall(complete[:end])


@pytest.mark.parametrize("kind", [b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"])
def test_chunks_of_what_is_no_json(server, kind):
    """A body without a declared size has to be JSON too."""
    body = json.dumps(HELLO).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = request(headers=[b"transfer-encoding: chunked"])
    assert status_of(raw(server, head + chunks)) == 200
    answer = raw(server, head.replace(b"content-type: application/json", b"content-type: " + kind) + chunks)
    assert status_of(answer) == 415
    assert kind in answer
