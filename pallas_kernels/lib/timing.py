"""How the benchmarks of this package measure.

One compiled program holds several calls of the kernel on different data, so that no call finds its data in L2 and the
cost of a dispatch is spread; programs are enqueued back to back and timed by the host's clock until the last is done.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData


def seconds(program: Callable[..., Any], arguments: Sequence[Any], calls: int, budget: float = 0.08) -> float:
    """Median seconds of one of the ``calls`` calls in a compiled program: five series of about ``budget`` seconds."""
    jax.block_until_ready(program(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    runs = max(2, min(200, int(budget / max(time.perf_counter() - start, 1e-6))))

    def series() -> float:
        start = time.perf_counter()
        for _ in range(runs):
            out = program(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (runs * calls)

    return statistics.median(series() for _ in range(5))


def kernel_times(program: Callable[..., Any], arguments: Sequence[Any], runs: int = 5) -> dict[str, float]:
    """Median microseconds of each kernel that a program starts, from a profiler's trace, by what its name begins with.

    Kernels whose names differ in a number at the end count as one. On a CPU they are operations.
    """
    jax.block_until_ready(program(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([program(*arguments) for _ in range(runs)])
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        times: defaultdict[str, list[float]] = defaultdict(list)
        for event in _kernels(ProfileData.from_file(str(file))):
            times[re.sub(r"[._\d]*$", "", event.name)].append(event.duration_ns / 1e3)
    return {name: round(statistics.median(of_name), 1) for name, of_name in times.items()}


def _kernels(data: Any) -> Iterator[Any]:
    """Events of a trace that are kernels of the first GPU, or operations of a CPU."""
    planes = {plane.name: plane for plane in data.planes}
    gpu = min((name for name in planes if name.startswith("/device:GPU")), default=None)
    for line in planes[gpu or "/host:CPU"].lines:
        if gpu is None or line.name.startswith("Stream"):  # other lines summarise the same kernels
            yield from (event for event in line.events if gpu or "hlo_op" in dict(event.stats))


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device (2 GiB), bytes read plus bytes written."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    program = jax.jit(jnp.copy).lower(x).compile()
    return 2 * x.nbytes / seconds(program, (x,), 1)


def compile_all(lowered: dict[Any, Callable[[], Any]], workers: int = 16) -> dict[Any, Any]:
    """Lower and compile every program, several at a time; what cannot be lowered or compiled becomes its message."""

    def build(make: Callable[[], Any]) -> Any:
        try:
            return make().compile()
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # too much shared memory, say
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(lowered, pool.map(build, lowered.values()), strict=True))


def environment() -> dict[str, Any]:
    """Device, versions and date, which belong beside every figure."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform_version": device.client.platform_version.splitlines()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def save(path: str | pathlib.Path, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write rows as JSON, one a line, with the environment and ``facts`` beside them."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps(environment() | facts)[1:-1]
    pathlib.Path(path).write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, one column a key of the first row."""
    keys = list(rows[0])
    cells = [keys, ["---"] * len(keys), *([str(row[k]) for k in keys] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
