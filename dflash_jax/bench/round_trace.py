"""Where the time of a round goes: kernels of a profiler trace, each given to a part of the round.

A kernel belongs to the part that its operation stems from. Traces name the HLO operation; the compiled programs say in
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

MOST_KERNELS = 25  # listed by name
OPERATION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="((?:[^"\\]|\\.)*)"', re.MULTILINE)
# The first part whose expression is found in "module scope operation kernel" has the kernel.
PARTS = (
    ("all_reduce", re.compile(r"all-?_?(reduce|gather|to-?_?all)|reduce-scatter|nccl|collective", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("prefill", re.compile(r"jit_prefill|jit\(prefill\)")),
    (
        "head",
        re.compile(r"DraftModel\.tokens|\.logits|likeliest|logits_of|largest_product|[_(/]commit.*(cublas|nvjet)"),
    ),
    ("draft_context", re.compile(r"write_context")),
    ("draft", re.compile(r"jit_draft|jit\(draft\)|/draft/|DraftModel")),
    ("sampling", re.compile(r"jit_commit|jit\(commit\)|/commit/")),
    ("verify_gemm", re.compile(r" (swiglu|product)\S*$")),
    ("verify_other", re.compile(r"add_norm(?!.*dot)")),  # products stand in its scope
    (
        "verify_attention",  # projections are written in self_attn, the attention itself beside it
        re.compile(r"paged_attention|write_kv|BKGTs|layers_\d+/(?!mlp|self_attn)\S*(pallas|mosaic)", re.IGNORECASE),
    ),
    ("verify_gemm", re.compile(r"dot|gemm|cublas|cutlass|nvjet|matmul|splitk|pallas|mosaic", re.IGNORECASE)),
    ("verify_other", re.compile(r"jit_verify|jit\(verify\)|/verify/|TargetModel")),
)
OTHER = "other"
# Where in a program an operation was written, as far as that says of what step it is.
STEPS = ("write_context", "/draft/", "/verify/", "/commit/")
CONTEXT, _, VERIFY, COMMIT = STEPS
# Those of a round whose layers may have kernels in common, in their order, with the model of each.
MODELS = {"/draft/": "/draft/DraftModel", "/verify/": "/verify/TargetModel"}
DRAFTED = "DraftModel.tokens"  # with which a drafter ends
# By the step of what runs next, how kernels begin that it never has: they are of the target's layers before it. A
# drafter's context is computed between and after them.
OF_LAYERS = {
    COMMIT: re.compile("paged_attention|write_kv|add_norm|swiglu|product"),
    CONTEXT: re.compile("paged_attention|add_norm|swiglu"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one operation where a device has no kernels; times in nanoseconds.

    Attributes:
        name: the device's.
        module: the program's, empty for a copy from or to the host.
        operation: the HLO operation's; the kernel's own name in a command buffer, whose kernels are named by theirs.
        scope: where that was written, if the trace says so.
        start: when it began.
        end: when it ended.
    """

    name: str
    module: str
    operation: str
    scope: str
    start: float
    end: float


@contextmanager
def tracing(folder: Path) -> Iterator[None]:
    """Write a trace of what the devices do inside to a folder."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host down
    options.enable_hlo_proto = False  # large, and the programs are at hand
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def account(folder: Path, rounds: int) -> dict[str, Any] | None:
    """Milliseconds a round of each part, from the newest trace in a folder; None if it shows no device at work.

    Returns:
        `parts_ms`; `busy_ms`, in which any kernel runs; `host_gap_ms` and `launch_gap_ms`, in which none does between
        programs and inside them (a profiler makes these longer); and the costliest `kernels`. Of several devices, the
        first one's. Kernels may overlap, so that the parts may be more than what is busy.
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
    """What the first GPU ran, by start; of a CPU, whose threads are its streams, the operations."""
    planes = {plane.name: plane for plane in data.planes}
    gpu = min((name for name in planes if name.startswith("/device:GPU")), default=None)
    plane, found = planes.get(gpu or "/host:CPU"), []
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
            found.append(Kernel(event.name, module, operation, scope, event.start_ns, end))
    return sorted(found, key=lambda kernel: kernel.start)


def spans(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Nanoseconds in which a program's kernel runs, and in which none does: between programs, and inside them."""
    ours = [kernel for kernel in kernels if kernel.module]  # copies to and from the host run beside the programs
    found = {"busy_ms": 0.0, "host_gap_ms": 0.0, "launch_gap_ms": 0.0}
    first = {kernel.module: kernel.operation for kernel in reversed(ours)}  # with which a program begins
    end, module = (ours[0].start, ours[0].module) if ours else (0.0, "")
    for kernel in ours:
        begins = kernel.module != module or kernel.operation == first[kernel.module]
        found["host_gap_ms" if begins else "launch_gap_ms"] += max(kernel.start - end, 0.0)
        found["busy_ms"] += max(kernel.end - max(kernel.start, end), 0.0)
        end, module = max(end, kernel.end), kernel.module
    return found


def part_of(kernel: Kernel, scope: str) -> str:
    """The part of a round that a kernel belongs to."""
    text = f"{kernel.module} {scope} {kernel.operation} {kernel.name}"
    return next((part for part, expression in PARTS if expression.search(text)), OTHER)


class Scopes:
    """Where each operation of a trace was written, as the programs of this process know it."""

    def __init__(self, kernels: Iterable[Kernel]):
        seen: defaultdict[str, set[str]] = defaultdict(set)
        for kernel in kernels:
            seen[kernel.module].add(as_symbol(kernel.operation))
        self._tables: dict[str, dict[str, str]] = {}
        for module, tables in _programs(set(seen)).items():
            # Programs of several shapes share a name: the one that has these operations is meant.
            self._tables[module] = max(tables, key=lambda table: len(table.keys() & seen[module]))

    def of(self, kernel: Kernel) -> str:
        """`jit(verify)/TargetModel/layers_3/mlp/dot_general`, or nothing if it is not known."""
        return self._tables.get(kernel.module, {}).get(as_symbol(kernel.operation), kernel.scope)

    def of_all(self, kernels: Sequence[Kernel]) -> list[str]:
        """Of kernels by start.

        A library's products bear no operation's name, nor do some kernels of ours: theirs is the step that their own
        name tells, or that of what runs next, as far as they can be of it. Equal operations have one kernel, named
        after the first of them; which step it runs in is told by what runs around it.
        """
        scopes = [self.of(kernel) for kernel in kernels]
        steps = [step_of(scope or kernel.name) for kernel, scope in zip(kernels, scopes, strict=True)]
        found, next_step = [], ""
        ordered = in_order(steps, [DRAFTED in scope for scope in scopes])
        for kernel, scope, named, step in reversed(list(zip(kernels, scopes, steps, ordered, strict=True))):
            if scope or step:
                next_step = step
            if step != named:
                scope = scope.replace(MODELS[named], MODELS[step])
            elif next_step in OF_LAYERS and OF_LAYERS[next_step].match(kernel.name):
                next_step = VERIFY
            found.append(scope or (next_step if kernel.module else ""))
        return found[::-1]


def step_of(scope: str) -> str:
    """Which of `STEPS` an operation was written in, or nothing."""
    return next((step for step in STEPS if step in scope), "")


def in_order(steps: Sequence[str], drafted: Sequence[bool]) -> list[str]:
    """Steps of kernels by start, where each round drafts, then verifies, then commits.

    A kernel that drafter and target share bears the name of one of them, and they may share nearly all. So the end of
    the drafter, which `drafted` tells, parts what is drafted from what is verified.
    """
    (first, second), found, begin = MODELS, list(steps), 0
    for end in [*(i for i, step in enumerate(steps) if step == COMMIT), len(steps)]:
        boundary = next((i for i in range(begin, end) if drafted[i]), None)
        if boundary is not None:
            for i in range(begin, end):
                if steps[i] in MODELS and not drafted[i]:
                    found[i] = first if i < boundary else second
        begin = end + 1
    return found


def as_symbol(operation: str) -> str:
    """The name of an operation as its kernel bears it: `fusion_12` for `fusion.12`."""
    return re.sub(r"[.\-]", "_", operation)


def _programs(names: set[str]) -> dict[str, list[dict[str, str]]]:
    """Of programs of these names, the newest first: the scope of each operation."""
    programs: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    client = jax.devices()[0].client
    for executable in client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                scopes = {as_symbol(name): scope for name, scope in OPERATION.findall(module.to_string())}
                programs[module.name].append(scopes)
    return dict(programs)
