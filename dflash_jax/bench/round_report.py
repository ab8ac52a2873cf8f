"""The report of `bench round`: bytes that a round must read, vLLM's figures beside ours, and tables for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from dflash_jax.base.errors import ConfigError
from dflash_jax.engine.device.memory import bytes_per_token, capacity_of, free_bytes
from dflash_jax.engine.engine import Engine
from dflash_jax.options import EngineConfig
from dflash_jax.spec import DecoderConfig, DraftConfig
from dflash_jax.state.recurrent import row_bytes
from dflash_jax.weights.formats.fp8 import CONTEXT
from pallas_kernels.lib.timing import table

BASELINE_FIELDS = {"draft", "kv", "batch", "ctx", "tp", "decode_step_ms_median", "ttft_max_s"}
BASELINE_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


def weight_bytes(engine: Engine, touched: float | None) -> dict[str, int]:
    """Bytes of weights that the first device must read in a round: each weight once, and the head once a pass.

    Args:
        engine: the engine.
        touched: experts that a round reads in each layer with experts; None for a target without.

    Returns:
        `target` with its head, but without its experts, which are `experts`; with a drafter `draft`, and `draft_head`
        for its own pass over a head. Embeddings are left out: a round reads a few rows of them. A head with an 8-bit
        copy counts as the copy, which most rounds read in its place.
    """
    target, draft = engine.runner.params
    head = target.get("screen", target.get("lm_head", target["embed_tokens"]))
    layers = {name: value for name, value in target.items() if name not in ("lm_head", "embed_tokens", "screen")}
    sizes = {"target": _on_first_device(layers) + _on_first_device(head)}
    if touched is not None:
        assert engine.spec.target.experts is not None
        of_experts = sum(_on_first_device(layer["mlp"].get("experts", {})) for layer in _layers(layers))
        sizes["target"] -= of_experts
        sizes["experts"] = round(of_experts * touched / engine.spec.target.experts.count)
    if draft:
        # What an fp8 drafter has for its context alone is a copy of its keys' and values' projections.
        copies = {"lm_head", CONTEXT, f"{CONTEXT}_bias"}
        sizes["draft"] = _on_first_device({name: value for name, value in draft.items() if name not in copies})
        sizes["draft_head"] = _on_first_device(draft.get("lm_head", head))
    return sizes


def _layers(params: Any) -> list[Any]:
    return [value for name, value in params.items() if name.startswith("layers_")]


def _on_first_device(tree: Any) -> int:
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


def kv_bytes(engine: Engine, batch_size: int, context: float) -> int:
    """Bytes of keys and values that one device must read in a round over sequences of `context` tokens."""
    config, spec = engine.config, engine.spec
    devices = config.tensor_parallel_size
    bytes_a_sequence = _kv_bytes(spec.target, config.kv_cache_dtype, devices, context)
    if spec.draft is not None:
        bytes_a_sequence += _kv_bytes(spec.draft, config.draft_kv_cache_dtype, devices, context)
    return round(batch_size * bytes_a_sequence)


def _kv_bytes(model: DecoderConfig, dtype: Any, devices: int, context: float) -> float:
    windows = [model.layers[i].window for i in model.attention_layers]
    tokens = sum(context if window is None else min(context, window) for window in windows)
    return tokens * bytes_per_token(model, dtype, devices) / devices


def state_bytes(engine: Engine, batch_size: int) -> int:
    """Bytes of recurrent states that one device must read in a round, without tapes; it writes as many."""
    target, mesh = engine.spec.target, engine.mesh
    if target.gated_delta is None:
        return 0
    devices = mesh.size if mesh.share(target.gated_delta.key_heads) else 1
    return batch_size * row_bytes(target, 0, engine.config.dtype) // devices


def kv_tokens(engine: Engine, budget: int, context: int) -> int:
    """Tokens of sequences of `context` tokens that fit into a budget of bytes on all devices, beside states."""
    spec, config = engine.spec, engine.config
    capacity = capacity_of(spec.target, spec.draft, engine.layout, config)
    return (budget - config.max_num_seqs * capacity.state_bytes) * context // capacity.sequence_bytes(context)


def kv_budget(target: Any, draft: DraftConfig | None, config: EngineConfig) -> int:
    """Bytes for keys and values on all devices; call it when parameters are loaded and pools are not made yet."""
    return config.kv_cache_memory_bytes or free_bytes(target, draft, config)


def load_baseline(path: Path | None) -> list[dict[str, Any]]:
    """Rows of figures of another engine, in the form of `shared/baselines`; none without a file.

    Raises:
        ConfigError: there is no such file, or no rows in it.
    """
    if path is None:
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if missing := BASELINE_FIELDS - row.keys():
                raise ValueError(f"a row without {', '.join(sorted(missing))}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--baseline {path} holds no rows of figures ({error!r}); give a baseline's JSON.") from error
    return rows


def beside(row: dict[str, Any], baseline: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of a baseline that measured the same cell; None if there is none, as of sampled rounds."""
    if row.get("temperature"):
        return None
    cell = (row["speculation"], row["kv_cache_dtype"], row["batch_size"], row["context"], row["tensor_parallel_size"])
    for other in baseline:
        dtype = BASELINE_DTYPES.get(other["kv"], other["kv"])
        if cell == (other["draft"] is not None, dtype, other["batch"], other["ctx"], other["tp"]):
            return other
    return None


def name_of(row: dict[str, Any]) -> str:
    """A short name of a cell."""
    kind = "prefill" if row["kind"] == "prefill" else "DFlash" if row["speculation"] else "plain"
    batch = "" if row["kind"] == "prefill" else f" x{row['batch_size']}"
    models = (("target", row.get("target_quantization")), ("drafter", row["draft_quantization"]))
    notes = "".join(f", {quantization} {model}" for model, quantization in models if quantization)
    notes += f", temperature {row['temperature']:g}" if row.get("temperature") else ""
    return f"{kind}{batch} ctx {row['context']} {row['kv_cache_dtype']} tp{row['tensor_parallel_size']}{notes}"


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of the figures in Markdown: steps, their parts and prefills."""
    done = [row for row in rows if "failed" not in row]
    steps = [row for row in done if row["kind"] == "decode"]
    traced = [row for row in steps if row["trace"]]
    prefills = [row for row in done if row["kind"] == "prefill"]
    parts = []
    if steps:
        parts.append(f"Steps while all requests decode:\n\n{table([_step(row) for row in steps])}")
    if traced:
        parts.append(f"Milliseconds of a step, by part:\n\n{table(_parts(traced))}")
    if prefills:
        parts.append(f"Prefill of one prompt:\n\n{table([_prefill(row) for row in prefills])}")
    return parts


def _times(times: dict[str, float], baseline_ms: float | None) -> dict[str, str]:
    ratio = None if baseline_ms is None else baseline_ms / times["median"]
    return {
        **{label: _number(times[name], 3) for label, name in (("ms", "median"), ("p10", "p10"), ("p90", "p90"))},
        "baseline ms": _number(baseline_ms, 3),
        "speedup": _number(ratio, 2),
    }


def _step(row: dict[str, Any]) -> dict[str, str]:
    share, baseline = row["copy_bandwidth_fraction"], row["baseline"]
    return {
        "cell": name_of(row),
        **_times(row["step_ms"], baseline and baseline["decode_step_ms_median"]),
        "tokens/s": _number(row["tokens_per_s"], 1),
        "tokens a round": ", ".join(map(str, row["tokens_per_round"])),
        "GB read": _number(row["read_gb"]["total"], 3),
        "of copy bandwidth": "-" if share is None else f"{share:.1%}",
        **({"experts a layer": _number(row["experts_touched"], 1)} if row["experts_touched"] is not None else {}),
        "KV tokens": f"{row['kv_tokens']:,}",
        "compiles": str(row["compiles"]),
    }


def _prefill(row: dict[str, Any]) -> dict[str, str]:
    baseline = row["baseline"]
    return {"cell": name_of(row), **_times(row["prefill_ms"], baseline and 1e3 * baseline["ttft_max_s"])}


def _parts(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A line for each part, with a column for each cell."""
    names = dict.fromkeys(name for row in rows for name in row["trace"]["parts_ms"])
    lines = {name: [row["trace"]["parts_ms"].get(name, 0.0) for row in rows] for name in names}
    for label, name in {
        "(any of them)": "busy_ms",
        "(none, between programs)": "host_gap_ms",
        "(none, inside programs)": "launch_gap_ms",
        "(none, not traced)": "idle_ms",
    }.items():
        lines[label] = [row["trace"][name] for row in rows]
    cells = [name_of(row) for row in rows]
    return [
        {"part": name, **{cell: _number(ms, 3) for cell, ms in zip(cells, line, strict=True)}}
        for name, line in lines.items()
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
