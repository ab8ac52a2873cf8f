"""`bench round`: time of a draft-verify round of the engine alone, for each batch size and context.

The protocol is that of vLLM's figures: random weights in the exact shapes of a model, random prompts, greedy, and
exactly `--num-accepted-tokens` drafts kept in every round whatever the weights make of them. A step is timed while all
requests decode, from one return of `Engine.step` to the next. Prompts are prefilled before, which is not timed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dflash_jax.base.env import claim_device_memory
from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.bench import round_report, round_trace
from dflash_jax.bench.options import RoundOptions
from dflash_jax.bench.round_engine import RoundEngine, decode, finish, random_sequences, step, time_prefill
from dflash_jax.bench.round_experts import experts_touched
from dflash_jax.bench.round_models import PRESETS, configs_of, random_params
from dflash_jax.engine.device.budget import check_machine_memory, draft_bytes, parameter_bytes
from dflash_jax.engine.device.memory import explain_out_of_memory
from dflash_jax.engine.device.model import Model, quantized, screened
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.options.flags import add_option, options_from
from dflash_jax.options.option import default_of, options_of
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.parallel.platform import enable_compilation_cache
from dflash_jax.progress import Phase, phase
from dflash_jax.spec import DraftConfig, TargetConfig
from pallas_kernels.lib.timing import copy_bandwidth, environment

HELP = "measure draft-verify rounds of the engine alone, with random weights of a model's exact shapes"
PREFILL_REPEATS = 3
FLAGS = {  # by title of their group in `--help`
    "models": (
        *("model", "draft_model", "draft_sliding_window", "plain", "num_speculative_tokens", "num_accepted_tokens"),
        *("dtype", "target_quantization"),
    ),
    "cells": (
        *("batch_size", "context", "temperature", "output_len", "warmup_rounds", "kv_cache_dtype"),
        *("draft_kv_cache_dtype", "draft_quantization", "tensor_parallel_size", "prefill"),
    ),
    "engine": (
        *("max_model_len", "max_num_batched_tokens", "page_size", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    ),
    "result": ("no_trace", "trace_rounds", "trace_dir", "baseline", "output"),
}


@dataclass(frozen=True)
class Cell:
    """One measurement; cells with the same engine share weights and cache.

    Attributes:
        batch_size: sequences that decode.
        context: tokens of each when the measurement begins.
        temperature: at which they are sampled; 0 is greedy.
    """

    batch_size: int
    context: int
    temperature: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: the models', the cells', the engine's and the report's."""
    several = {
        name: {"nargs": "+", "default": [default_of(EngineArgs, name)]}
        for name in ("kv_cache_dtype", "tensor_parallel_size")
    }
    changes: dict[str, dict[str, Any]] = {
        "model": {"help": f"{', '.join(PRESETS)}, or a folder with a config.json (default: qwen3-8b)"},
        "num_speculative_tokens": {"help": "drafts verified in each round (default: the whole block)"},
        "max_model_len": {"help": "tokens of the longest request (default: what the cells need)"},
        **several,
    }
    for title, names in FLAGS.items():
        group = parser.add_argument_group(title)
        for name in names:
            owner = RoundOptions if name in options_of(RoundOptions) else EngineArgs
            add_option(group, owner, name, **changes.get(name, {}))


def run(args: argparse.Namespace) -> int:
    """Measure every cell, print and write; returns 1 if a cell failed, compiled, or kept another number of drafts.

    Raises:
        DFlashError: an option is wrong.
    """
    path, baseline = args.output, round_report.load_baseline(args.baseline)
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path} is not a file in an existing folder; make the folder first.")
    target, draft = configs_of(args.model, args.draft_model, sliding_window=args.draft_sliding_window)
    _check(args, draft)
    drafter = None if args.plain else draft
    with phase("starting the devices"):
        claim_device_memory()
        enable_compilation_cache()
        plans = _plans(args, target, drafter)
        bandwidth = copy_bandwidth() if jax.default_backend() != "cpu" else None
    console, rows = Console(), []
    for row in _measure_all(args, target, drafter, plans, bandwidth):
        row["baseline"] = round_report.beside(row, baseline)
        rows.append(row)
        console.print(f"{round_report.name_of(row)}: {_headline(row)}", markup=False, soft_wrap=True)
        if path is not None:  # after every cell: an interrupted run keeps the finished ones
            _write(path, args, rows, bandwidth)
    for text in round_report.tables(rows):
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
    problems = [f"{round_report.name_of(row)}: {problem}" for row in rows for problem in _problems(row, args)]
    for problem in problems:
        console.print(f"warning: {problem}", style="yellow", markup=False, soft_wrap=True)
    return 1 if problems else 0


def _check(args: argparse.Namespace, draft: DraftConfig) -> None:
    """Raise ConfigError for what the engine would not refuse."""
    options_from(args, RoundOptions)  # checks them
    drafts = draft.block_size - 1 if args.num_speculative_tokens is None else args.num_speculative_tokens
    if not args.plain and not 0 <= args.num_accepted_tokens <= drafts:
        raise ConfigError(
            f"--num-accepted-tokens {args.num_accepted_tokens} must be from 0 to {drafts}, the drafts of a round."
        )
    if args.plain and args.num_speculative_tokens is not None:
        raise ConfigError(f"--num-speculative-tokens {args.num_speculative_tokens} drafts nothing with --plain.")
    if _rounds(args) <= args.warmup_rounds:
        raise ConfigError(
            f"--output-len {args.output_len} takes {_rounds(args)} rounds, and --warmup-rounds {args.warmup_rounds} "
            "leaves none to time; raise the one or lower the other."
        )


def _rounds(args: argparse.Namespace) -> int:
    """Number of rounds in which a request decodes its tokens."""
    return -(-args.output_len // (1 if args.plain else args.num_accepted_tokens + 1))


def _max_tokens(args: argparse.Namespace) -> int:
    """Limit of tokens of a request, large enough that none ends while it is measured."""
    per_round = 1 if args.plain else args.num_accepted_tokens + 1
    return (_rounds(args) + (0 if args.no_trace else args.trace_rounds) + 4) * per_round


def _plans(
    args: argparse.Namespace, target: TargetConfig, draft: DraftConfig | None
) -> list[tuple[Mesh, list[EngineConfig]]]:
    """Meshes, and for each the engines that run on it one after another with the same weights."""
    on_cpu = jax.default_backend() == "cpu"
    return [
        (
            Mesh.of(devices),
            [
                EngineConfig.of(_engine_args(args, draft, dtype, devices), target, draft, on_cpu=on_cpu)
                for dtype in args.kv_cache_dtype
            ],
        )
        for devices in args.tensor_parallel_size
    ]


def _measure_all(
    args: argparse.Namespace,
    target: TargetConfig,
    draft: DraftConfig | None,
    plans: list[tuple[Mesh, list[EngineConfig]]],
    bandwidth: float | None,
) -> Iterator[dict[str, Any]]:
    """A row for each cell. Only one engine and one set of weights exist at a time."""
    sizes = itertools.product(args.context, args.batch_size, args.temperature)
    cells = [("decode", Cell(batch, context, temperature)) for context, batch, temperature in sizes]
    cells += [("prefill", Cell(1, context)) for context in args.context if args.prefill]
    number, total = 0, len(cells) * sum(len(configs) for _, configs in plans)
    for mesh, configs in plans:
        target, draft = target.over(mesh.size), None if draft is None else draft.over(mesh.size)
        _check_machine(args, target, draft, configs[0])
        with phase("making random weights"):
            model = _random_model(target, configs[0], mesh, seed=0, quantization=args.target_quantization)
            model = screened(model, draft, configs[0], mesh)
            drafter = None if draft is None else _random_drafter(draft, model, configs[0], mesh)
        for config in configs:
            with phase("making the engine"):
                budget = round_report.kv_budget(target, draft, config)
                engine = RoundEngine(model, drafter, mesh=mesh, config=config)
                engine.keep(args.num_accepted_tokens)
            for kind, cell in cells:
                number += 1
                with phase(f"measuring {number} of {total}, {kind} of {cell.batch_size} x {cell.context}") as now:
                    row = _row(args, engine, cell, kind, bandwidth, budget, now)
                yield row
            del engine
            gc.collect()  # the next engine needs the memory of these pools
        del model, drafter
        gc.collect()


def _check_machine(
    args: argparse.Namespace, target: TargetConfig, draft: DraftConfig | None, config: EngineConfig
) -> None:
    """Raise ConfigError if the device is a CPU, and the memory of its machine does not hold the weights."""
    bits = {None: None, "int4": 4, "fp8": 8}[args.target_quantization]
    size, what = parameter_bytes(target, config.dtype, bits), f"the parameters of {args.model}"
    if draft is not None:
        size += draft_bytes(target, draft, config.dtype, config.draft_quantization)
        what += " and its drafter"
    check_machine_memory(what, size, config.dtype)


def _random_model(
    model: TargetConfig | DraftConfig, config: EngineConfig, mesh: Mesh, *, seed: int, quantization: str | None = None
) -> Model:
    with explain_out_of_memory():
        return Model(model, random_params(model, config.dtype, mesh, seed, quantization), None)


def _random_drafter(draft: DraftConfig, target: Model, config: EngineConfig, mesh: Mesh) -> Model:
    """A drafter in the form that it runs in; its unquantised weights are freed before there is an engine."""
    if config.draft_quantization == "int4":
        return _random_model(draft, config, mesh, seed=1, quantization="int4")
    drafter = _random_model(draft, config, mesh, seed=1)
    return drafter if config.draft_quantization is None else quantized(drafter, target, mesh)


def _engine_args(args: argparse.Namespace, draft: DraftConfig | None, kv_cache_dtype: str, devices: int) -> EngineArgs:
    drafts = args.num_speculative_tokens
    if draft is not None and drafts is None:
        drafts = draft.block_size - 1  # None lets the engine choose
    return EngineArgs(
        dtype=args.dtype,
        kv_cache_dtype=kv_cache_dtype,
        draft_kv_cache_dtype=args.draft_kv_cache_dtype,
        draft_quantization=args.draft_quantization,
        max_model_len=args.max_model_len or max(args.context) + _max_tokens(args),
        max_num_seqs=max([1, *args.batch_size]),
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=drafts,
        tensor_parallel_size=devices,
        page_size=args.page_size,
        enable_prefix_caching=False,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        compile_at_start=False,  # the first round of a cell compiles what the cell needs
    )


def _row(
    args: argparse.Namespace,
    engine: RoundEngine,
    cell: Cell,
    kind: str,
    bandwidth: float | None,
    budget: int,
    now: Phase,
) -> dict[str, Any]:
    """The row of one cell, measured or failed."""
    config = engine.config
    row = {
        "kind": kind,
        "target_quantization": args.target_quantization,
        "speculation": engine.spec.draft is not None,
        "batch_size": cell.batch_size,
        "context": cell.context,
        "temperature": cell.temperature,
        "kv_cache_dtype": config.kv_cache_dtype.name,
        "draft_kv_cache_dtype": config.draft_kv_cache_dtype.name,
        "draft_quantization": config.draft_quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    try:
        if kind == "prefill":
            figures = {"prefill_ms": _percentiles(time_prefill(engine, cell.context, PREFILL_REPEATS))}
        else:
            figures = _decode_cell(args, engine, cell, bandwidth, budget, now)
        return row | figures
    except DFlashError as error:
        return row | {"failed": str(error)}
    except jax.errors.JaxRuntimeError as error:
        traceback.print_exc()  # its first line may say no more than that something failed
        return row | {"failed": str(error).splitlines()[0]}
    finally:
        finish(engine, [*engine.scheduler.waiting, *(r.sequence for r in engine.scheduler.running)])


def _decode_cell(
    args: argparse.Namespace, engine: RoundEngine, cell: Cell, bandwidth: float | None, budget: int, now: Phase
) -> dict[str, Any]:
    """Figures of one cell."""
    now.note = "compiling and timing"
    vocab_size, sampling = engine.spec.target.vocab_size, {"temperature": cell.temperature}
    sequences = random_sequences(cell.batch_size, cell.context, _max_tokens(args), vocab_size, **sampling)
    rounds = decode(engine, sequences, warmup=args.warmup_rounds, rounds=_rounds(args) - args.warmup_rounds)
    step_ms = _percentiles(rounds.seconds)
    length = 1 if engine.spec.draft is None else engine.config.num_speculative_tokens + 1
    touched = experts_touched(engine, sequences, length)
    parts = round_report.weight_bytes(engine, touched) | {
        "kv": round_report.kv_bytes(engine, cell.batch_size, rounds.context)
    }
    if engine.spec.target.recurrent_layers:
        parts["states"] = round_report.state_bytes(engine, cell.batch_size)
    read = sum(parts.values())
    now.note = "tracing"
    trace = None if args.no_trace else _trace(args, engine, sequences)
    if trace is not None:
        trace["idle_ms"] = step_ms["median"] - trace["busy_ms"]
    return {
        "step_ms": step_ms,
        "rounds": len(rounds.seconds),
        "tokens_per_s": rounds.num_tokens / sum(rounds.seconds),
        "tokens_per_round": list(rounds.kept),
        "experts_touched": touched,
        "kv_tokens": round_report.kv_tokens(engine, budget, cell.context),
        "kv_gib": budget / 2**30,
        "read_gb": {name: size / 1e9 for name, size in {**parts, "total": read}.items()},
        "copy_bandwidth_fraction": bandwidth and read / (step_ms["median"] / 1e3) / bandwidth,
        "prefill_s": rounds.prefill_seconds,
        "compiles": rounds.compiles,
        "preemptions": rounds.preemptions,
        "trace": trace,
    }


def _trace(args: argparse.Namespace, engine: RoundEngine, sequences: list[Any]) -> dict[str, Any] | None:
    """Where the time of some further rounds goes; None if the trace does not show it."""
    with ExitStack() as stack:
        folder = args.trace_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine.settle()
        with round_trace.tracing(folder):
            for _ in range(args.trace_rounds):
                step(engine, sequences)
            engine.settle()
        return round_trace.account(folder, args.trace_rounds)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile in milliseconds."""
    p10, median, p90 = np.percentile([1e3 * s for s in seconds], [10, 50, 90]).tolist()
    return {"median": median, "p10": p10, "p90": p90}


def _problems(row: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Reasons why a row does not follow the protocol."""
    if "failed" in row:
        return [f"not measured: {row['failed']}"]
    if row["kind"] == "prefill":
        return []
    expected = [args.num_accepted_tokens + 1 if row["speculation"] else 1]
    problems = []
    if row["tokens_per_round"] != expected:
        problems.append(f"rounds emitted {row['tokens_per_round']} tokens, and {expected} was asked for.")
    if row["compiles"] or row["preemptions"]:
        problems.append(f"{row['compiles']} programs compiled and {row['preemptions']} requests lost their pages.")
    return problems


def _headline(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"not measured: {row['failed']}"
    times = row["prefill_ms" if row["kind"] == "prefill" else "step_ms"]
    return f"{times['median']:.3f} ms (p10 {times['p10']:.3f}, p90 {times['p90']:.3f})"


def _write(path: Path, args: argparse.Namespace, rows: list[dict[str, Any]], bandwidth: float | None) -> None:
    """Write the result.

    Raises:
        ConfigError: the file cannot be written.
    """
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if name != "run"}
    result = environment() | {
        "command": shlex.join(["python", "-m", "dflash_jax.bench", *sys.argv[1:]]),
        "settings": settings,
        "copy_bandwidth_gb_s": bandwidth and bandwidth / 1e9,
        "rows": rows,
    }
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written ({error}).") from error
