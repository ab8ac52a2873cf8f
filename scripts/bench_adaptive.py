"""Measure what choosing block lengths gains and costs: tokens/s plain, with fixed lengths, and with an adaptive one.

"unused" has a drafter and never drafts: its loss against plain decoding is the cost of the drafter's context. The
further loss of "adaptive" is the cost of choosing lengths and of trials. "fixed" verifies every block, "fixed-8" eight
tokens of it. Weights are random, made on the device, so no draft is ever right: the worst case. `--acceptance 0.9`
keeps each draft with this probability after those before it, whatever the target says (7 of 15 on average); requests
are sampled then, since the tokens are what decides. Some hundred rounds may be lucky by 4 %, so `expected_tokens_per_s`
counts what rounds of these lengths emit on average, in the seconds that they took.

    python scripts/bench_adaptive.py --batches 1 4 16 --context 1024 --json scripts/bench_adaptive_h200.json
    python scripts/bench_adaptive.py --model qwen3.5-35b-a3b --draft-quantization fp8 --batches 1 --acceptance 0.9 \
        --speculation fixed-4 fixed-8 fixed adaptive --json FILE
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.base.env import claim_device_memory
from dflash_jax.bench.round_engine import random_sequences
from dflash_jax.bench.round_models import PRESETS, configs_of, random_params
from dflash_jax.engine.device.acceptance import accepted
from dflash_jax.engine.device.model import Model, quantized
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.adaptive import BlockLengths
from dflash_jax.engine.host.inputs import load_of
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.options.flags import add_option
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.parallel.platform import enable_compilation_cache
from dflash_jax.spec import DraftConfig, TargetConfig
from pallas_kernels.lib.timing import save

SLIDING_WINDOW = 2048  # tokens; all layers of Qwen3-8B's drafter but the last slide
KNUTH = 2_654_435_769  # 2**32 over the golden ratio: products with it scatter token ids


def keep_by_chance(tokens: Int[Array, "B T"], drafts: Int[Array, "B R"], *, acceptance: float) -> Int[Array, " B"]:
    """A replacement of `accepted`: each draft is kept with this probability after those before it.

    Chance is a hash of the first token and the first draft, so that a part of the block keeps what the whole would.
    """
    if drafts.shape[1] == 0:
        return jnp.zeros(len(drafts), jnp.int32)
    hashed = (tokens[:, 0].astype(jnp.uint32) * 31 + drafts[:, 0].astype(jnp.uint32) + 1) * jnp.uint32(KNUTH)
    hashed = (hashed ^ (hashed >> 15)) * jnp.uint32(KNUTH)
    uniform = ((hashed >> 8).astype(jnp.float32) + 0.5) / 2**24
    kept = jnp.floor(jnp.log(uniform) / jnp.log(acceptance)).astype(jnp.int32)
    kept, _ = jax.lax.optimization_barrier((jnp.minimum(kept, drafts.shape[1]), accepted(tokens, drafts)))
    return kept


class CountedLengths(BlockLengths):
    """Block lengths that also count how often each is chosen."""

    def __init__(self, lengths: tuple[int, ...], max_num_seqs: int):
        super().__init__(lengths, max_num_seqs)
        self.chosen: Counter[int] = Counter()

    def choose_ready(
        self, rows: int, slots: Seq[int], offered: Seq[int], ready: Seq[int], *, is_timed: bool = True
    ) -> tuple[int, int]:
        """Choose a length, and count it."""
        length, wanted = super().choose_ready(rows, slots, offered, ready, is_timed=is_timed)
        self.chosen[length] += 1
        return length, wanted


def requests(engine: Engine, batch: int, args: argparse.Namespace, *, speculation: bool) -> list[Sequence]:
    """A batch of random prompts."""
    options = {"speculation": speculation} | ({} if args.acceptance is None else {"temperature": 1.0})
    return random_sequences(batch, args.context, args.tokens, engine.spec.target.vocab_size, **options)


def expected_tokens(length: int, acceptance: float) -> float:
    """Tokens that a round of a length emits on average."""
    return sum(acceptance**accepted for accepted in range(length))


def run(engine: Engine, sequences: list[Sequence], acceptance: float | None) -> dict[str, Any]:
    """Decode all tokens of some requests; the second half, in which all decode, is timed."""
    batch, tokens = len(sequences), sequences[0].max_new_tokens
    engine.add(sequences)
    lengths = engine.planner.lengths
    half, timed_from = None, [0] * batch
    intervals, last, emitted = [], 0.0, 0
    while not engine.is_idle:
        engine.step()
        now, before = time.perf_counter(), emitted
        emitted = sum(len(s.output.token_ids) for s in sequences)
        if min(len(s.output.token_ids) for s in sequences) >= tokens // 2 and not any(s.finished for s in sequences):
            if half is None:
                half, timed_from = (now, emitted), [len(s.draft_lengths) for s in sequences]
                if isinstance(lengths, CountedLengths):
                    lengths.chosen.clear()
            elif emitted > before:
                intervals.append(now - last)
            end, timed_to = (now, emitted), [len(s.draft_lengths) for s in sequences]
        last = now
    assert half is not None
    seconds = end[0] - half[0]
    spans = zip(sequences, timed_from, timed_to, strict=True)
    drafts = [number for s, first, last in spans for number in s.draft_lengths[first:last]]
    expected = None if acceptance is None else sum(expected_tokens(1 + number, acceptance) for number in drafts)
    accepted = [length for s in sequences for length in s.acceptance_lengths]
    return {
        "tokens_per_s": (end[1] - half[1]) / seconds,
        "expected_tokens_per_s": None if expected is None else expected / seconds,
        "rounds": len(drafts) // batch,
        "step_ms": 1e3 * statistics.median(intervals),
        "acceptance_length": sum(accepted) / len(accepted),
        "rounds_by_length": dict(sorted(lengths.chosen.items())) if isinstance(lengths, CountedLengths) else {},
        "estimated_ms_by_length": [] if lengths is None else lengths.milliseconds(batch),
    }


def measure(name: str, models: Seq[Model], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all batches and repeats of one kind of speculation; each repeat starts without learned lengths."""
    target, draft = models[0], None if name == "plain" else models[1]
    assert isinstance(target.config, TargetConfig)
    draft_config = draft.config if draft and isinstance(draft.config, DraftConfig) else None
    engine_args = EngineArgs(
        max_num_seqs=max(args.batches),
        max_model_len=args.context + args.tokens + 64,
        num_speculative_tokens=fixed_drafts(name, draft_config.block_size) if draft_config else None,
        kv_cache_dtype=args.kv_cache_dtype,
        draft_quantization=args.draft_quantization if draft_config else None,
        compile_at_start=False,
    )
    config = EngineConfig.of(engine_args, target.config, draft_config)
    started = time.perf_counter()
    engine = Engine(target, draft, mesh=Mesh.of(1), config=config)
    if args.acceptance is not None and draft is not None:
        engine.runner.confirm = partial(keep_by_chance, acceptance=args.acceptance)
    speculates = name != "unused"
    engine.compile(load_of(requests(engine, max(args.batches), args, speculation=speculates)))  # and nothing else
    row = {"speculation": name, "start_s": time.perf_counter() - started}
    rows = []
    for repeat in range(args.repeats):
        if engine.planner.lengths is not None:
            engine.planner.lengths = CountedLengths(engine.shapes.lengths, config.max_num_seqs)
        for batch in args.batches:
            engine.scheduler.flush_cache()
            sequences = requests(engine, batch, args, speculation=speculates)
            figures = run(engine, sequences, args.acceptance)
            rows.append(row | {"batch": batch, "repeat": repeat, "compiles": engine.num_compiles} | figures)
            print(rows[-1], flush=True)
    return rows


def fixed_drafts(name: str, block: int) -> int | None:
    """Drafts of each round of a kind of speculation; None where they are chosen."""
    kind, _, length = name.partition("-")
    return int(length or block) - 1 if kind == "fixed" else None


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its speed over the median of plain decoding at its batch size, if measured; print medians."""
    speeds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        speeds[row["speculation"], row["batch"]].append(row["tokens_per_s"])
    for row in rows:
        if plain := speeds.get(("plain", row["batch"])):
            row["over_plain"] = row["tokens_per_s"] / statistics.median(plain)
    for (name, batch), samples in speeds.items():
        median, plain = statistics.median(samples), speeds.get(("plain", batch))
        over = f", {median / statistics.median(plain):.3f} of plain" if plain else ""
        print(f"{name:9} batch {batch:3}: {median:.1f} tokens/s{over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--speculation", nargs="+", default=["plain", "unused", "adaptive"])
    parser.add_argument("--model", choices=PRESETS, default="qwen3-8b")
    parser.add_argument("--acceptance", type=float, help="probability that a draft is kept after those before it")
    parser.add_argument("--target-quantization", choices=["int4", "fp8"], help="of the target's random matrices")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="to decode, of which the second half is timed")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median is compared")
    add_option(parser, EngineArgs, "kv_cache_dtype")
    add_option(parser, EngineArgs, "draft_quantization")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    claim_device_memory()
    enable_compilation_cache()
    window = SLIDING_WINDOW if args.model == "qwen3-8b" else None
    target, draft = configs_of(args.model, None, sliding_window=window)
    dtype, mesh = jnp.dtype(target.dtype), Mesh.of(1)
    models = [
        Model(target, random_params(target, dtype, mesh, 0, args.target_quantization), None),
        Model(draft, random_params(draft, dtype, mesh, 1, "int4" if args.draft_quantization == "int4" else None), None),
    ]
    if args.draft_quantization == "fp8":
        models[1] = quantized(models[1], models[0], mesh)
    rows = []
    for name in args.speculation:
        rows += measure(name, models, args)
        compare(rows)
        if args.json:  # after each: an interrupted run keeps them
            save(args.json, rows, command=" ".join(sys.argv))


if __name__ == "__main__":
    main()
