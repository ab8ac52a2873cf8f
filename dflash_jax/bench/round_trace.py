"""Where the time of a round goes: kernels of a profiler trace, each assigned to a part of the round.

A kernel belongs to the part that its operation comes from. Traces name the HLO operation; the compiled programs say in
which module of the model, and in which step, it was written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

MOST_KERNELS = 25  # costliest kernels that a result lists
OPERATION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="((?:[^"\\]|\\.)*)"', re.MULTILINE)
# A kernel belongs to the first part whose expression matches "module scope operation kernel".
PARTS = (
    ("all_reduce", re.compile(r"all-?_?(reduce|gather|to-?_?all)|reduce-scatter|nccl|collective", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("prefill", re.compile(r"jit_prefill|jit\(prefill\)")),
    (
        "head",
        re.compile(r"DraftModel\.tokens|\.logits|likeliest|logits_of|largest_|_largest|[_(/]commit.*(cublas|nvjet)"),
    ),
    ("draft_context", re.compile(r"write_context")),
    ("draft", re.compile(r"jit_draft|jit\(draft\)|/draft/|DraftModel")),
    ("sampling", re.compile(r"jit_commit|jit\(commit\)|/commit/")),
    ("verify_router", re.compile(r"/router/| route\S*$")),
    ("verify_shared_expert", re.compile(r"/shared_expert/")),
    ("verify_experts", re.compile(r"experts")),
    ("verify_gated_delta", re.compile(r"gated_(delta|norm)")),  # all of the block but projections, which are products
    ("verify_gemm", re.compile(r" (swiglu|product|narrow_product|quantized_product|split_in_pieces)\S*$")),
    ("verify_other", re.compile(r"add_norm(?!.*dot)")),  # the scope of a fused product contains it as well
    (
        "verify_attention",  # projections are written in self_attn, the attention itself beside it
        re.compile(r"paged_attention|write_kv|BKGTs|layers_\d+/(?!mlp|self_attn)\S*(pallas|mosaic)", re.IGNORECASE),
    ),
    ("verify_gemm", re.compile(r"dot|gemm|cublas|cutlass|nvjet|matmul|splitk|pallas|mosaic", re.IGNORECASE)),
    ("verify_other", re.compile(r"jit_verify|jit\(verify\)|/verify/|TargetModel")),
)
OTHER = "other"
# Parts of a scope that tell the step of an operation.
STEPS = ("write_context", "/draft/", "/verify/", "/commit/")
CONTEXT, _, VERIFY, COMMIT = STEPS
# Steps of a round, in order, whose layers may share kernels; with the scope of the model of each.
MODELS = {"/draft/": "/draft/DraftModel", "/verify/": "/verify/TargetModel"}
DRAFTED = "DraftModel.tokens"  # in the scope of the last kernels of a drafter
# By the step of the next kernel: names of kernels that this step never runs, which belong to the target's layers before
# it. The drafter's context is computed between these layers and after them.
OF_LAYERS = {
    COMMIT: re.compile("paged_attention|write_kv|add_norm|swiglu|product"),
    CONTEXT: re.compile("paged_attention|add_norm|swiglu"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one operation where a device has no kernels.

    Attributes:
        name: that the device gives it.
        module: of the program; empty for a copy from or to the host.
        operation: of HLO; in a command buffer the name of the kernel, which is derived from that of its operation.
        scope: where the operation was written, if the trace says so.
        start: nanoseconds.
        end: nanoseconds.
    """

    name: str
    module: str
    operation: str
    scope: str
    start: float
    end: float


@contextmanager
def tracing(folder: Path) -> Iterator[None]:
    """Write a trace of the work of the devices inside of the context to a folder."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python slows the host down
    options.enable_hlo_proto = False  # large, and the programs of this process have it
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def account(folder: Path, rounds: int) -> dict[str, Any] | None:
    """Milliseconds a round by part, from the newest trace in a folder; None if no device worked in it.

    Returns:
        `parts_ms`; `busy_ms`, in which any kernel runs; `host_gap_ms` and `launch_gap_ms`, in which none runs between
        programs and inside of them (a profiler makes these longer); and the costliest `kernels`. With several devices,
        all of the first. Kernels may overlap, so that the sum of parts may exceed `busy_ms`.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    kernels = kernels_of(ProfileData.from_file(str(files[-1]))) if files else []
    if not kernels:
        return None
    scopes = Scopes(kernels)
    parts: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kernel, scope in zip(kernels, scopes.of_all(kernels), strict=True):
        length = (kernel.end - kernel.start) / 1e6
        part = part_of(kernel, scope)
        parts[part] += length / rounds
        by_name[part, kernel.name, re.sub(r"layers_\d+", "layers_*", scope)].append(length)
    costliest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
    return {
        "parts_ms": dict(sorted(parts.items(), key=lambda item: -item[1])),
        **{name: value / 1e6 / rounds for name, value in spans(kernels).items()},
        "kernels": [
            {"part": part, "name": name, "scope": scope, "calls": len(times) / rounds, "ms": sum(times) / rounds}
            for (part, name, scope), times in costliest
        ],
    }


def kernels_of(data: Any) -> list[Kernel]:
    """Kernels of the first GPU by start; on a CPU, whose threads are its streams, operations."""
    planes = {plane.name: plane for plane in data.planes}
    gpu = min((name for name in planes if name.startswith("/device:GPU")), default=None)
    plane, kernels = planes.get(gpu or "/host:CPU"), []
    for line in plane.lines if plane else ():
        if gpu and not line.name.startswith("Stream"):
            continue  # a summary of the same kernels
        for event in line.events:
            stats = dict(event.stats)
            if not gpu and ("hlo_op" not in stats or stats.get("device_ordinal", 0) != 0):
                continue
            module = re.sub(r"\(\d+\)$", "", str(stats.get("hlo_module", "")))  # some add the program's number
            operation, scope = str(stats.get("hlo_op", "")), str(stats.get("name", stats.get("tf_op", "")))
            if operation.startswith("command_buffer"):
                operation = event.name
            if scope.startswith("XlaModule"):  # all that a trace says of kernels in a command buffer
                scope = ""
            end = event.start_ns + event.duration_ns
            kernels.append(Kernel(event.name, module, operation, scope, event.start_ns, end))
    return sorted(kernels, key=lambda kernel: kernel.start)


def spans(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Nanoseconds in which a program's kernel runs, and in which none does: between programs, and inside them."""
    ours = [kernel for kernel in kernels if kernel.module]  # copies to and from the host run beside the programs
    times = {"busy_ms": 0.0, "host_gap_ms": 0.0, "launch_gap_ms": 0.0}
    first = {kernel.module: kernel.operation for kernel in reversed(ours)}  # with which a program begins
    end, module = (ours[0].start, ours[0].module) if ours else (0.0, "")
    for kernel in ours:
        begins = kernel.module != module or kernel.operation == first[kernel.module]
        times["host_gap_ms" if begins else "launch_gap_ms"] += max(kernel.start - end, 0.0)
        times["busy_ms"] += max(kernel.end - max(kernel.start, end), 0.0)
        end, module = max(end, kernel.end), kernel.module
    return times


def part_of(kernel: Kernel, scope: str) -> str:
    """The part of a round that a kernel belongs to."""
    text = f"{kernel.module} {scope} {kernel.operation} {kernel.name}"
    return next((part for part, expression in PARTS if expression.search(text)), OTHER)


class Scopes:
    """Scopes of the operations of a trace, looked up in the compiled programs of this process."""

    def __init__(self, kernels: Iterable[Kernel]):
        seen: defaultdict[str, set[str]] = defaultdict(set)
        for kernel in kernels:
            seen[kernel.module].add(as_symbol(kernel.operation))
        self._tables: dict[str, dict[str, str]] = {}
        for module, tables in _programs(set(seen)).items():
            # Programs of several shapes share a name: the one that has these operations is meant.
            self._tables[module] = max(tables, key=lambda table: len(table.keys() & seen[module]))

    def of(self, kernel: Kernel) -> str:
        """The scope of a kernel, such as `jit(verify)/TargetModel/layers_3/mlp/dot_general`; empty if it is unknown."""
        return self._tables.get(kernel.module, {}).get(as_symbol(kernel.operation), kernel.scope)

    def of_all(self, kernels: Sequence[Kernel]) -> list[str]:
        """Scopes of kernels that are sorted by start.

        Products of libraries, and some kernels of ours, bear no name of an operation: they get the step in their own
        name, or that of the next kernel if they can belong to it. Equal operations share one kernel, named after the
        first of them; the kernels around it tell the step it runs in.
        """
        scopes = [self.of(kernel) for kernel in kernels]
        steps = [step_of(scope or kernel.name) for kernel, scope in zip(kernels, scopes, strict=True)]
        ordered_scopes, next_step = [], ""
        ordered = in_order(steps, [DRAFTED in scope for scope in scopes])
        for kernel, scope, named, step in reversed(list(zip(kernels, scopes, steps, ordered, strict=True))):
            if scope or step:
                next_step = step
            if step != named:
                scope = scope.replace(MODELS[named], MODELS[step])
            elif next_step in OF_LAYERS and OF_LAYERS[next_step].match(kernel.name):
                next_step = VERIFY
            ordered_scopes.append(scope or (next_step if kernel.module else ""))
        return ordered_scopes[::-1]


def step_of(scope: str) -> str:
    """The one of `STEPS` that an operation was written in; empty if there is none."""
    return next((step for step in STEPS if step in scope), "")


def in_order(steps: Sequence[str], drafted: Sequence[bool]) -> list[str]:
    """Steps of kernels that are sorted by start; each round drafts, then verifies, then commits.

    A kernel that drafter and target share bears the name of one of them, and they may share nearly all. The last kernel
    of the drafter, which `drafted` marks, therefore separates drafting from verifying.
    """
    (first, second), result, begin = MODELS, list(steps), 0
    for end in [*(i for i, step in enumerate(steps) if step == COMMIT), len(steps)]:
        boundary = next((i for i in range(begin, end) if drafted[i]), None)
        if boundary is not None:
            for i in range(begin, end):
                if steps[i] in MODELS and not drafted[i]:
                    result[i] = first if i < boundary else second
        begin = end + 1
    return result


def as_symbol(operation: str) -> str:
    """The name of an operation in the name of its kernel: `fusion_12` for `fusion.12`."""
    return re.sub(r"[.\-]", "_", operation)


def _programs(names: set[str]) -> dict[str, list[dict[str, str]]]:
    """Scopes of the operations of each program with one of these names, newest first."""
    programs: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    client = jax.devices()[0].client
    for executable in client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                scopes = {as_symbol(name): scope for name, scope in OPERATION.findall(module.to_string())}
                programs[module.name].append(scopes)
    return dict(programs)
