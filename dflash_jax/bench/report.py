"""The result of a run: a dictionary for JSON, and tables for people."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_jax.base.acceptance import Acceptance, histogram_lines
from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.options import ReportOptions
from dflash_jax.bench.stats import PERCENTILES, RequestRecord, summarize
from dflash_jax.options.flags import add_options
from dflash_jax.progress import phase

REDACTED = "***"
LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "icl_ms": "inter-chunk latency",
    "e2el_ms": "end-to-end latency",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the report."""
    add_options(parser.add_argument_group("result"), ReportOptions)


def output_path(args: argparse.Namespace) -> Path | None:
    """The path of the JSON file, checked before anything runs; None writes none.

    Raises:
        ConfigError: its folder does not exist.
    """
    named: Path | None = args.output
    if named is None and (args.save_result or args.save_detailed):
        return Path(f"dflash_jax-bench-{args.command}-{datetime.now():%Y%m%d-%H%M%S}.json")
    if named is not None and (named.is_dir() or not named.absolute().parent.is_dir()):
        raise ConfigError(f"--output {named} is not a file in an existing folder; make the folder first.")
    return named


def build_result(
    args: argparse.Namespace,
    records: Sequence[RequestRecord],
    *,
    model: str | None,
    server: dict[str, Any] | None,
    acceptance: Acceptance | None,
    generator: dict[str, Any] | None,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Gather settings, versions, figures, warnings, and each request if asked for.

    Args:
        args: of the command.
        records: of all requests.
        model: its name.
        server: what is known of it; None in process.
        acceptance: of drafts; None if unknown.
        generator: what generating load cost; None in process.
        warnings: to add to those of the records.
    """
    settings = {name: _plain(value) for name, value in vars(args).items() if name not in ("command", "run")}
    if settings.get("api_key") is not None:
        settings["api_key"] = REDACTED
    result = {
        "command": args.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "versions": {
            "dflash_jax": version("dflash-jax"),
            "jax": version("jax"),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "server": server,
        "settings": settings,
        **summarize(records),
        "acceptance": None if acceptance is None else acceptance.to_dict(),
        "generator": generator,
        "warnings": [*warnings, *_doubts(args, records)],
    }
    if args.save_detailed:
        result["requests"] = [record.to_dict() for record in records]
    return result


def _plain(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def _doubts(args: argparse.Namespace, records: Sequence[RequestRecord]) -> list[str]:
    """Warnings for readers of the figures, from the records."""
    good = [r for r in records if r.error_kind is None]
    doubts = []
    early = sum(r.completion_tokens < r.output_len for r in good)
    if early:
        why = "though --ignore-eos asked for all" if args.ignore_eos else "--ignore-eos asks for all"
        doubts.append(f"{early} of {len(good)} answers have fewer tokens than asked for ({why}).")
    blocks = [r.speculative_decoding for r in good if r.speculative_decoding is not None]
    inconsistent = sum(not block.is_consistent for block in blocks)
    if inconsistent:
        doubts.append(f"{inconsistent} of {len(blocks)} acceptance reports contradict themselves and are left out.")
    if blocks and len(blocks) < len(good):
        doubts.append(f"acceptance is of the {len(blocks)} requests of {len(good)} that reported it.")
    return doubts


def finish(result: dict[str, Any], path: Path | None) -> int:
    """Print the result and write it if asked for; returns the exit status: 1 if any request failed.

    Raises:
        ConfigError: the file cannot be written.
    """
    console = Console()
    for part in tables(result):
        console.print(part)
    for kind, failure in result["errors"].items():
        console.print(
            f"failed: {failure['count']} x {kind}: {failure['example']}", style="red", markup=False, soft_wrap=True
        )
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if path is not None:
        try:
            path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written ({error}).") from error
        console.print(f"written to {path}", markup=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def tables(result: dict[str, Any]) -> list[Table | str]:
    """Tables of the figures for people."""
    parts: list[Table | str] = [_totals(result), _latencies(result)]
    acceptance = result["acceptance"]
    if acceptance is not None:
        parts.append(_acceptance(acceptance))
    return parts


def _totals(result: dict[str, Any]) -> Table:
    table = Table(title=f"bench {result['command']}: {result['model'] or 'the embedded pair'}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "successful requests": result["completed"],
        "failed requests": result["failed"],
        "most at a time": result["max_concurrent_requests"],
        "duration (s)": result["duration"],
        "input tokens": result["total_input_tokens"],
        "output tokens": result["total_output_tokens"],
        "requests/s": result["request_throughput"],
        "output tokens/s": result["output_throughput"],
        "input and output tokens/s": result["total_token_throughput"],
        "output tokens a chunk": result["tokens_per_chunk"],
    }
    if result["generator"] is not None:
        rows["generator's event loop lag, p99 (ms)"] = result["generator"]["p99_loop_lag_ms"]
        rows["generator's CPU use (cores)"] = result["generator"]["cpu_cores"]
    for name, value in rows.items():
        table.add_row(name, _number(value))
    return table


def _latencies(result: dict[str, Any]) -> Table:
    columns = ["mean", *(f"p{p}" for p in PERCENTILES)]
    table = Table("ms")
    for column in columns:
        table.add_column(column, justify="right")
    for key, name in LATENCIES.items():
        label = f"{name} ({key.removesuffix('_ms').upper()})"
        table.add_row(label, *(_number(result[f"{column}_{key}"]) for column in columns))
    return table


def _acceptance(acceptance: dict[str, Any]) -> str:
    """Mean acceptance length and, where known, the histogram of accepted drafts."""
    mean, rate = acceptance["mean_acceptance_length"], acceptance["draft_acceptance_rate"]
    lines = [
        f"mean acceptance length {_number(mean)} tokens over {acceptance['num_drafts']} rounds; "
        f"{_number(None if rate is None else 100 * rate)} % of drafts accepted (as told by {acceptance['source']})"
    ]
    return "\n".join([*lines, *histogram_lines(acceptance["histogram"] or [], first=0)])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


@contextmanager
def counting(description: str, total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """A phase of requests; gives a function to call with the record of each that ends."""
    with phase(description, total) as now:
        failed = 0

        def advance(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.error_kind is not None
            now.note = f"{failed} failed" if failed else ""
            now.advance()

        yield advance
