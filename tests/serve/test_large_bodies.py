"""Large bodies are read no faster than the server's pace, small ones and single large ones at once."""

from __future__ import annotations

import asyncio

import pytest

from dflash_jax.options.serve_args import Limits
from dflash_jax.serve.http import middleware
from dflash_jax.serve.http.middleware import LARGE, LARGE_BURST, LARGE_RATE, BoundedBody

MIB = 1 << 20


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    async def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(middleware.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(middleware.asyncio, "sleep", clock.sleep)
    return clock


def read(app, size):
    """Have a body of so many bytes read, 64 KiB at a time."""
    chunks = [min(65536, size - at) for at in range(0, size, 65536)]
    messages = [
        {"type": "http.request", "body": b"x" * chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}

    async def receive():
        return messages.pop(0)

    async def send(message):
        raise AssertionError(message)

    asyncio.run(app(scope, receive, send))


async def whole(scope, receive, send):
    """A route that reads its body."""
    while (await receive())["more_body"]:
        pass


def test_a_flood_is_read_at_its_pace(clock):
    app = BoundedBody(whole, Limits())
    for _ in range(2):
        read(app, 16 * MIB)
    assert clock.now == 0  # a burst
    for _ in range(8):
        read(app, 16 * MIB)
    large = 10 * (16 * MIB - LARGE)
    assert clock.now == pytest.approx((large - LARGE_BURST) / LARGE_RATE, rel=0.02)
    before = clock.now
    for _ in range(100):
        read(app, LARGE)
    assert clock.now == before  # whatever floods, bodies up to that size do not wait
    clock.now += LARGE_BURST / LARGE_RATE
    rested = clock.now
    read(app, 16 * MIB)
    assert clock.now == rested
