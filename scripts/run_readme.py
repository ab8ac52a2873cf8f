"""Run every command of the documents in a clean clone; report which succeeded, their times, and which could not run.

    python scripts/run_readme.py [--list] [--only PATTERN] [--downloads]

`readme_plan.py` has the table of commands that are not run, with reasons. The others run in the order of their
documents, with this interpreter as `python`. A server gets a free port; once it is healthy, the commands after it that
talk to a server run; then SIGTERM must end it with status 0. The exit status is 1 if a command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from readme_plan import DATA, Command, Step, check_tables, chosen, limit_of, plan, read_documents, substituted

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 60  # limit for the end of a server
TAIL = 20  # lines of output shown of a failed command
PROMPTS = 40  # lines of the user's `prompts.jsonl`: at two temperatures 80 samples


@dataclass(frozen=True)
class Result:
    """The result of a step: "ok", "failed" or "skipped", its time in seconds, and a note."""

    step: Step
    outcome: str
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        seconds = "" if self.outcome == "skipped" else f"{self.seconds:.1f}"
        return f"{self.outcome:8}{seconds:>8}  {self.step.command}" + (f"\n{'':18}{self.note}" if self.note else "")


@dataclass
class Runner:
    """Runs steps in a clone.

    Attributes:
        clone: the folder they run in.
        logs: folder of their output.
        limit: seconds that each may take.
        total: number of steps, for the progress that is printed.
    """

    clone: Path
    logs: Path
    limit: float
    total: int
    number: int = 0
    packages: Path = field(init=False)

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        for old in self.logs.glob("[0-9][0-9]-*"):
            old.unlink()
        self.packages = self.clone.parent / "packages"
        # curl fails on an answer with an error status.
        (self.clone.parent / ".curlrc").write_text("fail-with-body\n")
        lines = [line.strip() for line in (self.clone / "LICENSE").read_text().splitlines() if len(line) > 40]
        prompts = [json.dumps({"prompt": line}) + "\n" for line in lines[:PROMPTS]]
        (self.clone / "prompts.jsonl").write_text("".join(prompts))

    def environment(self, port: int) -> dict[str, str]:
        """The environment of every command: this interpreter, the clone's packages, no Hub, no variables of `make`.

        The caller's PYTHONPATH comes last, since `fetch` leaves out what is found there.
        """
        kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self.clone), str(self.packages), kept.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "DFLASH_CACHE_DIR": str(self.clone.parent / "cache"),
            "CURL_HOME": str(self.clone.parent),
            "SERVER": f"http://127.0.0.1:{port}",
        }

    def run(self, steps: list[Step]) -> Iterator[Result]:
        """Run the steps that need no server, and the others while their servers run."""
        for step in steps:
            if step.skipped:
                yield Result(step, "skipped", note=step.skipped)
            elif step.is_server:
                yield from self.serve(step, [client for client in steps if client.server is step])
            elif step.server is None:
                yield self.run_one(step, 0)

    def run_one(self, step: Step, port: int) -> Result:
        """Run a command to its end."""
        missing = self.fetch(step.command)
        if missing:
            return Result(step, "skipped", note=f"download: pip cannot fetch {missing}")
        process, log, began = self.start(step, port)
        limit = limit_of(step.command, self.limit)
        try:
            status = process.wait(limit)
            note = f"status {status}" if status else ""
        except subprocess.TimeoutExpired:
            note = f"killed after {limit:g} s; --limit gives more"
        finally:
            end_group(process)
        return self.ended(step, began, log, note)

    def serve(self, step: Step, clients: list[Step]) -> Iterator[Result]:
        """Start a server, run its clients, and end it with SIGTERM."""
        port = free_port()
        process, log, began = self.start(step, port)
        remark = ""
        try:
            note = until_healthy(process, port, self.limit)
            if not note:
                remark = f"healthy after {time.monotonic() - began:.1f} s"
                print(f"{'':8}{remark}", flush=True)
                for client in clients:
                    yield self.run_one(client, port)
                note = stop(process)
        finally:
            end_group(process)
        if not remark:
            yield from (Result(client, "failed", note="its server did not start") for client in clients)
        yield self.ended(step, began, log, note, remark)

    def start(self, step: Step, port: int) -> tuple[subprocess.Popen[bytes], Path, float]:
        """Start a command in a process group of its own."""
        self.number += 1
        print(f"[{self.number}/{self.total}] {step.command}", flush=True)
        name = f"{self.number:02d}-{step.command.document.replace('/', '-')}-{step.command.line}"
        log, text = self.logs / f"{name}.log", substituted(step.command.text, port)
        argv = ["bash", "-e", "-o", "pipefail", "-c", text]
        if step.command.is_python:
            script = self.logs / f"{name}.py"
            script.write_text(text)
            argv = [sys.executable, str(script)]
        with log.open("w") as file:
            process = subprocess.Popen(
                argv,
                cwd=self.clone,
                env=self.environment(port),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return process, log, time.monotonic()

    def ended(self, step: Step, began: float, log: Path, failure: str, remark: str = "") -> Result:
        """Print how a command ended, and the last lines of its output if it failed."""
        note = f"{failure}; see {log}" if failure else remark
        result = Result(step, "failed" if failure else "ok", time.monotonic() - began, note)
        place = f"{step.command.document}:{step.command.line}"
        print(f"{'':8}{place} {result.outcome}, {result.seconds:.1f} s{failure and f', {failure}'}", flush=True)
        if failure:
            lines = log.read_text(errors="replace").splitlines()[-TAIL:]
            print("".join(f"{'':8}| {line[:300]}\n" for line in lines), end="", flush=True)
        return result

    def fetch(self, command: Command) -> str:
        """Fetch the data that a command needs; returns the package that cannot be fetched, if there is one."""
        for pattern, module, package in DATA:
            is_here = find_spec(module) is not None or (self.packages / module).exists()
            if is_here or not re.search(pattern, command.bare):
                continue
            print(f"{'':8}fetching {package}", flush=True)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(self.packages),
                package,
            ]
            if subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
                return package
        return ""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_healthy(process: subprocess.Popen[bytes], port: int, limit: float) -> str:
    """Wait until a server is healthy; returns why it is not, or an empty text."""
    deadline = time.monotonic() + limit
    while process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return ""
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        if time.monotonic() > deadline:
            return f"not healthy after {limit:g} s; --limit gives more"
        time.sleep(0.1)
    return f"not healthy: it has ended with status {process.returncode}"


def stop(process: subprocess.Popen[bytes]) -> str:
    """End a server with SIGTERM; returns what was wrong with its end."""
    if process.poll() is not None:
        return f"has ended with status {process.returncode} before it was told to"
    os.kill(innermost(process.pid), signal.SIGTERM)
    try:
        status = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return f"still runs {STOP_SECONDS} s after SIGTERM"
    return f"status {status} after SIGTERM" if status else ""


def innermost(pid: int) -> int:
    """The process that `make` or a shell waits for: if they were ended themselves, they would report an error."""
    try:
        while Path(f"/proc/{pid}/comm").read_text().strip() in ("make", "bash", "sh"):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError):  # it has no child, or this is not Linux
        pass
    return pid


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clone_head(folder: Path) -> Path:
    """A clone of HEAD; warns of changes that are not committed."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True)
    if changed.stdout:
        print(f"warning: {len(changed.stdout.splitlines())} uncommitted changes are left out; commit them to run them.")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    return folder / "clone"


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="commands or documents that match, and their servers"
    )
    parser.add_argument("--list", action="store_true", help="show what would run, and what not and why; run nothing")
    parser.add_argument("--downloads", action="store_true", help="run what only needs a download, too")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a command (default: %(default)s)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/readme", help="folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    if shutil.which("python", path=str(Path(sys.executable).parent)) is None:
        parser.error(f"there is no `python` beside {sys.executable}; run this with a virtual environment's.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, so that `finally` blocks end the processes
    with tempfile.TemporaryDirectory(prefix="readme-") as name:
        clone = clone_head(Path(name))
        commands = read_documents(clone)
        check_tables(commands)
        steps = chosen(plan(commands, args.downloads), args.only)
        to_run = [step for step in steps if not step.skipped]
        if args.list:
            for step in steps:
                text = substituted(step.command.text, "PORT")
                notes = [step.skipped, f"talks to line {step.server.command.line}" if step.server else ""]
                notes.append(
                    "" if step.skipped or step.command.is_python or text == step.command.text else f"as {text}"
                )
                print(f"{'skip' if step.skipped else 'run':6}{step.command}", *filter(None, notes), sep=f"\n{'':6}")
            print(f"{len(to_run)} would run, {len(steps) - len(to_run)} not")
            return 0
        results = list(Runner(clone, args.logs.resolve(), args.limit, len(to_run)).run(steps))
    order = {id(step): i for i, step in enumerate(steps)}
    print("", *sorted(results, key=lambda result: order[id(result.step)]), "", sep="\n")
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("ok", "failed", "skipped")}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f"; logs are in {args.logs}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
