"""A server as users start it: a process of its own, a real socket."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, Field

from tests.pairs import RECITER

MODEL = (f"--model={RECITER / 'target'}", f"--draft-model={RECITER / 'draft'}")
NAME = "reciter"  # what requests may call it
START_SECONDS = 120  # on a loaded machine


@dataclass
class Live:
    """A running server; `base` is its URL and `process` the server's."""

    base: str
    process: subprocess.Popen
    log: Path

    @property
    def engine_pid(self) -> int:
        """The engine's process: the server's one child."""
        return self._children()[0]

    def has_engine(self) -> bool:
        """Whether the engine's process is there, ready or not."""
        return bool(self._children())

    def _children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [pid for pid in map(int, path.read_text().split()) if is_running(pid)]

    def get(self, path: str, key: str | None = None) -> tuple[int, bytes]:
        """Send a GET; returns status and body."""
        return self.ask("GET", path, None, key)

    def post(self, path: str, body, key: str | None = None) -> tuple[int, dict]:
        """Send a POST of JSON; returns status and decoded body."""
        status, answer = self.ask("POST", path, json.dumps(body).encode(), key)
        return status, json.loads(answer)

    def ask(self, method: str, path: str, body: bytes | None, key: str | None = None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.base + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"dflash_jax:{name}{{")]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until(self, holds, seconds: float = START_SECONDS) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds} s; log:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def is_healthy(self) -> bool:
        """Whether /health says so."""
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and no page is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return self.get("/load")[1] == b'{"server_load":0}' and not any(map(self.metric, names))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(log: Path, *flags: str) -> subprocess.Popen:
    """A server's process; what it writes goes to the log."""
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-m", "dflash_jax.serve", *flags], stdout=file, stderr=file)


@contextmanager
def serving(folder: Path, *flags: str, wait: bool = True, model: tuple[str, ...] = MODEL):
    """A server, of the pair that recites unless `model` has the flags of another; it must stop when told to."""
    port, log = free_port(), folder / "serve.log"
    process = start(log, *model, "--port", str(port), *flags)
    live = Live(f"http://127.0.0.1:{port}", process, log)
    try:
        if wait:
            live.wait_until(lambda: live.is_healthy() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
        yield live
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def resident_megabytes(pid: int) -> float:
    """Resident memory of a process, in megabytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def says(text):
    """The extra body that makes the model say a text."""
    return {"structured_outputs": {"choice": [text]}}


class Colour(StrEnum):
    RED, BLUE = "red", "blue"


class Thing(BaseModel):
    """What the model is asked to answer as JSON."""

    colour: Colour
    name: str = Field(max_length=6)
    wheels: int = Field(ge=0, le=9)
