"""What hostile clients send, side by side with a stream that must go on unharmed: 4xx in bounded time, and no trace."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.serve.live import resident_megabytes, serving

KEYS = ("first-key", "second-key")
PATIENCE = 60  # seconds that any answer may take on a loaded machine
GROWTH = 250  # megabytes that a process may hold more after all of this,
PROGRAM = 25  # not counting those of each step that is compiled while it serves
FLAGS = (
    "--max-num-seqs=4",
    "--request-header-timeout=2",
    "--request-body-timeout=3",
    *(f"--api-key={key}" for key in KEYS),
)
NORMAL = {"prompt": "You may reproduce and distribute copies of the", "max_tokens": 96, "temperature": 0}
HELLO = {"prompt": "a", "max_tokens": 1}
MEGABYTES_30 = 30 * 1024**2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with keys and little patience; in the end it is idle, small, and its log has no traceback."""
    with serving(tmp_path_factory.mktemp("hostile"), *FLAGS) as live:
        assert live.post("/v1/completions", NORMAL | {"structured_outputs": {"regex": "[a-z]+"}}, KEYS[0])[0] == 200
        live.expected = live.post("/v1/completions", NORMAL, KEYS[0])[1]["choices"][0]["text"]
        pids = live.process.pid, live.engine_pid
        before = [resident_megabytes(pid) for pid in pids]
        num_compiles = live.metric("num_compiles_total")
        yield live
        live.wait_until(live.is_idle)
        assert live.is_healthy()
        assert (live.process.pid, live.engine_pid) == pids
        assert "Traceback" not in live.log.read_text()
        growth = [resident_megabytes(pid) - b for pid, b in zip(pids, before, strict=True)]
        programs = PROGRAM * (live.metric("num_compiles_total") - num_compiles)
        assert growth[0] < GROWTH

        assert growth[1] < GROWTH + programs, (
            f"the engine has grown by {growth[1]} MB, of which {programs} are compiled"
        )


@pytest.fixture(autouse=True)
def neighbour(server):
    """A client that streams the same text over and over, during the attack and once after it."""
    texts, stop = [], threading.Event()

    def streams():
        while not stop.is_set():
            texts.append(streamed(server, NORMAL))

    thread = threading.Thread(target=streams)
    thread.start()
    yield
    num_during = len(texts)
    stop.set()
    thread.join(PATIENCE)
    assert len(texts) > num_during or num_during > 1
    assert set(texts) == {server.expected}


def streamed(server, body, key=KEYS[0]) -> str:
    """The text of a streamed completion; anything but its chunks is told."""
    address = server.base.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        lines = connection.getresponse().read().decode().split("\n\n")
        *chunks, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) if done == "[DONE]" else done
    except (OSError, ValueError, KeyError) as error:
        return repr(error)
    finally:
        connection.close()


@contextmanager
def connected(server):
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        yield connection


def answers(connection) -> bytes:
    """All that comes until the other end hangs up."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    """Of the first answer; 0 if the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def raw(server, data: bytes) -> bytes:
    """What comes back until the server hangs up, or has been told to."""
    with connected(server) as connection:
        connection.sendall(data)
        return answers(connection)


def is_hung_up_on(connection, data: bytes, *, times: int, pause: float = 0) -> bool:
    """Whether sending something over and over comes to an end by the server's hand."""
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


# Bodies


def nested_schema(depth: int) -> str:
    """Of objects in objects, as text: Python's own writer would not go so deep."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def chain(rule: str, length: int) -> str:
    """A grammar whose rules refer each to the next."""
    name = rule[0]
    return "\n".join([f"start: {name}0", *(rule.format(i, i + 1) for i in range(length)), f'{name}{length}: "b"'])


def ask(**fields) -> bytes:
    return json.dumps(HELLO | fields).encode()


DEEP_SCHEMA = b'{"type":"json_schema","json_schema":{"name":"x","schema":%b}}' % nested_schema(2000).encode()
BAD_BODIES = {
    "empty": b" ",
    "no JSON": b"{'prompt': 1}",
    "half": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "a list": b"[1, 2]",
    "a string": b'"prompt"',
    "null": b"null",
    "wrong types": b'{"prompt": {"a": 1}, "max_tokens": "many"}',
    "a boolean for a number": b'{"prompt": "a", "max_tokens": true}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16 without a mark": '{"prompt": "a"}'.encode("utf-16-be") + b"\xd8",
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate as stop": b'{"prompt": "a", "stop": "\\udfff"}',
    "a lone surrogate in a regex": b'{"prompt": "a", "structured_outputs": {"regex": "\\udfff"}}',
    "a lone surrogate as bad word": b'{"prompt": "a", "bad_words": ["\\udfff"]}',
    "a lone surrogate as model": b'{"prompt": "a", "model": "\\ud83d"}',
    "a lone surrogate in an id": b'{"prompt": "a", "request_id": "\\ud83d"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "1e999": b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
    "a long integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a wide integer": b'{"prompt": [99999999999999999999]}',
    "deep arrays": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "open brackets": b"[" * 100_000,
    "max_tokens": ask(max_tokens=10**18),
    "n": ask(n=10**9),
    "negative n": ask(n=-1),
    "logprobs": ask(logprobs=10**6),
    "a large logit_bias": ask(logit_bias={str(i): 200 for i in range(100_000)}),
    "a logit_bias beyond the vocabulary": ask(logit_bias={str(i): 1 for i in range(100_000)}),
    "stop strings": ask(stop=[f"s{i}" for i in range(10_000)]),
    "too many prompts": ask(prompt=["a"] * 1025),
    "a million tokens": ask(prompt=[1] * 1_000_000),
    "a million letters": ask(prompt="ab " * 350_000),
    "tokens that are none": ask(prompt=[2**31 - 1]),
    "an unknown model": ask(model="x" * 100_000),
    "a deep schema": b'{"prompt":"a","response_format":%b}' % DEEP_SCHEMA,
    "a deep schema as text": ask(structured_outputs={"json": nested_schema(2000)}),
    "a huge schema": ask(structured_outputs={"json": {"properties": {f"p{i}": {} for i in range(100_000)}}}),
    "a schema of many properties": ask(
        structured_outputs={"json": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}
    ),
    "a schema that is itself": ask(structured_outputs={"json": {"$ref": "#"}}),
    "a schema with a remote part": ask(structured_outputs={"json": {"$ref": "http://169.254.169.254/x"}}),
    "a regex of parentheses": ask(structured_outputs={"regex": "(" * 100_000 + "a" + ")" * 100_000}),
    "a quadratic regex": ask(structured_outputs={"regex": "(a?)" * 20_000 + "a" * 20_000}),
    "a regex with a look behind": ask(structured_outputs={"regex": "(?<=a)b"}),
    "a megabyte of alternatives": ask(structured_outputs={"regex": "|".join(f"w{i:06}" for i in range(130_000))}),
    "a grammar of parentheses": ask(structured_outputs={"grammar": "start: " + "(" * 9_999 + '"a"' + ")" * 9_999}),
    "a deep GBNF": ask(structured_outputs={"grammar": "root ::= " + "(" * 9_999 + '"a"' + ")" * 9_999}),
    "a grammar of doubling terminals": ask(structured_outputs={"grammar": chain("R{0}: R{1} R{1}", 40)}),
    "a grammar of a chain": ask(structured_outputs={"grammar": chain("r{0}: r{1}", 20_000)}),
    "a choice of many": ask(structured_outputs={"choice": [f"c{i}" for i in range(100_000)]}),
    "no choice": ask(structured_outputs={"choice": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_cannot_be_served(server, name):
    answer = raw(server, request(BAD_BODIES[name]))
    assert refused(status_of(answer)), answer[:500]
    _, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error["code"] == status_of(answer)
    assert len(body) < 12_000


REFERENCES = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
HARD_TASKS = {
    "a regex bomb": {"regex": "(a{1,1000}){1,1000}"},
    "a regex of nested quantifiers": {"regex": "(((((a+)+)+)+)+)+b"},
    "an exponential regex": {"regex": "[ab]*a[ab]{25}"},
    "alternatives": {"regex": "|".join(f"w{i:06}" for i in range(8_000))},
    "a quadratic regex": {"regex": "(a?)" * 8_000 + "a" * 8_000},
    "repeated rules": {"grammar": "start: b{1,1000}\nb: c{1,1000}\nc: d{1,1000}\nd: /a{1,1000}/"},
    "an ambiguous grammar": {"grammar": 'start: start start start | "a" | '},
    "rules three thousand deep": {"grammar": chain('r{0}: "a" r{1}', 3300)},
    "references": {"json": {"$defs": REFERENCES | {"d900": {}}, "$ref": "#/$defs/d0"}},
    "a long string": {"json": {"type": "string", "maxLength": 10**8}},
    "many items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
}  # fmt: skip


@pytest.mark.parametrize("name", HARD_TASKS)
def test_a_hard_grammar_is_served_or_refused(server, name):
    """None of these ends the engine, holds others up, or is the server's failure."""
    status, body = server.post(
        "/v1/completions", HELLO | {"max_tokens": 8, "structured_outputs": HARD_TASKS[name]}, KEYS[0]
    )
    assert status == 200 or 400 <= status < 500, body


def test_many_entries_that_can_be_served(server):
    status, body = server.post("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 1}, KEYS[0])
    assert status == 200
    assert len(body["choices"]) == 1024
    status, _ = server.post("/v1/completions", HELLO | {"logit_bias": {str(i): 1 for i in range(1000)}}, KEYS[0])
    assert status == 200


# HTTP


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
    """It is answered before its body is there, and hung up on when that does not come."""
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
    assert b"dflash-embedded" not in answer


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


# Keys


@pytest.mark.parametrize(
    "path",
    [b"/v1/models", b"//page.js", b"/page.js/", b"/health/../v1/models", b"/health/%2e%2e/v1/models",
     b"/v1/models?/health", b"/%2fhealth", b"/metrics;/v1/models", b"/flush_cache", b"/openapi.json", b"/nothing"],
)  # fmt: skip
def test_no_path_goes_without_a_key(server, path):
    for key in ("wrong", "", KEYS[0][:-1], KEYS[0] + "x", ",".join(KEYS)):
        assert status_of(raw(server, request(method=b"GET", path=path, key=key))) in (401, 404)
    answer = raw(server, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert status_of(answer) in (401, 404)
    assert b"dflash" not in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "header", [b"Basic first-key", b"first-key", b"Bearer", b"Bearer \xff\xfe", b"Bearerfirst-key"]
)
def test_what_is_no_key(server, header):
    data = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: " + header + b"\r\n\r\n"
    assert status_of(raw(server, data)) == 401


def test_every_key_lets_in(server):
    for key in KEYS:
        assert server.get("/v1/models", key)[0] == 200
    status, body = server.post("/v1/completions", HELLO, "wrong")
    assert (status, body["error"]["type"]) == (401, "UnauthorizedError")


def test_bytes_that_are_no_text_in_headers(server):
    """They are nobody's business, and break nothing."""
    headers = [b"x-request-id: \xff\xfe\x80", b"user-agent: \xf0\x28", b"cookie: \xff"]
    assert status_of(raw(server, request(json.dumps(NORMAL).encode(), headers=headers))) == 200


# Others


def test_a_slow_grammar_holds_up_neither_others_nor_aborts(server):
    """Grammars that take seconds; meanwhile other requests are answered, and the neighbour streams."""
    slow = {"regex": "(a?)" * 10_000 + "a" * 10_000}
    bodies = [json.dumps(HELLO | {"structured_outputs": slow, "request_id": f"slow-{i}"}).encode() for i in range(4)]
    results = []
    threads = [threading.Thread(target=lambda b=b: results.append(raw(server, request(b)))) for b in bodies]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: json.loads(server.get("/load")[1])["server_load"] >= 4)
    assert server.post("/v1/completions", NORMAL, KEYS[0])[1]["choices"][0]["text"] == server.expected
    assert not results  # all of this while the first was still compiled
    for i in range(4):
        assert server.post("/abort_request", {"rid": f"slow-{i}"}, KEYS[0])[0] == 200
    for thread in threads:
        thread.join(PATIENCE)
    assert [status_of(result) for result in results] == [200] * 4
    assert all(b'"finish_reason":"abort"' in result for result in results)


def test_clients_that_hang_up(server):
    """At any point of a request; nothing is left of them."""
    whole = request(json.dumps(NORMAL | {"max_tokens": 2000, "ignore_eos": True, "stream": True}).encode())
    for end in (1, 20, len(whole) - 40, len(whole)):
        for _ in range(5):
            with connected(server) as connection:
                connection.sendall(whole[:end])
