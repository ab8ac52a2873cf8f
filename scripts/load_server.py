"""Measure what burdens of `python -m dflash_jax.serve` cost a stream beside them.

    python scripts/load_server.py --json load.json

Starts a server of the embedded pair (with the flags after `--`), and decodes one stream alone and beside each burden,
in turns: clients that do not read their streams, a flood of bodies of 16 MiB, and 500 connections that say nothing. It
prints the medians of tokens a second; the exit status is 1 if a burden takes more than `--most` of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from soak_server import Server

PROMPT = "import json\n\n\nclass Settings:\n    def __init__(self, path):\n"
SLOW_READERS, FLOODING, IDLE = 4, 2, 500
BODY_BYTES = 16 * 2**20 - 4096  # just below the server's bound, so that the server reads it whole
Burden = Callable[[Server], AbstractAsyncContextManager[None]]


async def stream_speed(server: Server, tokens: int) -> float:
    """Tokens a second of one greedy stream, from its first to its last chunk."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
    writer.write(post(body))
    first, text = 0.0, b""
    try:
        while part := await reader.read(2**16):
            text += part
            first = first or (time.perf_counter() if b'"text"' in text else 0.0)
    finally:
        writer.close()
    if b"[DONE]" not in text:
        raise SystemExit(f"the stream did not end: {text[-300:]!r}")
    return tokens / (time.perf_counter() - first)


def post(body: dict[str, Any] | bytes) -> bytes:
    """A request for a completion."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@asynccontextmanager
async def nothing(server: Server) -> AsyncIterator[None]:
    """No burden."""
    del server
    yield


@asynccontextmanager
async def slow_readers(server: Server) -> AsyncIterator[None]:
    """Clients that ask for streams and read none of them; their systems take a few KiB."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "n": 1, "stream": True, "logprobs": 5, "echo": True}
    clients = []
    for _ in range(SLOW_READERS):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post(body))
        clients.append(client)
    await asyncio.sleep(1)  # their few tokens are decoded: what is left of them is a connection that takes nothing
    try:
        yield
    finally:
        for client in clients:
            client.close()


@asynccontextmanager
async def flood(server: Server) -> AsyncIterator[None]:
    """Clients that send one body of 16 MiB after another, each of them refused as too long a prompt."""
    data = post(json.dumps({"prompt": "x" * BODY_BYTES, "max_tokens": 1}).encode())

    async def send() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            await reader.read(-1)
            writer.close()

    senders = [asyncio.create_task(send()) for _ in range(FLOODING)]
    try:
        yield
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)


@asynccontextmanager
async def idle(server: Server) -> AsyncIterator[None]:
    """Connections over which one request was answered, and none follows."""
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(IDLE)]
    for reader, writer in connections:
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    try:
        yield
    finally:
        for _, writer in connections:
            writer.close()


BURDENS: dict[str, Burden] = {"nothing": nothing, "slow readers": slow_readers, "bodies": flood, "idle": idle}


async def measure(server: Server, rounds: int, tokens: int) -> dict[str, float]:
    """Median tokens a second beside each burden, which come in turns."""
    await server.until_healthy()
    await stream_speed(server, tokens)  # compiles what it runs
    speeds: dict[str, list[float]] = {name: [] for name in BURDENS}
    for _ in range(rounds):
        for name, burden in BURDENS.items():
            async with burden(server):
                speeds[name].append(await stream_speed(server, tokens))
    return {name: round(statistics.median(values), 1) for name, values in speeds.items()}


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    ours, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of all burdens in turns")
    parser.add_argument("--tokens", type=int, default=400, help="of the stream")
    parser.add_argument("--most", type=float, default=0.1, help="share of its speed that a burden may take")
    parser.add_argument("--log", type=Path, default=Path("load_server.log"), help="of the server")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(ours)
    server = Server(flags, args.log)
    try:
        speeds = asyncio.run(measure(server, args.rounds, args.tokens))
    finally:
        server.process.terminate()
        server.process.wait()
    lost = {name: round(1 - speed / speeds["nothing"], 3) for name, speed in speeds.items() if name != "nothing"}
    result = {"tokens_per_s": speeds, "lost": lost}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(share > args.most for share in lost.values()))


if __name__ == "__main__":
    raise SystemExit(main())
