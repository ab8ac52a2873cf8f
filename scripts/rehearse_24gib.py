"""Rehearse on a large GPU what Qwen3.6-27B in int4 with its drafter does on a card of 24 GiB.

    python scripts/rehearse_24gib.py --json build/rehearsal.json

makes the random checkpoints (`make_random_checkpoint.py`), and starts the server twice with `--gpu-memory-bytes
23.0GiB`, which bounds JAX's allocator too: with fp8 pages for a prompt of 90,000 tokens and three short streams beside
it, and with 4-bit pages for a short one. The last line is JSON; the exit status is 1 unless every answer came whole, as
many tokens of keys and values fit as must, and the GPU never held more than the bound. `--size tiny` tries the script
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from make_random_checkpoint import SIZES, write_pair

from dflash_jax.base.errors import ConfigError
from dflash_jax.engine.device.budget import parameter_bytes
from dflash_jax.engine.device.memory import GAPS_BYTES
from dflash_jax.options.kinds import Bytes
from dflash_jax.parallel.platform import OUTSIDE_BYTES
from dflash_jax.spec import target_config

START_SECONDS, REQUEST_SECONDS = 600, 600
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
PARTS = re.compile(r"Memory of a device in GiB: (.*)")
TEMPORARIES = re.compile(r"compiled .* its temporaries take (\d+) MiB")
PEAK = re.compile(r"Memory of a device at its peak: (\d+) of (\d+) bytes")


@dataclass(frozen=True)
class Start:
    """One start of the server, and what it must serve.

    Attributes:
        kv_cache_dtype: of target and drafter.
        max_model_len: tokens of the longest sequence, and the least that must fit.
        prompts: tokens of each prompt; the first request begins before the others.
        max_tokens: of each answer.
    """

    kv_cache_dtype: str
    max_model_len: int
    prompts: tuple[int, ...]
    max_tokens: int = 64


STARTS = {
    "27b": (Start("fp8_e5m2", 96_000, (90_000, 200, 400, 800)), Start("int4_had", 180_000, (200,))),
    "tiny": (Start("fp8_e5m2", 1_000, (900, 20, 40, 80), 8), Start("int4_had", 2_000, (20,), 8)),
}


@dataclass
class Server:
    """A server that runs, and what it logs."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    @staticmethod
    def start(folder: Path, start: Start, memory: str) -> Server:
        """Start the server by the command line that users give, and what the rehearsal needs beside it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        block = json.loads((folder / "draft" / "config.json").read_text())["block_size"]
        speculation = {"method": "dflash", "model": str(folder / "draft"), "num_speculative_tokens": block}
        flags = {
            "--quantization": "auto_round",
            "--kv-cache-dtype": start.kv_cache_dtype,
            "--speculative-config": json.dumps(speculation),
            "--max-model-len": str(start.max_model_len),
            "--gpu-memory-bytes": memory,
            "--port": str(port),
            "--request-timeout": str(REQUEST_SECONDS),
        }
        command = [sys.executable, "-m", "dflash_jax.serve", str(folder / "target")]
        command += [part for pair in flags.items() for part in pair]
        # All programs of an engine take longer to compile than the rehearsal may: it compiles those that it runs.
        command.append("--no-compile-at-start")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        server = Server(process, port)
        threading.Thread(target=server._read, daemon=True).start()
        return server

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            print(self.lines[-1], file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Wait until it is healthy.

        Raises:
            SystemExit: it has ended, or needs too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(1)
        self.stop()
        raise SystemExit("the server is not healthy; its last lines: " + " | ".join(self.lines[-3:]))

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Stream a greedy completion.

        Returns:
            Its tokens, its finish reason or why it failed, and seconds to the first token and to the end.
        """
        body = {"model": self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began, first, reason, tokens = time.perf_counter(), None, None, 0
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as reply:
                for line in reply:
                    data = line.decode().removeprefix("data: ").strip()
                    if not data.startswith("{"):
                        continue
                    event = json.loads(data)
                    first = first or time.perf_counter() - began
                    reason = next((choice["finish_reason"] for choice in event.get("choices", [])), None) or reason
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except OSError as error:  # the other figures of the run are wanted all the same
            reason = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        return {"tokens": tokens, "reason": reason, "first_s": round(first or seconds, 2), "s": round(seconds, 2)}

    def model(self) -> str:
        """The name that it serves the model by."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=30) as reply:
            return str(json.load(reply)["data"][0]["id"])

    def stop(self) -> None:
        """End it, and wait until its engine has said what it took."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def last(self, pattern: re.Pattern[str]) -> str | None:
        """The first group of the last line that a pattern matches."""
        matches = [match for line in self.lines if (match := pattern.search(line))]
        return matches[-1][1] if matches else None


class Watch:
    """Asks nvidia-smi twice a second what the first GPU holds, and keeps the most; None without nvidia-smi."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(0.5):
            try:
                used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20
            except (OSError, subprocess.CalledProcessError, ValueError):
                return
            self.most = max(self.most or 0, used)

    def end(self) -> int | None:
        """Stop, and return the most bytes."""
        self._ended.set()
        self._thread.join()
        return self.most


def serve(folder: Path, start: Start, size: str, memory: str) -> dict[str, Any]:
    """Run one start: figures, and the checks that failed."""
    rng, began, watch = random.Random(0), time.perf_counter(), Watch()
    vocabulary = SIZES[size]["vocab_size"] * 9 // 10
    prompts = [[rng.randrange(256 if size == "tiny" else vocabulary) for _ in range(n)] for n in start.prompts]
    server = Server.start(folder, start, memory)
    try:
        server.wait()
        healthy = time.perf_counter() - began
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [pool.submit(server.complete, prompt, start.max_tokens) for prompt in prompts]
            answers = [job.result() for job in jobs]
    finally:
        server.stop()
        used = watch.end()
    kv_tokens = int((server.last(KV_TOKENS) or "0").replace(",", ""))
    most = Bytes()(memory)
    temporaries = [int(match[1]) for line in server.lines if (match := TEMPORARIES.search(line))]
    peak = server.last(PEAK)
    checks = {
        "answers": all(a["reason"] == "length" and a["tokens"] == start.max_tokens for a in answers),
        "kv_tokens": kv_tokens >= start.max_model_len,
        "gpu": used is None or used <= most,
        "allocator": peak is None or int(peak) <= most,
    }
    return {
        "kv_cache_dtype": start.kv_cache_dtype,
        "failed": [name for name, is_met in checks.items() if not is_met],
        "kv_tokens": kv_tokens,
        "gpu_gib": used and round(used / 2**30, 2),
        "allocator_peak_gib": peak and round(int(peak) / 2**30, 2),
        "most_temporaries_mib": max(temporaries, default=None),
        "planned_gib": server.last(PARTS),
        "prompts": list(start.prompts),
        "answers": answers,
        "healthy_s": round(healthy, 1),
        "s": round(time.perf_counter() - began, 1),
    }


def check_memory(memory: str, size: str) -> None:
    """Refuse a bound that the target alone exceeds, before checkpoints are written.

    Raises:
        ConfigError: it is too small.
        argparse.ArgumentTypeError: it is no size.
    """
    least = parameter_bytes(target_config(SIZES[size]), np.dtype(ml_dtypes.bfloat16), 4) + OUTSIDE_BYTES + GAPS_BYTES
    if Bytes()(memory) <= least:
        raise ConfigError(f"{memory!r} must be more than the {least / 2**30:.1f}GiB of target and CUDA; give more.")


def main(arguments: list[str] | None = None) -> int:
    """Run the rehearsal; returns its exit status: 0, 1 if a check failed, 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/rehearsal"), help="of the checkpoints")
    parser.add_argument("--size", choices=STARTS, default="27b")
    parser.add_argument("--memory", default="23.0GiB", help="what the engine may take of the device")
    parser.add_argument("--only", choices=[start.kv_cache_dtype for start in STARTS["27b"]], help="one of both starts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    try:
        check_memory(args.memory, args.size)
    except (ConfigError, argparse.ArgumentTypeError) as error:
        print(f"error: --memory: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    if not (args.folder / "draft" / "config.json").exists():
        write_pair(args.folder, args.size)
    figures: dict[str, Any] = {
        "memory": args.memory,
        "checkpoint_s": round(time.perf_counter() - began, 1),
        "starts": [],
    }
    for start in STARTS[args.size]:
        if args.only not in (None, start.kv_cache_dtype):
            continue
        figures["starts"].append(serve(args.folder, start, args.size, args.memory))
        figures["s"] = round(time.perf_counter() - began, 1)
        if args.json:  # after each: an interrupted run keeps them
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return int(any(start["failed"] for start in figures["starts"]))


if __name__ == "__main__":
    sys.exit(main())
