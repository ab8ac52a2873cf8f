"""Send many requests at once to `python -m dflash_jax.serve`; some of them are aborted half-way.

    python scripts/soak_server.py --requests 2000 --concurrency 64

Starts a server of the embedded pair (with the flags after `--`), sends each kind of request alone, and then all of them
mixed. The exit status is 1, with reasons, unless: every complete answer is that of the same request sent alone, and
every aborted one is the beginning of it; every status is 200; at the end the server holds no request, slot or page; the
memory of its two processes has not grown since the first third by more than a margin; and the engine never had more
than half of the memory maps that Linux gives a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LICENSE = Path(__file__).parents[1] / "LICENSE"
START_SECONDS, REQUEST_SECONDS = 300, 300
PROGRAM = 25.0  # MB that a program compiled during the run may take
MOST_MAPS = int(Path("/proc/sys/vm/max_map_count").read_text())  # limit of memory maps of a process


class Sample(NamedTuple):
    """Resources of a server at one time.

    Attributes:
        server: memory of its process, MB.
        engine: memory of the engine's process, MB.
        programs: compiled so far.
        maps: memory maps of the engine's process.
    """

    server: float
    engine: float
    programs: int
    maps: int


@dataclass
class Answer:
    """An answer: its status (0 if the client left), and the text and finish reason of each choice."""

    status: int
    texts: list[str]
    reasons: list[str | None]
    seconds: float = 0.0


@dataclass
class Report:
    """The record of a run.

    Attributes:
        samples: resources over time.
    """

    answers: int = 0
    left: int = 0
    aborted: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Server:
    """The process of a server, and its port."""

    def __init__(self, flags: list[str], log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        with log.open("w") as file:
            command = [sys.executable, "-m", "dflash_jax.serve", "--port", str(self.port), *flags]
            # Programs of an earlier start would take memory as those that are compiled, but are not counted.
            keeps = {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else {"JAX_ENABLE_COMPILATION_CACHE": "0"}
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | keeps)

    async def until_healthy(self) -> None:
        """Wait until the server is healthy."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server does not start; see its log.")
            try:
                if (await self.ask("GET", "/health"))[0] == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)

    async def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
        """Send a request; returns status and body. Cancelling it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            answer, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
            return int(answer.split(b" ", 2)[1]), dechunked(rest) if b"chunked" in answer else rest
        finally:
            writer.close()

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = (await self.ask("GET", "/metrics"))[1].decode()
        return sum(float(value) for value in re.findall(rf"^dflash_jax:{name}{{.*}} (.*)$", text, re.MULTILINE))

    async def holds(self) -> dict[str, float]:
        """The requests, slots and pages that the server still holds; empty if it is idle."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        held = {name: await self.metric(name) for name in names}
        held["server_load"] = json.loads((await self.ask("GET", "/load"))[1])["server_load"]
        return {name: value for name, value in held.items() if value}

    async def memory(self) -> Sample:
        """The resources of the server now."""
        pid = self.process.pid
        engine = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        maps = Path(f"/proc/{engine}/maps").read_bytes().count(b"\n")
        return Sample(resident(pid), resident(engine), int(await self.metric("num_compiles_total")), maps)


def resident(pid: int) -> float:
    """Memory of a process, MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def dechunked(data: bytes) -> bytes:
    """A body without the sizes of its chunks."""
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        data = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def read_answer(status: int, body: bytes, n: int) -> Answer:
    """Parse an answer, or all events of a stream."""
    texts, reasons = [""] * n, [None] * n
    if status != 200:
        return Answer(status, [body.decode()], reasons)
    if not body.startswith(b"{"):  # events, or a comment that keeps the connection alive
        *events, done = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data")]
        if done != "[DONE]":
            raise ValueError(f"a stream ends with {done[:100]!r}")
        objects = [json.loads(event) for event in events]
    else:
        objects = [json.loads(body)]
    for event in objects:
        if "error" in event:
            return Answer(event["error"]["code"], [str(event)], reasons)
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            texts[choice["index"]] += choice.get("text") or message.get("content") or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return Answer(status, texts, reasons)


def kinds_of_requests(rng: random.Random, count: int) -> list[tuple[str, dict]]:
    """Paths and bodies of requests; prompts are pieces of the licence."""
    lines = [line.strip() for line in LICENSE.read_text().splitlines() if len(line.strip()) > 40]
    kinds = []
    for number in range(count):
        prompt = " ".join(rng.sample(lines, rng.choice([1, 2, 3, 4, 16])))
        body = {"max_tokens": rng.choice([1, 8, 24, 48, 96, 160]), "temperature": 0}
        match number % 6:
            case 1:
                body |= {"temperature": 1, "seed": number, "logprobs": 2}
            case 2:
                body |= {"temperature": 1, "seed": number}
            case 3:
                body |= {"temperature": 0.8, "seed": number, "n": 2, "top_p": 0.9}
            case 4:
                body |= {"stop": [rng.choice(["the ", ";", "\n"])], "repetition_penalty": 1.1}
            case 5:
                body |= {"structured_outputs": {"regex": "[a-z ]{20,60}"}, "speculation": number % 4 == 1}
        if number % 3 == 0:
            kinds.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}))
        else:
            kinds.append(("/v1/completions", body | {"prompt": prompt}))
    return kinds


@dataclass
class Soak:
    """A run: the answer to each kind of request alone, and the record so far."""

    server: Server
    kinds: list[tuple[str, dict]]
    cancels: float
    rng: random.Random
    alone: list[Answer] = field(default_factory=list)
    report: Report = field(default_factory=Report)

    async def ask_alone(self) -> None:
        """Send each kind of request alone, and keep the answers."""
        for path, body in self.kinds:
            answer = read_answer(*await self.server.ask("POST", path, body), body.get("n", 1))
            if answer.status != 200:
                raise SystemExit(f"a request is refused: {answer.texts}")
            self.alone.append(answer)

    async def one(self, number: int) -> None:
        """Send a request of a random kind, and read it to the end or abort it."""
        kind = self.rng.randrange(len(self.kinds))
        path, body = self.kinds[kind]
        body = body | {"stream": self.rng.random() < 0.5, "request_id": f"soak-{number}"}
        fate = self.rng.choice(["leave", "abort"]) if self.rng.random() < self.cancels else "wait"
        pause = self.rng.expovariate(2)
        task = asyncio.create_task(self.server.ask("POST", path, body))
        start = time.perf_counter()
        if fate != "wait":
            await asyncio.wait({task}, timeout=pause)
        if fate == "leave" and not task.done():
            task.cancel()
            await asyncio.wait({task})
            self.report.left += 1
            return
        if fate == "abort" and not task.done():
            await self.server.ask("POST", "/abort_request", {"rid": f"soak-{number}"})
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = read_answer(*await task, body.get("n", 1))
        except (OSError, ValueError, IndexError, TimeoutError) as error:
            self.report.failures.append(f"request {number} ({fate}): {error!r}")
            return
        self.report.latencies.append(time.perf_counter() - start)
        self.check(number, answer, self.alone[kind])

    def check(self, number: int, answer: Answer, alone: Answer) -> None:
        """Compare an answer with that of the same request alone."""
        self.report.answers += 1
        self.report.aborted += "abort" in answer.reasons
        if answer.status != 200:
            self.report.failures.append(f"request {number}: status {answer.status}: {answer.texts}")
            return
        for got, reason, right, its_reason in zip(
            answer.texts, answer.reasons, alone.texts, alone.reasons, strict=True
        ):
            same = right.startswith(got) if reason == "abort" else (got, reason) == (right, its_reason)
            if not same:
                self.report.failures.append(f"request {number}: {reason}: {got!r} instead of {right!r}")

    async def run(self, num_requests: int, concurrency: int) -> None:
        """Send `num_requests` requests, `concurrency` at a time."""
        numbers = iter(range(num_requests))
        started = time.perf_counter()

        async def worker() -> None:
            for number in numbers:
                if number % max(num_requests // 20, 1) == 0:
                    self.report.samples.append(await self.server.memory())
                await self.one(number)

        await asyncio.gather(*[worker() for _ in range(concurrency)])
        self.report.seconds = time.perf_counter() - started
        deadline = time.monotonic() + 30
        while held := await self.server.holds():
            if time.monotonic() > deadline:
                self.report.failures.append(f"the server still holds {held}")
                break
            await asyncio.sleep(0.1)
        self.report.samples.append(await self.server.memory())

    def check_memory(self, margin: float) -> None:
        """Compare memory in the last third with the first, and memory maps with their limit.

        Memory of programs compiled in between is subtracted.
        """
        samples = self.report.samples
        most_maps = max(sample.maps for sample in samples)
        if most_maps > MOST_MAPS // 2:
            self.report.failures.append(f"the engine had {most_maps} memory maps; at most {MOST_MAPS // 2} may be")
        third = max(len(samples) // 3, 1)
        levels = {
            "server": [sample.server for sample in samples],
            "engine": [sample.engine - PROGRAM * sample.programs for sample in samples],
        }
        for name, level in levels.items():
            growth = statistics.mean(level[-third:]) - statistics.mean(level[:third])
            if growth > margin:
                self.report.failures.append(f"the {name} has grown by {growth:.0f} MB; at most {margin:.0f} may be")


def summary(report: Report) -> dict:
    """Figures of a run."""
    latencies = sorted(report.latencies)
    quantiles = {
        f"p{q}": round(latencies[min(len(latencies) * q // 100, len(latencies) - 1)], 3) for q in (50, 90, 99, 100)
    }
    return {
        "answers": report.answers,
        "of which aborted": report.aborted,
        "left by their clients": report.left,
        "seconds": round(report.seconds, 1),
        "latency, seconds": quantiles,
        "server MB, engine MB, programs, maps": [
            f"{s.server:.0f} {s.engine:.0f} {s.programs} {s.maps}" for s in report.samples
        ],
        "failures": len(report.failures),
    }


async def soak(args: argparse.Namespace) -> Report:
    """Start a server, run, and stop it."""
    rng = random.Random(args.seed)
    server = Server(args.flags, args.log)
    try:
        await server.until_healthy()
        run = Soak(server, kinds_of_requests(rng, args.kinds), args.cancels, rng)
        await run.ask_alone()
        await run.run(args.requests, args.concurrency)
        run.check_memory(args.margin)
    finally:
        server.process.terminate()
        status = server.process.wait()
    if status != 0:
        run.report.failures.append(f"the server has ended with status {status}")
    if "Traceback" in args.log.read_text():
        run.report.failures.append(f"there is a traceback in {args.log}")
    return run.report


def main() -> int:
    """Run the script; returns the exit status."""
    parser = argparse.ArgumentParser(description="Soak a server of the embedded pair.")
    parser.add_argument("--requests", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=64, help="how many at a time (default: %(default)s)")
    parser.add_argument("--kinds", type=int, default=48, help="different requests (default: %(default)s)")
    parser.add_argument("--cancels", type=float, default=0.25, help="share that is cut off (default: %(default)s)")
    parser.add_argument("--margin", type=float, default=100.0, help="MB of growth (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="of the server (default: %(default)s)")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    if args.requests < 1:
        print(f"error: --requests {args.requests} must be at least 1.", file=sys.stderr)
        return 2
    report = asyncio.run(soak(args))
    print(json.dumps(summary(report), indent=1))
    for failure in report.failures[:20]:
        print(failure[:1000], file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
