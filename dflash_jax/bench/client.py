"""One streamed completion of an OpenAI-compatible server, from its bytes to a `RequestRecord`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.acceptance import SpeculativeDecoding
from dflash_jax.bench.http import HttpClient, RequestFailedError, Response, rest_of
from dflash_jax.bench.stats import RequestRecord
from dflash_jax.text.request_files import SampleRequest

MOST_QUOTED = 300  # characters of an answer that an error quotes
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Delta(msgspec.Struct):
    """What a chunk of a chat brings; one with a role alone brings nothing."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """A choice of a chunk: completions have `text`, chats have `delta`."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def brings_something(self) -> bool:
        """Whether it holds a part of the answer, or its end: an end-of-sequence token has no text."""
        delta = self.delta or Delta()
        parts = (self.text, self.token_ids, delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls)
        return any(parts) or self.finish_reason is not None


class Usage(msgspec.Struct):
    """The server's token counts."""

    prompt_tokens: int
    completion_tokens: int


class Metrics(msgspec.Struct):
    """vLLM's per-request metrics; other fields are ignored."""

    speculative_decoding: SpeculativeDecoding | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Any = None


class EventReader:
    """Splits bytes into server-sent events, wherever the bytes are cut; only their `data` is kept."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; returns the data of each event that is complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class CompletionReader:
    """Writes what a stream brings into a record."""

    def __init__(self, record: RequestRecord):
        self.record = record
        self._events = EventReader()
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._has_usage = self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at one time.

        Args:
            data: read from the socket.
            now: the time, seconds.

        Raises:
            RequestFailedError: the server reports an error, or an event is not a chunk.
        """
        tokens, brings_something = 0, False
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._is_done = True
                continue
            for choice in self._chunk(event).choices or ():
                brings_something = brings_something or choice.brings_something
                tokens += len(choice.token_ids or ())
                self.record.finish_reason = choice.finish_reason or self.record.finish_reason
        if brings_something:
            self.record.arrivals.append((now, tokens))

    def finish(self) -> None:
        """Check a stream that has ended.

        Raises:
            RequestFailedError: it lacks its end, its usage, or an answer.
        """
        if not self._is_done:
            raise RequestFailedError("truncated", "the stream ended without data: [DONE]")
        if not self._has_usage:
            raise RequestFailedError("no usage", "the stream had no usage chunk: tokens cannot be counted")
        if not self.record.arrivals or self.record.completion_tokens < 1:
            raise RequestFailedError("no tokens", "the stream brought no token")

    def _chunk(self, event: bytes) -> Chunk:
        try:
            chunk = self._decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailedError("bad chunk", f"{error}: {quote(event)}") from error
        if chunk.error is not None:
            raise RequestFailedError("error in stream", quote(event))
        if chunk.usage is not None:
            self._has_usage = True
            self.record.prompt_tokens = chunk.usage.prompt_tokens
            self.record.completion_tokens = chunk.usage.completion_tokens
        if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
            self.record.speculative_decoding = chunk.metrics.speculative_decoding
        return chunk


def quote(data: bytes) -> str:
    """The first `MOST_QUOTED` characters of an answer."""
    text = data.decode(errors="replace")
    return text if len(text) <= MOST_QUOTED else text[:MOST_QUOTED] + " ..."


def request_body(sample: SampleRequest, path: str, options: dict[str, Any]) -> bytes:
    """The JSON body of a streaming request.

    Args:
        sample: the request.
        path: of the endpoint.
        options: fields that all requests share; they override others.

    Raises:
        ConfigError: the prompt does not fit the endpoint.
    """
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    if path.endswith("/chat/completions"):
        if not sample.is_chat and not sample.is_text:
            raise ConfigError("a prompt of token ids cannot be a chat; use --endpoint completions.")
        messages = sample.prompt if sample.is_chat else [{"role": "user", "content": sample.prompt}]
        return msgspec.json.encode(
            {"messages": messages, "max_completion_tokens": sample.output_len, **stream, **options}
        )
    if sample.is_chat:
        raise ConfigError("a prompt of messages needs --endpoint chat.")
    return msgspec.json.encode({"prompt": sample.prompt, "max_tokens": sample.output_len, **stream, **options})


async def complete(
    client: HttpClient, path: str, body: bytes, output_len: int, *, timeout_seconds: float
) -> RequestRecord:
    """Send a request and read its stream to the end; a failure becomes part of the record.

    Args:
        client: of the server.
        path: of the endpoint.
        body: JSON.
        output_len: limit of tokens of the answer.
        timeout_seconds: until the request has failed.
    """
    record = RequestRecord(output_len, start=time.perf_counter())
    try:
        async with asyncio.timeout(timeout_seconds), client.request("POST", path, body) as response:
            await _read(response, record)
    except TimeoutError:
        record.error_kind, record.error = "timeout", f"no end within {timeout_seconds:g} s"
    except RequestFailedError as failure:
        record.error_kind, record.error = failure.kind, str(failure)
    record.end = time.perf_counter()
    return record


async def _read(response: Response, record: RequestRecord) -> None:
    if response.status != 200:
        raise RequestFailedError(f"HTTP {response.status}", quote(await rest_of(response)))
    reader = CompletionReader(record)
    while data := await response.read():
        reader.feed(data, time.perf_counter())
    reader.finish()
