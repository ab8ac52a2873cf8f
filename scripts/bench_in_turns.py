"""Compare servers of one model that run beside each other: what Ray or a router in front costs.

On a machine that others use, speed changes from minute to minute, so the servers take turns: in every turn each answers
the same greedy completion, in another order, and the medians of the turns are compared.

    python scripts/bench_in_turns.py --turns 41 bare=http://127.0.0.1:8001 ray=http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.client import COMPLETIONS, complete, request_body
from dflash_jax.bench.http import HttpClient
from dflash_jax.options.commands import run_command
from dflash_jax.text.request_files import SampleRequest

PROMPT = "You may reproduce and distribute copies of the"
WARM_UPS = 3  # turns that do not count


@dataclass
class Times:
    """What the turns of one server took: seconds to the first token, and tokens a second, all streams together."""

    first: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)


async def turn(client: HttpClient, body: bytes, tokens: int, streams: int) -> tuple[float, float]:
    """Run so many streams at once; the median time to the first token, and the tokens a second.

    Raises:
        SystemExit: a stream failed.
    """
    clock = asyncio.get_running_loop().time
    start = clock()
    requests = [complete(client, COMPLETIONS, body, tokens, timeout_seconds=120) for _ in range(streams)]
    records = await asyncio.gather(*requests)
    seconds = clock() - start
    if failed := next((record.error for record in records if record.error_kind), None):
        raise SystemExit(f"a stream failed: {failed}")
    return median(record.ttft for record in records), sum(record.completion_tokens for record in records) / seconds


async def measure(urls: dict[str, str], turns: int, tokens: int, streams: int, seed: int) -> dict[str, Times]:
    """The times of each server, by its name."""
    options = {"temperature": 0, "ignore_eos": True}
    body = request_body(SampleRequest(PROMPT, tokens), COMPLETIONS, options)
    clients = {name: HttpClient(url, {}) for name, url in urls.items()}
    times = {name: Times() for name in urls}
    order, shuffle = list(urls), random.Random(seed).shuffle
    for number in range(-WARM_UPS, turns):
        shuffle(order)
        for name in order:
            first, speed = await turn(clients[name], body, tokens, streams)
            if number >= 0:
                times[name].first.append(first)
                times[name].speed.append(speed)
    for client in clients.values():
        client.close()
    return times


def report(times: dict[str, Times]) -> dict[str, Any]:
    """Medians and quartiles of each server, and what it differs from the first by."""
    base, *_ = times.values()
    figures = {}
    for name, server in times.items():
        figures[name] = {
            "first_token_ms": spread([1e3 * seconds for seconds in server.first]),
            "tokens_per_second": spread(server.speed),
            "first_token_ms_more": round(1e3 * (median(server.first) - median(base.first)), 2),
            "share_of_speed": round(median(server.speed) / median(base.speed), 4),
        }
    return figures


def spread(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [round(value, 2) for value in quantiles(values, n=4, method="inclusive")]


def named_url(text: str) -> tuple[str, str]:
    """The name and the URL of a server.

    Raises:
        ConfigError: the text is not both.
    """
    name, _, url = text.partition("=")
    if not name or not url:
        raise ConfigError(f"{text!r} must be NAME=URL, such as bare=http://127.0.0.1:8000.")
    return name, url


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="the first is what the others are compared with")
    parser.add_argument("--turns", type=int, default=21, help="at least 2")
    parser.add_argument("--tokens", type=int, default=400, help="of a completion")
    parser.add_argument("--streams", type=int, default=1, help="at once, to one server at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the order in a turn")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.set_defaults(run=run)
    return run_command(parser.parse_args(arguments))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the figures; returns 0.

    Raises:
        ConfigError: a server is not NAME=URL.
    """
    urls = dict(map(named_url, args.servers))
    before = os.getloadavg()
    times = asyncio.run(measure(urls, args.turns, args.tokens, args.streams, args.seed))
    result = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before_and_after": [round(before[0], 1), round(os.getloadavg()[0], 1)],
        "turns": args.turns,
        "tokens": args.tokens,
        "streams": args.streams,
        "quartiles": report(times),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
