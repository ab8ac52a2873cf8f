"""Calls of every operation on several devices, and the frozen table of which implementation serves each of them.

`python -m tests.kernels.choices` writes `choices.txt` anew: do so only when a choice is meant to change, and read the
difference. A line is `operation, device, call: letters`, one letter for each value of the axis that the call leaves
open, equal neighbours counted: `r2m` is reference, reference, mosaic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.add_norm import ADD_NORM
from pallas_kernels.all_reduce import ALL_REDUCE, ALL_REDUCE_ADD_NORM
from pallas_kernels.experts import EXPERTS, FP8_EXPERTS, INT4_EXPERTS, FewBits
from pallas_kernels.gated_delta import FOLD, PREFILL, VERIFY, Kept, Weights
from pallas_kernels.gated_norm import GATED_NORM
from pallas_kernels.largest_product import APPROXIMATE_LARGEST, LARGEST_PRODUCT, SCREENED_LARGEST, Screen
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.product import PRODUCT, PRODUCT_BESIDE, narrow, parts_of, triton
from pallas_kernels.quantize import QUANTIZE_GATED, QUANTIZE_ROWS
from pallas_kernels.quantized_product import FP8_PRODUCT, INT4_PRODUCT, QUANTIZED_PRODUCT_BESIDE, QUANTIZED_SWIGLU
from pallas_kernels.registry import Device
from pallas_kernels.route import ROUTE
from pallas_kernels.swiglu import FP8_SWIGLU, SWIGLU
from pallas_kernels.write_attend import WRITE_ATTEND, call_of
from pallas_kernels.write_kv import WRITE_CONTEXT, WRITE_KV

TABLE = Path(__file__).with_name("choices.txt")
BF16, F16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
TOKENS = (
    0,
    1,
    2,
    8,
    15,
    16,
    17,
    32,
    48,
    63,
    64,
    65,
    96,
    128,
    192,
    254,
    256,
    257,
    384,
    511,
    512,
    1000,
    1024,
    2048,
    8192,
)
HEADS = ((32, 8, 128), (16, 8, 128), (8, 8, 128), (64, 8, 128), (9, 3, 64), (16, 2, 256), (32, 8, 96))  # N, K, H
QUERIES, WIDTHS = (1, 8, 16, 32, 64, 128, 512, 2048), (8, 32, 63, 64, 512, 640, 2048)  # tokens and pages a sequence


INTERPRETER = "interpreter"  # a CPU that is told to interpret kernels


class Card(NamedTuple):
    """A device that a test pretends to have."""

    name: str
    compute_capability: tuple[int, int] | None
    sm_count: int = 132


CARDS = (
    Card("cpu", None),
    Card(INTERPRETER, None),
    Card("sm_80", (8, 0), 108),
    Card("sm_89", (8, 9), 142),
    Card("sm_90", (9, 0)),
    Card("sm_90 of 78 SMs", (9, 0), 78),
    Card("sm_100", (10, 0), 148),
)

OPERATIONS = {  # by their name in the table; those of one name must choose alike
    "product": [PRODUCT],
    "split_product": [PRODUCT],
    "product_beside": [PRODUCT_BESIDE],
    "swiglu": [SWIGLU],
    "fp8_swiglu": [FP8_SWIGLU],
    "largest_product": [LARGEST_PRODUCT],
    "screened_largest": [SCREENED_LARGEST],
    "approximate_largest": [APPROXIMATE_LARGEST],
    "add_norm": [ADD_NORM],
    "quantize": [QUANTIZE_ROWS, QUANTIZE_GATED],
    "write_kv": [WRITE_KV, WRITE_CONTEXT],
    "all_reduce": [ALL_REDUCE, ALL_REDUCE_ADD_NORM],
    "paged_attention": [PAGED_ATTENTION],
    "write_attend": [WRITE_ATTEND],
    "gated_delta": [VERIFY, FOLD],
    "experts": [EXPERTS],
    "int4_experts": [INT4_EXPERTS],
    "fp8_experts": [FP8_EXPERTS],
    "gated_delta_prefill": [PREFILL],
    "gated_norm": [GATED_NORM],
    "route": [ROUTE],
    "int4_product": [INT4_PRODUCT],
    "fp8_product": [FP8_PRODUCT],
    "quantized_product_beside": [QUANTIZED_PRODUCT_BESIDE],
    "quantized_swiglu": [QUANTIZED_SWIGLU],
}
UNINTERPRETED = (
    "split_product",
    "largest_product",
    "screened_largest",
    "approximate_largest",
    "all_reduce",
    "fp8_swiglu",
    "quantized_swiglu",
    "product_beside",
    "quantized_product_beside",
)  # no argument `interpret`


def chosen(name: str, card: Card, call: tuple[Any, ...]) -> str:
    """Name of the implementation that serves a call; for `split_product`, the number of its parts."""
    capability = card.compute_capability
    interpret = card.name == INTERPRETER and name not in UNINTERPRETED
    device = Device("cpu") if capability is None else Device("cuda", capability)
    with (
        # The mocks that `return_value` makes took nine tenths of the time of a hundred thousand calls.
        mock.patch.object(_compat, "compute_capability", lambda: capability),  # noqa: PT008
        mock.patch.object(_compat, "sm_count", lambda: card.sm_count),  # noqa: PT008
    ):
        if name == "write_attend":
            call = call_of(*call, device, interpret=interpret)
        names = {operation.choose(call, device, interpret=interpret).name for operation in OPERATIONS[name]}
        assert len(names) == 1, f"{name}: {names}"
        if name == "split_product":
            return str(_parts(names.pop(), *call[:2]))
        return names.pop()


def _parts(implementation: str, x: Any, weight: Any) -> int:
    """Parts that `split_product` leaves to its caller."""
    if implementation == "narrow":
        return int(weight.shape[1] // narrow.DEPTH)
    if implementation != "reference":
        return 1
    is_hopper = _compat.compute_capability() == (9, 0)
    return max(parts_of(x, weight), triton.splits(x, weight) if is_hopper else 1)


def shape(*dimensions: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def calls() -> Iterator[tuple[str, str, list[tuple[Any, ...]]]]:
    """Name of an operation, what some calls of it have in common, and these calls."""
    for dtype, result in ((BF16, BF16), (BF16, F32), (F16, F16), (F32, F32), (E4M3, BF16), (E4M3, F32)):
        for weight in _PRODUCTS:
            of = f"{_name(dtype)} {weight[0]}x{weight[1]} to {_name(result)}"
            every = [(shape(t, weight[1], dtype=dtype), shape(*weight, dtype=dtype), result) for t in TOKENS]
            yield "product", of, every
            yield "split_product", of, every
    for dtype, weight, rows in itertools.product((BF16, F32), ((16384, 5120), (16896, 5120), (4096, 2048)), (96, 97)):
        of = f"{_name(dtype)} {weight[0]}x{weight[1]} and {rows}"
        weights = shape(*weight, dtype=dtype), shape(rows, weight[1], dtype=dtype)
        yield "product_beside", of, [(shape(t, weight[1], dtype=dtype), *weights) for t in TOKENS]
    for dtype in (BF16, F16, F32, E4M3):
        for weight in (
            (16, 2, 768, 4096),
            (16, 2, 608, 2560),
            (16, 2, 1088, 5120),
            (4, 2, 768, 1024),
            (8, 2, 100, 4096),
        ):
            arrays = [(shape(t, weight[3], dtype=dtype), shape(*weight, dtype=dtype)) for t in TOKENS]
            yield "swiglu", f"{_name(dtype)} {weight}", arrays
            if dtype == E4M3:
                yield "fp8_swiglu", str(weight), arrays
        for weight in _HEADS_OF_MODELS:
            arrays = [(shape(t, weight[1], dtype=dtype), shape(*weight, dtype=dtype)) for t in TOKENS]
            yield "largest_product", f"{_name(dtype)} {weight}", arrays
            copy = Screen._make((shape(*weight, dtype=jnp.int8), shape(3, weight[0], dtype=F32)))
            yield "screened_largest", f"{_name(dtype)} {weight}", [(*call, copy) for call in arrays]
            yield "approximate_largest", f"{_name(dtype)} {weight}", [(call[0], copy) for call in arrays]
        widths = (64, 4096, 65536, 65537, 131072)
        yield "add_norm", _name(dtype), [(shape(4, width, dtype=dtype),) for width in widths]
        yield "quantize", _name(dtype), [(width,) for width in widths]
    for dtype, H in itertools.product((BF16, F32, E4M3, E5M2), (64, 96, 128)):
        pools = [shape(pages, 8, 64, H, dtype=dtype) for pages in (16, 32767, 32768, 40000, 65536, 65537, 1 << 18)]
        yield "write_kv", f"{_name(dtype)} heads of {H}", [(pool,) for pool in pools]
    for dtype, width, mailboxes in itertools.product((BF16, F32, E4M3), (100, 128, 4096, 8192), (None, 8192, 1 << 15)):
        peers = None if mailboxes is None else SimpleNamespace(row_bytes=mailboxes)
        rows = [(shape(rows, width, dtype=dtype), peers) for rows in (0, 1, 32, 256, 257)]
        yield "all_reduce", f"{_name(dtype)} rows of {width}, mailboxes {mailboxes}", rows
    for dtype in (BF16, F32):
        layers = [_gated_delta(dtype, *size) for size in itertools.product((1, 16, 64, 65), (64, 96, 128, 256))]
        yield "gated_delta", _name(dtype), layers
        yield "gated_delta_prefill", _name(dtype), layers
        yield "gated_norm", _name(dtype), [(shape(4, 48, size, dtype=dtype),) for size in (64, 96, 128)]
    yield "route", "float32", [(shape(1, 4, 256, dtype=F32),)]
    for dtype, sizes in itertools.product((BF16, F16, F32, E4M3), ((256, 512, 2048), (256, 64, 3072), (8, 24, 64))):
        yield "experts", f"{_name(dtype)} {sizes}", [_experts(dtype, t, *sizes) for t in TOKENS]
    for dtype, sizes in itertools.product((BF16, F16), ((256, 512, 2048), (256, 64, 3072), (8, 32, 96))):
        for name, packed in (("int4_experts", True), ("fp8_experts", False)):
            of = f"{_name(dtype)} {sizes}"
            yield name, of, [_experts_in_few_bits(dtype, t, *sizes, packed=packed) for t in TOKENS]
    for dtype, group in itertools.product((BF16, F16, F32), (16, 32, 128, 5120)):
        for name, values in (
            ("int4_product", shape(96, 1280, dtype=jnp.uint16)),
            ("fp8_product", shape(96, 5120, dtype=E4M3)),
        ):
            arguments = values, shape(96, 5120 // group), None, dtype
            yield name, f"{_name(dtype)} groups of {group}", [(shape(t, 5120, dtype=dtype), *arguments) for t in TOKENS]
    for (dtype, rows), (kind, values) in itertools.product(
        ((BF16, 96), (BF16, 1024), (F16, 96)),
        (("int4", shape(16384, 1280, dtype=jnp.uint16)), ("fp8", shape(16384, 5120, dtype=E4M3))),
    ):
        arguments = values, shape(16384, 40), None, shape(rows, 5120, dtype=dtype)
        of = f"{_name(dtype)}, {kind} 16384x5120 and {rows}"
        yield "quantized_product_beside", of, [(shape(t, 5120, dtype=dtype), *arguments) for t in TOKENS]
    for dtype, units in itertools.product((BF16, F16), (32, 40, 1088)):
        for kind, values in (
            ("int4", shape(16, 2, units, 1280, dtype=jnp.uint16)),
            ("fp8", shape(16, 2, units, 5120, dtype=E4M3)),
        ):
            arguments = values, shape(16, 2, units, 40), None, dtype
            of = f"{_name(dtype)}, {kind} parts of {units}"
            yield "quantized_swiglu", of, [(shape(t, 5120, dtype=dtype), *arguments) for t in TOKENS]
    for operation in ("paged_attention", "write_attend"):
        for heads, dtype, B in itertools.product(HEADS, (BF16, E4M3), (1, 4, 16, 64)):
            yield operation, f"{_name(dtype)} {heads} x {B}", [*_attention(B, heads, dtype)]
        for dtype, S, q in ((E5M2, 64, BF16), (F32, 64, F32), (BF16, 64, F32), (BF16, 16, BF16), (E4M3, 256, BF16)):
            of = f"{_name(dtype)} pages of {S}, {_name(q)} queries"
            yield operation, of, [*_attention(16, (32, 8, 128), dtype, S, q)]


_PRODUCTS = (  # [O, D]
    (4096, 4096), (6144, 4096), (8192, 4096), (12288, 4096), (24576, 4096), (28672, 4096), (4096, 12288), (4096, 20480),
    (5120, 5120), (2048, 4096), (4096, 2048), (1024, 1024), (9728, 2560), (6144, 4160), (4104, 4096), (1 << 17, 100),
    (256, 2048), (96, 5120), (97, 5120),
)  # fmt: skip
_GATES = ((16, 2, 768, 4096), (16, 2, 608, 2560), (16, 2, 1088, 5120), (4, 2, 768, 1024), (8, 2, 100, 4096))  # E 2 I D
_HEADS_OF_MODELS = (  # [V, D]
    (151936, 4096), (49152, 576), (16384, 4096), (16376, 4096), (8192, 4096), (151936, 4160), (151937, 4096),
    (32768, 64),
)  # fmt: skip


def _gated_delta(dtype: Any, tape: int, key_dim: int) -> tuple[Kept, Weights]:
    channels = 2 * key_dim + 3 * 128
    state, gates = shape(32, 48, key_dim, 128, dtype=F32), shape(32, tape, 48, 2, dtype=dtype)
    kept = Kept(state, shape(32, 3 + tape, 16, channels, dtype=dtype), gates)
    weights = shape(16, channels, 4, dtype=dtype), shape(48, dtype=F32), shape(48, dtype=F32)
    return kept, Weights(*weights)


def _experts(dtype: Any, tokens: int, X: int, M: int, D: int) -> tuple[Any, ...]:
    weights = shape(X, 2, M, D, dtype=dtype), shape(X, D, M, dtype=dtype)
    return shape(tokens, D, dtype=dtype), *weights, shape(tokens, 8, dtype=jnp.int32)


def _experts_in_few_bits(dtype: Any, tokens: int, X: int, M: int, D: int, *, packed: bool) -> tuple[Any, ...]:
    def few(*size: int) -> FewBits:
        *outputs, inputs = size
        values = shape(*outputs, inputs // 4, dtype=jnp.uint16) if packed else shape(*size, dtype=E4M3)
        return FewBits(values, shape(*outputs, max(1, inputs // 128)))

    return shape(tokens, D, dtype=dtype), few(X, 2, M, D), few(X, D, M), shape(tokens, 8, dtype=jnp.int32)


def _attention(B: int, heads: tuple[int, int, int], dtype: Any, S: int = 64, q: Any = BF16) -> Iterator[tuple[Any]]:
    N, K, H = heads
    for T, M in itertools.product(QUERIES, WIDTHS):
        pool, ints, scales = shape(B * M + 1, K, S, H, dtype=dtype), shape(B, dtype=jnp.int32), shape(K, dtype=F32)
        table = shape(B, M, dtype=jnp.int32)
        arrays = (shape(B, T, N, H, dtype=q), pool, pool, table, ints, ints, ints, scales, scales)
        yield (Arguments(*arrays, mask="causal", window=None, scale=1.0),)


SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def lines() -> Iterator[str]:
    """The lines of the table.

    A device with one answer for all calls of an operation has one line. Otherwise the line has what most kinds of calls
    get, or the device that it answers like most, and a line for each kind that gets something else follows.
    """
    every = list(calls())
    for operation in dict.fromkeys(operation for operation, _, _ in every):
        groups, before = [(of, group) for name, of, group in every if name == operation], dict[str, tuple[str, ...]]()
        for card in CARDS:
            rows = [(of, [chosen(operation, card, call)[0] for call in group]) for of, group in groups]
            if len(letters := {letter for _, row in rows for letter in row}) == 1:
                yield f"{operation}, {card.name}: {letters.pop()}"
                continue
            runs = tuple(_runs(row) for _, row in rows)
            usual = Counter(runs).most_common(1)[0][0]
            alike = {usual: (usual,) * len(runs)} | {f"as {name}": of_other for name, of_other in before.items()}
            others = {name: [run != other for run, other in zip(runs, alike[name], strict=True)] for name in alike}
            nearest, before[card.name] = min(others, key=lambda name: sum(others[name])), runs
            yield f"{operation}, {card.name}: {nearest}"
            yield from (
                f" {of}: {run}" for (of, _), run, is_other in zip(rows, runs, others[nearest], strict=True) if is_other
            )


def _runs(letters: list[str]) -> str:
    counted = ((letter, len(list(run))) for letter, run in itertools.groupby(letters))
    return "".join(letter + str(count) * (count > 1) for letter, count in counted)


def _name(dtype: Any) -> str:
    return SHORT.get(name := jnp.dtype(dtype).name, name)


if __name__ == "__main__":
    TABLE.write_text("\n".join(lines()) + "\n")
