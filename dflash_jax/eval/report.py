"""The result of a command: a dictionary for JSON, and a table for people."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval.acceptance import repetition
from dflash_jax.eval.compare import Cell
from dflash_jax.eval.conversations import Answer, Run
from dflash_jax.eval.datasets import short_name
from dflash_jax.options import EngineConfig
from dflash_jax.progress import phase

ENGINE = (
    "dtype",
    "draft_dtype",
    "kv_cache_dtype",
    "draft_kv_cache_dtype",
    "draft_quantization",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
)
COLUMNS = (  # headings of the table
    "data set",
    "T",
    "drafts",
    "length",
    "least\nrepeats",
    "8-gram\nrepeats",
    "tok/s",
    "plain\ntok/s",
    "speed-\nup",
    "differ",
)
CPUINFO = Path("/proc/cpuinfo")


def build_result(args: argparse.Namespace, config: EngineConfig, cells: Sequence[Cell]) -> dict[str, Any]:
    """Gather command, hardware, versions, options of the engine, figures, requests and warnings."""
    engine = {name: getattr(config, name) for name in ENGINE}
    return {
        "command": shlex.join(["python", "-m", "dflash_jax.eval", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": args.model or "the embedded pair",
        "draft_model": args.draft_model,
        "hardware": hardware(),
        "versions": {
            "dflash_jax": version("dflash-jax"),
            "jax": version("jax"),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "engine": {name: getattr(value, "name", value) for name, value in engine.items()},
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in ("command", "run")
        },
        "results": [_cell(cell) for cell in cells],
        "warnings": [warning for cell in cells for warning in _doubts(cell, is_exact=engine["dtype"] == "float32")],
        "is_lossless": not any(is_lossy(cell, is_exact=engine["dtype"] == "float32") for cell in cells),
    }


def hardware() -> dict[str, Any]:
    """The devices, and the CPU of the host."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
    }


def cpu_model() -> str:
    """The name of the host's processor as Linux states it, else its architecture."""
    text = CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def is_lossy(cell: Cell, *, is_exact: bool) -> bool:
    """Whether greedy answers in float32 differ, which may not be. In bfloat16 near ties may be decided either way."""
    return is_exact and cell.temperature == 0 and cell.differences is not None and cell.differences[0] > 0


def _cell(cell: Cell) -> dict[str, Any]:
    differences = cell.differences
    return {
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "num_speculative_tokens": cell.num_speculative_tokens,
        "acceptance": cell.acceptance.to_dict(),
        "speed": _speed(cell.run),
        "plain_speed": None if cell.plain is None else _speed(cell.plain),
        "speedup": cell.speedup,
        "lossless": None if differences is None else {"differing": differences[0], "compared": differences[1]},
        "requests": [_request(answer) for answer in cell.run.answers],
    }


def _speed(run: Run) -> dict[str, Any]:
    return {
        "num_tokens": run.num_tokens,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "num_compiles": run.num_compiles,
    }


def _request(answer: Answer) -> dict[str, Any]:
    output = answer.output
    completion, metrics = output.outputs[0], output.metrics
    return {
        "id": answer.sample_id,
        "turn": answer.turn,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "mean_acceptance_length": metrics.mean_acceptance_length if metrics.acceptance_lengths else None,
        "repeated_ngrams": repetition(output),
        "acceptance_lengths": metrics.acceptance_lengths,
        "draft_lengths": metrics.draft_lengths,
        "text": completion.text,
    }


def _doubts(cell: Cell, *, is_exact: bool) -> list[str]:
    """Warnings for readers of the figures."""
    where = f"{cell.dataset}, temperature {cell.temperature:g}, {cell.num_speculative_tokens} drafts"
    doubts = []
    compiles = cell.run.num_compiles + (cell.plain.num_compiles if cell.plain else 0)
    if compiles:
        doubts.append(f"{where}: {compiles} programs were compiled while the clock ran; use --compile-at-start.")
    if cell.differences is not None and cell.differences[0]:
        cause = "which must not be in float32" if is_exact else "which near ties in bfloat16 may explain"
        doubts.append(f"{where}: {cell.differences[0]} of {cell.differences[1]} answers differ, {cause}.")
    return doubts


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another --output.") from error


def finish(result: dict[str, Any], folder: Path, *, plots: bool) -> int:
    """Print the table, draw the plots if they are wanted, and return the exit status."""
    console = Console()
    console.print(table(result))
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    for path in [folder / "results.json", *(_drawn(result, folder) if plots else [])]:
        console.print(f"written to {path}", markup=False, soft_wrap=True)
    return 0 if result["is_lossless"] else 1


def _drawn(result: dict[str, Any], folder: Path) -> list[Path]:
    with phase("drawing plots"):
        from dflash_jax.eval import plots  # imported here: matplotlib is an extra, and the trainer uses eval without it

        return plots.draw(result, folder)


def table(result: dict[str, Any]) -> Table:
    """A table with a row for each data set, temperature and block length."""
    hardware, engine = result["hardware"], result["engine"]
    if hardware["platform"] == "cpu":
        device = f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    else:
        device = f"{engine['tensor_parallel_size']} x {hardware['device']}"
    shown = Table(
        title=f"acceptance length (bonus included) and speed of {result['model']}",
        caption=f"{device}, {engine['dtype']}, {engine['max_num_seqs']} sequences side by side",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == COLUMNS[0] else "right", vertical="bottom")
    for cell in result["results"]:
        acceptance, plain, lossless = cell["acceptance"], cell["plain_speed"], cell["lossless"]
        shown.add_row(
            short_name(cell["dataset"]),
            f"{cell['temperature']:g}",
            str(cell["num_speculative_tokens"]),
            _number(acceptance["mean_acceptance_length"]),
            _number(acceptance["least_repetitive_acceptance_length"]),
            f"{100 * acceptance['repeated_ngrams']:.1f} %",
            f"{cell['speed']['tokens_per_second']:.1f}",
            "-" if plain is None else f"{plain['tokens_per_second']:.1f}",
            _number(cell["speedup"]),
            "-" if lossless is None else f"{lossless['differing']}/{lossless['compared']}",
        )
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
