"""Measure what a round costs the host: `Engine.step` with stubs in place of compiled steps; their results are ready.

    python scripts/bench_host.py [--slots 32] [--case fixed] [--profile] [--json host.json]

The model is of negligible width, but has the layers and the vocabulary of Qwen3-8B and a drafter of sliding layers and
a full one; it runs on every slot. All work of the engine on the host is real. In place of a step an empty program with
the same arguments is enqueued: it uploads host arrays, and costs what handing over the parameters of so many layers
costs. It takes all parameters, while `draft` and `commit` leave out those they do not need. Nothing waits for a device.
The stubs emit tokens of a real text, so that the tokenizer decodes real text.

Times are wall clock: check the load of the machine before using them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dflash_jax import SamplingParams
from dflash_jax.engine import engine as host
from dflash_jax.engine.device.slots import Emitted, FlatParams, Logprobs
from dflash_jax.engine.host import inputs
from dflash_jax.engine.host.adaptive import BlockLengths
from dflash_jax.engine.host.request import Request
from dflash_jax.engine.host.scheduler import Scheduler
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.engine.programs.planner import Planner
from dflash_jax.engine.programs.runner import ModelRunner
from dflash_jax.engine.programs.store import Program, Programs
from dflash_jax.frontend import load
from dflash_jax.options import EngineArgs
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import draft_config, target_config
from dflash_jax.weights.folder import EMBEDDED
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table

ROOT = Path(__file__).resolve().parents[1]
BAR_MS = 1.0  # target of a round of the plain cases at 32 slots
MODEL_LEN, BLOCK, WINDOW, VOCABULARY = 32_768, 16, 2048, 151_936
ALTERNATIVES = 20  # log-probabilities that a step computes for each token, however few are asked for
WARM_UP = 20  # rounds before the measured ones

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": MODEL_LEN,
    "dtype": "bfloat16",
}
TARGET = DECODER | {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "tie_word_embeddings": True,
    "eos_token_id": [151_645, 151_643],
}
DRAFT = DECODER | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "block_size": BLOCK,
    "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": VOCABULARY - 1},
}


@dataclass(frozen=True)
class Case:
    """A load on the engine.

    Attributes:
        drafts: `num_speculative_tokens`; None lets the engine choose.
        context: tokens of each prompt.
        params: sampling parameters of every request, beside greedy sampling and enough tokens to outlast the
            measurement; a sequence that ends is replaced by a new one.
        is_streamed: whether a snapshot of every changed output is taken, as `LLM.stream` does.
    """

    drafts: int | None = BLOCK - 1
    context: int = 1024
    params: dict[str, Any] = field(default_factory=dict)
    is_streamed: bool = False


CASES = {
    "fixed": Case(),
    "adaptive": Case(drafts=None),
    "logprobs": Case(params={"logprobs": 5}),
    "stop": Case(params={"stop": ["</answer>"]}),
    "streamed": Case(is_streamed=True),
    "turnover": Case(params={"max_tokens": 256}),
    "wide tables": Case(params={"max_tokens": None}),
    "long": Case(context=24_576),
    "long streamed": Case(context=24_576, is_streamed=True),
}
PLAIN = ("fixed", "adaptive")


class Clock:
    """Seconds of each part of the work, without those of parts inside of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, with its time added to a part."""

        def watched(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            self._inside.append(0.0)
            try:
                return call(*args, **options)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._inside.pop()
                self._inside[-1] += took

        return watched


PARTS = {  # the class or module and the attribute that do a part, by its name
    "admit": (Scheduler, "admit"),
    "prefill": (host.Engine, "_enqueue_chunk"),
    "reserve": (host.Engine, "_reserve_rounds"),
    "plan": (Planner, "round"),
    "choose": (BlockLengths, "choose_ready"),
    "tables": (inputs, "tables_of"),
    "round": (ModelRunner, "greedy_round"),
    "commit": (ModelRunner, "commit"),
    "push": (host.Engine, "_push"),
    "read": (host.Engine, "_read"),
    "learn": (host.Engine, "_learn"),
    "take": (host, "take_emitted"),
    "text": (Sequence, "extend"),
    "hash": (Scheduler, "remember"),
    "snapshot": (Request, "output"),
}
DISPATCH = "dispatch"
DEVICE = "device"  # time of the stubs themselves, which is not counted


class Stubs:
    """Steps that compute nothing, in place of compiled programs."""

    def __init__(self, clock: Clock, text: list[int], tokens: int, rng: np.random.Generator):
        self._text, self._tokens, self._rng = np.array(text, np.int32), tokens, rng
        self._dispatch = clock.timed(DISPATCH, self._dispatched)
        self._emit = clock.timed(DEVICE, self._emitted)

    def call(self, program: Program, *arguments: Any) -> Any:
        """Stand in for `Program.__call__`."""
        return getattr(self, program.step)(program, *arguments)

    def draft(self, program, params, slots, caches, tables):
        return ready(len(tables.packed), BLOCK), self._dispatch((params, slots, tables), caches)

    def verify(self, program, params, slots, caches, tables, block):
        caches = self._dispatch((params, slots, tables, block), caches)
        return ready(len(tables.packed), program.static["length"], 1), caches

    def greedy_round(self, program, params, slots, caches, tables):
        slots, caches = self._dispatch((params, tables), (slots, caches))
        return slots, caches, self._emit(len(tables.packed), program.static["length"], False)

    def catch_up(self, program, params, slots, cache, features, tables, deferred):
        return self._dispatch((params, slots, features, tables, deferred), cache)

    def prefill(self, program, params, slots, caches, chunk):
        slots, caches = self._dispatch((params, chunk), (slots, caches))
        rows, width = chunk.tokens.shape
        return slots, caches, ready(rows, 1, 1), ready(rows, width, 1)

    def commit(self, program, params, slots, controls, rows, hidden, block, sampler, allowed, needed):
        slots, controls = self._dispatch((params, rows, hidden, block, sampler, allowed), (slots, controls))
        return slots, controls, self._emit(*hidden.shape[:2], program.static["mode"] == "reported")

    def _dispatched(self, arguments: Any, state: Any) -> Any:
        """Pass flat arrays to an empty program, as `Program.__call__` does, and return the donated ones."""
        first, *others = arguments
        parameters = first.leaves if isinstance(first, FlatParams) else jax.tree.leaves(first)
        donated, structure = jax.tree.flatten(state)
        leaves = [*parameters, *jax.tree.leaves(others), *donated]
        return structure.unflatten(nothing(len(leaves), len(donated))(*leaves))

    def _emitted(self, rows: int, length: int, with_logprobs: bool) -> Emitted:
        """Random tokens of the text, in new arrays each time: reading an array a second time is free."""
        shape, rng = (rows, length), self._rng
        tokens = rng.choice(self._text, shape)
        count = np.minimum(rng.integers(1, 2 * self._tokens, rows), length).astype(np.int32)
        logprobs = None
        if with_logprobs:
            top = -np.sort(rng.random((*shape, ALTERNATIVES), np.float32), axis=-1)
            top_tokens = rng.choice(self._text, (*shape, ALTERNATIVES))
            logprobs = Logprobs(*map(jax.device_put, (top[..., 0], np.ones(shape, np.int32), top, top_tokens)))
        return jax.block_until_ready(jax.device_put(Emitted.of(tokens, count, logprobs)))


@cache
def nothing(number: int, donated: int) -> Any:
    """An empty program that takes `number` arrays and returns the last `donated` ones, which are donated."""
    last = range(number - donated, number)
    return jax.jit(lambda *leaves: [leaves[i] for i in last], donate_argnums=tuple(last), keep_unused=True)


def found_compiled(find: Callable[..., Program]) -> Callable[..., Program]:
    """A `Programs.find` that returns programs which seem to be compiled."""

    def found(*arguments: Any) -> Program:
        program = find(*arguments)
        program.executable = nothing
        return program

    return found


@cache
def ready(*shape: int) -> jax.Array:
    """An array of zeros that has been computed."""
    return jax.block_until_ready(jnp.zeros(shape, jnp.int32))


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target and a drafter of zeros, with the embedded tokenizer.

    The tokens of the tokenizer are the first of the models' larger vocabulary.
    """
    for name, raw, read in (("target", TARGET, target_config), ("draft", DRAFT, draft_config)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(raw))
        config = read(raw)
        shapes = {key: checkpoint_shape(axes, config) for key, axes in checkpoint_table(config).items()}
        zeros = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
        save_file(zeros, folder / name / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "target" / name, folder / "target")
    return folder / "target", folder / "draft"


def measure(case: Case, pair: tuple[Path, Path], args: argparse.Namespace, profiler: cProfile.Profile | None) -> dict:
    """Run a case; returns milliseconds a round, in total and by part."""
    rng = np.random.default_rng(args.seed)
    with mock.patch.object(Mesh, "is_cpu", False):  # rounds are those of accelerators
        frontend, engine = load(
            *pair,
            EngineArgs(max_num_seqs=args.slots, num_speculative_tokens=case.drafts, kv_cache_memory_bytes=1 << 30),
        )
    assert frontend.tokenizer is not None
    text = frontend.tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))
    enough = 2 * BLOCK + int(1.2 * args.tokens * (WARM_UP + args.rounds))
    params = SamplingParams(**{"temperature": 0, "max_tokens": enough} | case.params)
    owner: dict[int, Request] = {}

    def request() -> None:
        request = frontend.request({"prompt_token_ids": rng.choice(text, case.context).tolist()}, params)
        owner[id(request.sequences[0])] = request
        engine.add(request.sequences)

    def step() -> list[Sequence]:
        changed = engine.step()
        if case.is_streamed:
            for sequence in changed:
                owner[id(sequence)].output()
        return changed

    clock, rounds = Clock(), []
    with ExitStack() as patches:
        for part, (whose, name) in PARTS.items():
            patches.enter_context(mock.patch.object(whose, name, clock.timed(part, getattr(whose, name))))
        stubs = Stubs(clock, text, args.tokens, rng)
        patches.enter_context(mock.patch.object(Program, "__call__", lambda *arguments: stubs.call(*arguments)))
        patches.enter_context(mock.patch.object(Programs, "find", found_compiled(Programs.find)))
        step = clock.timed("rest", step)
        for _ in range(args.slots):
            request()
        while any(not running.is_prefilled for running in engine.scheduler.running) or engine.scheduler.waiting:
            step()
        for number in range(WARM_UP + args.rounds):
            clock.seconds.clear()
            compiles = engine.num_compiles
            if profiler and number >= WARM_UP:
                profiler.enable()
            changed = step()
            if profiler:
                profiler.disable()
            if number >= WARM_UP and engine.num_compiles == compiles:  # a round that compiled a program is not counted
                rounds.append({part: 1e3 * seconds for part, seconds in clock.seconds.items() if part != DEVICE})
            for _ in [sequence for sequence in changed if sequence.finished]:
                request()
    totals = [sum(parts.values()) for parts in rounds]
    mean = {part: sum(parts.get(part, 0.0) for parts in rounds) / len(rounds) for part in (*PARTS, DISPATCH, "rest")}
    return {
        "table_width": engine.shapes.table(engine.planner._pages_of(engine.scheduler.running)),
        "median_ms": float(np.median(totals)),
        "without_dispatch_ms": float(np.median([sum(parts.values()) - parts[DISPATCH] for parts in rounds])),
        "p90_ms": float(np.percentile(totals, 90)),
        "mean_ms_by_part": {part: ms for part, ms in sorted(mean.items(), key=lambda item: -item[1]) if ms},
    }


def machine() -> dict:
    """The hardware and software, and the load of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": f"{os.cpu_count()} x {cpu.split(':')[-1].strip()}",
        "load": round(os.getloadavg()[0], 2),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append", help="may be repeated; all by default")
    parser.add_argument("--slots", type=int, default=32, help="sequences of a round")
    parser.add_argument("--tokens", type=int, default=5, help="tokens that a round emits for each sequence, on average")
    parser.add_argument("--rounds", type=int, default=300, help="that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="the functions that cost most; slows all down")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()

    report: dict[str, Any] = {"machine": machine(), "slots": args.slots, "tokens": args.tokens, "cases": {}}
    print(*(f"{key}: {value}" for key, value in report["machine"].items()), sep=", ")
    with tempfile.TemporaryDirectory() as folder:
        pair = write_pair(Path(folder))
        for name in args.case or CASES:
            profiler = cProfile.Profile() if args.profile else None
            result = measure(CASES[name], pair, args, profiler)
            report["cases"][name] = asdict(CASES[name]) | result
            bar = f" (bar at 32 slots: {BAR_MS})" if name in PLAIN else ""
            width = f"tables of {result['table_width']} pages"
            print(f"\n{name} ({width}): median {result['median_ms']:.3f} ms a round, p90 {result['p90_ms']:.3f}{bar}")
            print(f"  without the dispatch: median {result['without_dispatch_ms']:.3f}")
            print("  " + ", ".join(f"{part} {ms:.3f}" for part, ms in result["mean_ms_by_part"].items()))
            if profiler:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
