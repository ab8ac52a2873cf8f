"""Nothing is served without a key, however the path or the header is written."""

import json

import httpx
import pytest

from tests.serve.hostile.attack import HELLO, KEYS, NORMAL, PATIENCE, raw, request, status_of
from tests.serve.live import NAME


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
    body = answer.partition(b"\r\n\r\n")[2]
    assert b"dflash" not in body
    assert NAME.encode() not in body


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


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"x-api-key: " + KEYS[1].encode(), 200),
        (b"x-api-key: " + KEYS[1].encode() + b"\r\nauthorization: Bearer wrong", 200),
        (b"x-api-key: wrong\r\nauthorization: Bearer " + KEYS[0].encode(), 200),
        (b"x-api-key: wrong", 401),
        (b"x-api-key: Bearer " + KEYS[0].encode(), 401),
        (b"x-api-key:", 401),
    ],
)
def test_anthropics_header(server, header, status):
    data = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + header + b"\r\n\r\n"
    assert status_of(raw(server, data)) == status


def test_a_refused_message_is_told_so_in_anthropics_form(server):
    status, body = server.post("/v1/messages?beta=true", {}, "wrong")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "text/plain"}
    answer = httpx.post(f"{server.base}/v1/messages", content=b"Hi", headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")


def test_bytes_that_are_no_text_in_headers(server):
    """They are ignored and break nothing."""
    headers = [b"x-request-id: \xff\xfe\x80", b"user-agent: \xf0\x28", b"cookie: \xff"]
    assert status_of(raw(server, request(json.dumps(NORMAL).encode(), headers=headers))) == 200
