"""``python -m pallas_kernels.paged_attention.bench``: microseconds and bytes a second of every implementation.

Contexts, batches and blocks of two models' attention layers; see BENCH.md for results and the command behind them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.lib import int4_kv, timing
from pallas_kernels.paged_attention.arguments import checked
from pallas_kernels.paged_attention.reference import paged_attention as oracle

# N, K, H of one attention layer
MODELS = {
    "qwen3-8b": (32, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3.5-full": (32, 2, 256),
    "qwen3.6-27b": (24, 4, 256),
}
DTYPES = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int4": int4_kv.DTYPE}
PAGE = 64
TABLES = 4  # different page tables in one program
POOL = 1 << 30  # bytes of keys of the smallest pool: far more than L2 holds
MAX_POOL = 24 << 30  # bytes of keys of the largest pool


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    model: str
    batch: int
    tokens: int
    context: int
    dtype: str
    mask: Any
    implementation: Any

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        _, K, H = MODELS[self.model]
        size = int4_kv.head_bytes(H) if self.dtype == "int4" else H * jnp.dtype(DTYPES[self.dtype]).itemsize
        return 2 * self.batch * self.length * K * size

    @property
    def length(self) -> int:
        return self.context - 17  # the last page is not full

    @property
    def data(self) -> Case:
        """The case without implementation and mask: cases that differ in these alone share their operands."""
        return dataclasses.replace(self, implementation="", mask="")

    @property
    def pages(self) -> int:
        """Pages of the pool, never between 2 and 4 GiB, where Triton refuses 8-bit pools."""
        _, K, H = MODELS[self.model]
        page = K * PAGE * H * jnp.dtype(DTYPES[self.dtype]).itemsize
        one = self.batch * (self.context // PAGE)
        wanted = min(max(one, POOL // page), max(one, MAX_POOL // page))
        gib = wanted * page / (1 << 30)
        return wanted if not 2 < gib <= 4 else max(one, (4 << 30) // page + 1)


@functools.lru_cache(maxsize=1)
def operands(data: Case) -> tuple[Any, ...]:
    """Random queries and pools, and ``TABLES`` permutations of the pool's pages as page tables."""
    N, K, H = MODELS[data.model]
    rng = np.random.default_rng(0)

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def pool(key: jax.Array, pages: int) -> Any:  # a slice at a time: the random bits of 24 GiB need not fit
        keys = jax.random.split(key, 16)
        part = (-(-pages // 16), K, PAGE, H)

        def make(key: jax.Array) -> Any:
            elements = jax.random.normal(key, part, jnp.bfloat16)
            return int4_kv.quantised(elements) if data.dtype == "int4" else elements.astype(DTYPES[data.dtype])

        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(make, keys))

    M = data.context // PAGE
    k_pages, v_pages = (pool(jax.random.key(i), data.pages) for i in (1, 2))
    tables = [rng.permutation(k_pages.shape[0])[: data.batch * M].reshape(data.batch, M) for _ in range(TABLES)]
    q = [normal(jax.random.key(10 + i), (data.batch, data.tokens, N, H)) for i in range(TABLES)]
    lengths = jnp.full((data.batch,), data.length, jnp.int32)
    return q, k_pages, v_pages, [jnp.asarray(t, jnp.int32) for t in tables], lengths


def program(case: Case) -> Any:
    """``TABLES`` calls in one program, one after another like a model's layers."""
    attend = functools.partial(pallas_kernels.paged_attention, mask=case.mask, implementation=case.implementation)
    return jax.jit(
        lambda q, k, v, tables, lengths: [
            attend(*qt, lengths) for qt in zip(q, [k] * TABLES, [v] * TABLES, tables, strict=True)
        ]
    )


def shapes(case: Case) -> tuple[Any, ...]:
    N, K, H = MODELS[case.model]
    struct = jax.ShapeDtypeStruct
    shape = (-(-case.pages // 16) * 16, K, PAGE, H)
    pool: Any = int4_kv.shapes(shape) if case.dtype == "int4" else struct(shape, DTYPES[case.dtype])
    table = struct((case.batch, case.context // PAGE), jnp.int32)
    q = struct((case.batch, case.tokens, N, H), jnp.bfloat16)
    return [q] * TABLES, pool, pool, [table] * TABLES, struct((case.batch,), jnp.int32)


def error(case: Case, out: jax.Array) -> float:
    """Relative error of the first sequence against the oracle, in float32."""
    expected = _expected(dataclasses.replace(case, implementation=""))
    difference = jnp.linalg.norm(out[0].astype(jnp.float32) - expected[0])
    return float(difference / jnp.linalg.norm(expected))


@functools.lru_cache(maxsize=1)
def _expected(case: Case) -> jax.Array:
    q, k_pages, v_pages, tables, lengths = operands(case.data)
    options: dict[str, Any] = {
        "mask": case.mask,
        "window": None,
        "scale": None,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "valid_from": None,
    }
    # The pages of one sequence alone, renumbered: the oracle's float32 copy of the full pool would not fit.
    pages = tables[0][0]
    order = jnp.arange(pages.size, dtype=jnp.int32)[None]
    k_pages, v_pages = jax.tree.map(lambda array: array[pages], (k_pages, v_pages))
    arguments = checked(q[0][:1].astype(jnp.float32), k_pages, v_pages, order, lengths[:1], None, **options)
    return oracle(arguments)


def measure(case: Case, compiled: Any, copy: float) -> dict[str, Any]:
    """One row: the case, its time, and its bytes a second beside the device's copy bandwidth."""
    row = dataclasses.asdict(case)
    arguments = operands(case.data)
    off = error(case, compiled(*arguments)[0])
    time = timing.seconds(compiled, arguments, TABLES)
    rate = case.kv_bytes / time
    return row | {
        "us": round(time * 1e6, 1),
        "GB/s": round(rate / 1e9),
        "of copy": round(rate / copy, 2),
        "error": float(f"{off:.1e}"),
    }


def cases(args: argparse.Namespace) -> list[Case]:
    every = itertools.product(args.models, args.batches, args.tokens, args.contexts, args.dtypes, args.masks)
    named = [Case(m, b, t, c, d, mask, i) for m, b, t, c, d, mask in every for i in args.implementations]

    def largest(case: Case) -> int:
        return 2 * case.batch * case.context * MODELS[case.model][1] * MODELS[case.model][2]

    return [c for c in named if largest(c) <= MAX_POOL and not (c.mask == "block" and c.tokens == 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    listed: Any = {"nargs": "+"}
    parser.add_argument("--models", **listed, default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", **listed, type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", **listed, type=int, default=[1, 8, 16])
    parser.add_argument("--contexts", **listed, type=int, default=[1 << 10, 1 << 13, 1 << 15, 1 << 17])
    parser.add_argument("--dtypes", **listed, default=["bf16", "e4m3"], choices=list(DTYPES))
    parser.add_argument("--masks", **listed, default=["causal"], choices=["causal", "block"])
    parser.add_argument("--implementations", **listed, default=["triton", "mosaic"])
    parser.add_argument("--json", default="paged_attention.json", help="where the rows go")
    args = parser.parse_args()

    chosen = cases(args)
    compiled = timing.compile_all({c: functools.partial(lambda c: program(c).lower(*shapes(c)), c) for c in chosen})
    copy = timing.copy_bandwidth()
    rows = []
    for case in chosen:
        if isinstance(compiled[case], str):
            print(f"{case}: {compiled[case]}", flush=True)
            continue
        rows.append(measure(case, compiled.pop(case), copy))
        print(" ".join(f"{v}" for v in rows[-1].values()), flush=True)
    timing.save(args.json, rows, copy_bandwidth=round(copy / 1e9))
    print(f"\ncopy bandwidth {copy / 1e12:.2f} TB/s\n{timing.table(rows)}")


if __name__ == "__main__":
    main()
