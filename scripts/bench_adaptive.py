"""Speculation that pays nothing must cost nothing: tokens/s plain, and with adaptive length.

"unused" has a drafter and never drafts: what it lacks to plain is the price of the drafter's context, and what
"adaptive" lacks to it that of choosing and trying. "fixed" verifies every block.

Random weights of a Qwen3-8B and of a five-layer drafter, made on the device: no draft is ever right, the worst case.

    python scripts/bench_adaptive.py --batches 1 4 16 --context 1024 --json scripts/bench_adaptive_h200.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.checkpoint.loader import Params
from dflash_jax.config import DraftConfig, EngineArgs, EngineConfig, TargetConfig, draft_config, target_config
from dflash_jax.core import CompletionOutput, SamplingParams
from dflash_jax.engine.adaptive import BlockLengths
from dflash_jax.engine.engine import Engine, Model
from dflash_jax.engine.sequence import Sequence
from dflash_jax.engine.sharding import Mesh
from dflash_jax.env import claim_device_memory, enable_compilation_cache
from dflash_jax.models.tables import checkpoint_table, initializer, layout_axes, parameter_path, sizes
from pallas_kernels.timing import save

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DRAFT = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151_669},
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 36, "vocab_size": 1024}


def random_params(config: TargetConfig | DraftConfig, dtype: jnp.dtype, seed: int) -> Params:
    """Random weights of the exact shapes, made on the device."""
    params: Params = {}
    letters, key = sizes(config), jax.random.key(seed)
    for i, (name, axes) in enumerate(checkpoint_table(config).items()):
        shape = tuple(letters[a] for a in layout_axes(axes))
        *outer, leaf = parameter_path(name)
        node = params
        for part in outer:
            node = node.setdefault(part, {})
        node[leaf] = initializer(name)(jax.random.fold_in(key, i), shape, dtype)
    return params


class CountedLengths(BlockLengths):
    """Counts what it chooses."""

    def __init__(self, lengths: tuple[int, ...], max_num_seqs: int):
        super().__init__(lengths, max_num_seqs)
        self.chosen: Counter[int] = Counter()

    def choose(self, rows: int, slots: Seq[int]) -> int:
        """As usual."""
        length = super().choose(rows, slots)
        self.chosen[length] += 1
        return length


def compile_for(engine: Engine, batches: list[int], context: int, tokens: int) -> None:
    """Leave the engine the shapes that this load needs, and compile these alone."""
    pages = engine.layout.pages_for(context + tokens + 2 * engine.spec.block)
    shapes = engine.shapes
    width = max(size for size in shapes.chunks if size <= max(context, shapes.chunks[0]))
    engine.shapes = replace(
        shapes, batches=tuple(sorted({1, *batches})), chunks=(width,), tables=(shapes.table(pages),)
    )
    engine.compile()


def run(engine: Engine, batch: int, context: int, tokens: int, *, speculation: bool) -> dict[str, Any]:
    """Decode `tokens` for each of a batch of random prompts; times the second half, when all decode."""
    rng, vocab_size = random.Random(0), engine.spec.target.vocab_size
    sequences = [
        Sequence(
            prompt_token_ids=rng.choices(range(vocab_size), k=context),
            params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=speculation),
            seed=0,
            eos_token_ids=(),
            max_new_tokens=tokens,
            tokenizer=None,
            output=CompletionOutput(index=0),
            cache_salt=None,
        )
        for _ in range(batch)
    ]
    engine.add(sequences)
    lengths = engine.lengths
    half = None
    intervals, last, emitted = [], 0.0, 0
    while not engine.is_idle:
        engine.step()
        now, before = time.perf_counter(), emitted
        emitted = sum(len(s.output.token_ids) for s in sequences)
        if min(len(s.output.token_ids) for s in sequences) >= tokens // 2 and not any(s.finished for s in sequences):
            if half is None:
                half = now, emitted
                if isinstance(lengths, CountedLengths):
                    lengths.chosen.clear()
            elif emitted > before:
                intervals.append(now - last)
            end = now, emitted
        last = now
    assert half is not None
    accepted = [length for s in sequences for length in s.acceptance_lengths]
    return {
        "tokens_per_s": (end[1] - half[1]) / (end[0] - half[0]),
        "step_ms": 1e3 * statistics.median(intervals),
        "acceptance_length": sum(accepted) / len(accepted),
        "rounds_by_length": dict(sorted(lengths.chosen.items())) if isinstance(lengths, CountedLengths) else {},
        "estimated_ms_by_length": [] if lengths is None else lengths.milliseconds(batch),
    }


def measure(name: str, models: tuple[Model, Model], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All batches and repeats of one kind of speculation; each repeat knows of nothing that was learned before."""
    target, draft = models[0], None if name == "plain" else models[1]
    assert isinstance(target.config, TargetConfig)
    given = EngineArgs(
        max_num_seqs=max(args.batches),
        max_model_len=args.context + args.tokens + 64,
        num_speculative_tokens=15 if name == "fixed" else None,
        kv_cache_dtype=args.kv_cache_dtype,
        compile_at_start=False,
    )
    draft_config = draft.config if draft and isinstance(draft.config, DraftConfig) else None
    config = EngineConfig.of(given, target.config, draft_config)
    started = time.perf_counter()
    engine = Engine(target, draft, mesh=Mesh.of(1), config=config)
    compile_for(engine, args.batches, args.context, args.tokens)
    row = {"speculation": name, "start_s": time.perf_counter() - started}
    rows = []
    for repeat in range(args.repeats):
        if engine.lengths is not None:
            engine.lengths = CountedLengths(engine.shapes.lengths, config.max_num_seqs)
        for batch in args.batches:
            engine.scheduler.flush_cache()
            found = run(engine, batch, args.context, args.tokens, speculation=name != "unused")
            rows.append(row | {"batch": batch, "repeat": repeat, "compiles": engine.num_compiles} | found)
            print(rows[-1], flush=True)
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its speed over the median of plain decoding at its batch size, if that was run; print medians."""
    speeds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        speeds[row["speculation"], row["batch"]].append(row["tokens_per_s"])
    for row in rows:
        if plain := speeds.get(("plain", row["batch"])):
            row["over_plain"] = row["tokens_per_s"] / statistics.median(plain)
    for (name, batch), found in speeds.items():
        median, plain = statistics.median(found), speeds.get(("plain", batch))
        over = f", {median / statistics.median(plain):.3f} of plain" if plain else ""
        print(f"{name:9} batch {batch:3}: {median:.1f} tokens/s{over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--speculation", nargs="+", default=["plain", "unused", "adaptive"])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="to decode, of which the second half is timed")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median is compared")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--small", action="store_true", help="a small model, to try the script on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    claim_device_memory()
    enable_compilation_cache()
    small = SMALL if args.small else {}
    target, draft = (
        target_config(TARGET | small),
        draft_config(
            DRAFT
            | {k: v for k, v in small.items() if k != "num_hidden_layers"}
            | ({"dflash_config": DRAFT["dflash_config"] | {"mask_token_id": 1023}} if args.small else {})
        ),
    )
    dtype = jnp.dtype("bfloat16")
    models = Model(target, random_params(target, dtype, 0), None), Model(draft, random_params(draft, dtype, 1), None)
    rows = []
    for name in args.speculation:
        rows += measure(name, models, args)
    compare(rows)
    if args.json:
        save(args.json, rows, command=" ".join(sys.argv))


if __name__ == "__main__":
    main()
