"""Streams read from bytes, wherever they are cut, at given times; and HTTP as servers send it."""

import asyncio
import json

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.client import CHAT, COMPLETIONS, CompletionReader, EventReader, complete, request_body
from dflash_jax.bench.http import HttpClient, RequestFailedError
from dflash_jax.bench.stats import RequestRecord
from dflash_jax.text.request_files import SampleRequest
from tests.bench.mock_server import BLOCK, DONE, delta, event, text, usage


def read(*pieces):
    """The record of pieces that arrive one a second."""
    record = RequestRecord(9)
    reader = CompletionReader(record)
    for now, piece in enumerate(pieces, start=1):
        reader.feed(piece, float(now))
    reader.finish()
    return record


def test_events_survive_every_cut():
    unbroken = b": keep-alive\n\nevent: x\r\ndata: \xc3\xa9\xf0\x9f\x98\x80\r\n\r\nid: 1\ndata:two\ndata: lines\n\n"
    unbroken += b": c\n\ndata: [DONE]\n\n"
    expected = ["é😀".encode(), b"two\nlines", b"[DONE]"]
    assert EventReader().feed(unbroken) == expected
    for cut in range(len(unbroken)):
        for second in range(cut, min(cut + 9, len(unbroken))):
            reader = EventReader()
            parts = unbroken[:cut], unbroken[cut:second], unbroken[second:]
            assert [e for part in parts for e in reader.feed(part)] == expected


def test_an_event_without_its_blank_line_is_none():
    assert EventReader().feed(b"data: {}\n") == []


def test_what_counts_as_an_arrival():
    record = read(
        delta(role="assistant", content=""),  # brings no token
        b": keep-alive\n\n",
        delta(reasoning="hm"),
        delta(content=""),
        delta(content="a"),
        delta(tool_calls=[{"index": 0}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),  # the end-of-sequence token has no text
        usage(4) + DONE,
    )
    assert record.arrivals == [(3.0, 0), (5.0, 0), (6.0, 0), (7.0, 0)]
    assert record.finish_reason == "stop"


def test_one_read_is_one_arrival_whose_tokens_are_summed():
    record = read(text("a", token_ids=[1]), text("b", token_ids=[2, 3]) + text("", token_ids=[4]), usage(4) + DONE)
    assert record.arrivals == [(1.0, 1), (2.0, 3)]
    assert record.inter_token == [(1 / 3, 3)]


def test_tokens_are_the_usage_never_the_chunks():
    record = read(text("a"), text("b"), usage(40, prompt_tokens=7), DONE)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 40)


def test_acceptance_is_read_from_the_usage_chunk():
    record = read(text("a"), usage(3, metrics={"time_to_first_token_ms": 1.0, "speculative_decoding": BLOCK}), DONE)
    assert record.speculative_decoding.acceptance_histogram == [1, 0, 1, 0, 0, 1]
    assert record.speculative_decoding.is_consistent
    assert read(text("a"), usage(3, metrics={"speculative_decoding": None}), DONE).speculative_decoding is None


@pytest.mark.parametrize(
    ("pieces", "kind", "words"),
    [
        ([text("a"), usage(1)], "truncated", "DONE"),
        ([text("a"), DONE], "no usage", "tokens cannot be counted"),
        ([usage(3), DONE], "no tokens", "no token"),
        ([text("a"), usage(0), DONE], "no tokens", "no token"),
        ([text("a"), event(error={"message": "the engine died", "code": 500}), DONE], "error in stream", "engine died"),
        ([b"data: {oops\n\n", DONE], "bad chunk", "oops"),
        ([b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE], "bad chunk", "\N{REPLACEMENT CHARACTER}"),
        ([event(choices=7), DONE], "bad chunk", "choices"),
        ([], "truncated", "DONE"),
    ],
)
def test_what_fails(pieces, kind, words):
    with pytest.raises(RequestFailedError, match=words) as failure:
        read(*pieces)
    assert failure.value.kind == kind


def test_long_answers_are_quoted_by_their_beginning():
    with pytest.raises(RequestFailedError) as failure:
        read(event(error="x" * 10_000))
    assert len(str(failure.value)) < 400


def test_bodies():
    ids, words = SampleRequest([1, 2], 9), SampleRequest("hi", 9)
    chat = SampleRequest([{"role": "user", "content": "hé"}], 9)
    common = {"stream": True, "stream_options": {"include_usage": True}, "model": "m"}
    assert json.loads(request_body(ids, COMPLETIONS, {"model": "m"})) == common | {"prompt": [1, 2], "max_tokens": 9}
    for sample, content in ((words, "hi"), (chat, "hé")):
        expected = common | {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 9}
        assert json.loads(request_body(sample, CHAT, {"model": "m"})) == expected
    assert json.loads(request_body(ids, COMPLETIONS, {"max_tokens": 3}))["max_tokens"] == 3
    with pytest.raises(ConfigError, match="--endpoint completions"):
        request_body(ids, CHAT, {})
    with pytest.raises(ConfigError, match="--endpoint chat"):
        request_body(chat, COMPLETIONS, {})


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_bad_urls(url):
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url, {})


def against(answers, num=1, path="", timeout_seconds=30.0):
    """Records of requests, one after another, to a server that writes bytes: for each connection, for each request."""
    heads = []

    async def body():
        connections = iter(answers)

        async def serve(reader, writer):
            for pieces in next(connections):
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(f"http://127.0.0.1:{port}{path}", {"Authorization": "Bearer k"})
            records = [
                await complete(client, COMPLETIONS, b"{}", 9, timeout_seconds=timeout_seconds) for _ in range(num)
            ]
            client.close()
            return records

    return asyncio.run(asyncio.wait_for(body(), 60)), heads


GOOD = text("é😀") + usage(2) + DONE
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(GOOD), GOOD)
TO_THE_END = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + GOOD


@pytest.mark.parametrize("answer", [CHUNKED, SIZED, TO_THE_END])
def test_every_framing_cut_anywhere(answer):
    (unbroken,), _ = against([[[answer]]])
    (bytewise,), _ = against([[[answer[i : i + 1] for i in range(len(answer))]]])
    for record in (unbroken, bytewise):
        assert (record.error_kind, record.error) == (None, None)
        assert (record.completion_tokens, len(record.arrivals)) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "disconnected"),
        (CHUNKED[:60], "disconnected"),
        (CHUNKED[:-5], "disconnected"),
        (SIZED[:-1], "disconnected"),
        (TO_THE_END[:-1], "truncated"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 503 x\r\nContent-Length: 4\r\n\r\nfull", "HTTP 503"),
        (b"HTTP/1.1 302 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "HTTP 302"),
    ],
)
def test_kinds_of_failure(answer, kind):
    (record,), _ = against([[[answer]]])
    assert record.error_kind == kind


def test_connections_are_kept():
    records, heads = against([[[CHUNKED], [CHUNKED]]], num=2, path="/v1/")
    assert [r.error_kind for r in records] == [None, None]
    assert all(head.startswith(b"POST /v1/completions HTTP/1.1\r\n") for head in heads)
    assert all(b"\r\nAuthorization: Bearer k\r\n" in head for head in heads)


def test_a_kept_connection_that_the_server_closes_is_no_failure():
    # the server reads the second request on the first connection and closes without a word
    records, heads = against([[[CHUNKED], []], [[CHUNKED]]], num=2)
    assert [r.error_kind for r in records] == [None, None]
    assert len(heads) == 3


def test_half_an_answer_on_a_kept_connection_is_a_failure():
    records, heads = against([[[CHUNKED], [CHUNKED[:20]]], [[CHUNKED]]], num=2)
    assert [r.error_kind for r in records] == [None, "disconnected"]
    assert len(heads) == 2


def test_nobody_there():
    record = asyncio.run(complete(HttpClient("http://127.0.0.1:1", {}), COMPLETIONS, b"{}", 9, timeout_seconds=9))
    assert record.error_kind == "cannot connect"
    assert "127.0.0.1:1" in record.error


def test_timeout():
    slow = [CHUNKED[:60], *[b""] * 1000]  # takes at least a second until the connection is closed
    (record,), _ = against([[slow]], timeout_seconds=0.05)
    assert (record.error_kind, record.error) == ("timeout", "no end within 0.05 s")
