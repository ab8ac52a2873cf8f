"""The product with a weight in few bits on Pallas' Triton backend: numbers are widened in registers, exactly.

A program multiplies some rows of the weight by a block of tokens (``tiles``), so each byte of the weight is read once
for up to 128 tokens.

Rows of the weight are the first operand of the MMA, as in ``lib.streams``. Where a weight has too few rows to fill the
device, its inputs are split, and the parts are summed by whoever reads the product (``add_norm``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.quantized_product.layout import LONGEST, FewBits
from pallas_kernels.quantized_product.tiles import LEAST, group_refusal, products, step_of

MOST_SPLITS = 8
MOST_OF_NARROW = 256  # tokens of a call that were measured to want tiles of 64
SMALL = ((8, 6), (8, 9), (12, 0))  # GPUs whose blocks have 99 KiB of shared memory; others have 163 or more
IN_FLIGHT, IN_FLIGHT_SMALL = 72 << 10, 40 << 10  # bytes of a program's spans, so that programs share a multiprocessor


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        rows: of the weight that a program takes.
        tokens: that a program takes.
        num_stages: spans in flight.
        num_warps: of a program.
        splits: parts of the inputs, each of which is a program's.
        depth: inputs of a step, at most; a weight in 4 bits takes a span.
    """

    rows: int
    tokens: int
    num_stages: int = 4
    num_warps: int = 4
    splits: int = 1
    depth: int = LONGEST


def default_config(x: Any, values: Any, scales: Any, *, may_split: bool = False) -> Config:
    """At most 64 tokens stream (BENCH.md), more take larger tiles.

    Inputs are split until every multiprocessor has about two programs, whose loads hide each other's latency. Products
    in 4 bits of 65 to 256 tokens take narrow tiles, and four parts where tiles are few: down of 128 tokens takes 74 us
    in place of 159 on an H100.
    """
    count, rows = max(1, tokens_of(x)), len(scales)
    is_small, is_packed = _compat.compute_capability() in SMALL, values.dtype == jnp.uint16
    if count > MOST_OF_NARROW or (count > 64 and (is_small or not is_packed)):
        return Config(rows=128, tokens=64 if is_small else 128, num_stages=2 if is_small else 3, num_warps=8)
    if count > 64:
        span = step_of(values, x.shape[-1] // scales.shape[1], LONGEST)
        tiles = pl.cdiv(rows, 128) * pl.cdiv(count, 64)
        is_split = may_split and tiles < 1.5 * _compat.sm_count() and x.shape[-1] // span % 4 == 0
        return Config(rows=128, tokens=64, splits=4 if is_split else 1)
    config = Config(
        rows=128 if is_packed else 64,  # e4m3 takes twice the registers of 4 bits
        tokens=max(LEAST, 1 << (count - 1).bit_length()),
    )
    span = step_of(values, x.shape[-1] // scales.shape[1], config.depth)
    size = span * (config.rows * values.shape[-1] * values.dtype.itemsize // x.shape[-1] + 2 * config.tokens)
    stages = min(6, max(3, 1 + (IN_FLIGHT_SMALL if is_small else IN_FLIGHT) // size))
    spans, splits, programs = x.shape[-1] // span, 1, -(-rows // config.rows)
    while may_split and programs * splits < 2 * _compat.sm_count() and spans % (2 * splits) == 0:
        if splits == MOST_SPLITS:
            break
        splits *= 2
    return dataclasses.replace(config, num_stages=stages, splits=splits)


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Triton backend cannot do this call, or None; any dtype of the result will do."""
    del values, zeros, dtype
    if x.dtype != jnp.bfloat16:
        return f"The Triton product with few bits takes bf16; this is {x.dtype}."
    return group_refusal(x.shape[-1] // scales.shape[1])


@functools.partial(jax.jit, static_argnames=("dtype", "may_split", "config", "interpret"))
def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    dtype: DTypeLike,
    *,
    may_split: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """See ``pallas_kernels.quantized_product``; float32 parts [S, *T, O] where it may be split, and is."""
    if reason := refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    config = config or default_config(x, values, scales, may_split=may_split)
    tokens, outputs = tokens_of(x), len(values)
    splits, group = config.splits, x.shape[-1] // scales.shape[1]
    shape = (splits, tokens, outputs)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], outputs), dtype)
    operands = _compat.vary_alike(x.reshape(tokens, -1), values, scales, *([] if zeros is None else [zeros]))
    [out] = _compat.triton_call(
        functools.partial(_kernel, config=config, group=group, is_plain=interpret),
        grid=(pl.cdiv(tokens, config.tokens), pl.cdiv(outputs, config.rows), splits),
        out_shape=[_compat.out_like(shape, jnp.float32 if splits > 1 else dtype, operands[0])],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="quantized_product",
    )(*operands)
    return out.reshape(*([splits] if splits > 1 else []), *x.shape[:-1], outputs)


def _kernel(x: Any, values: Any, scales: Any, *rest: Any, config: Config, group: int, is_plain: bool) -> None:
    *zeros, out = rest
    span, outputs = step_of(values, group, config.depth), values.shape[0]
    steps = x.shape[1] // span // config.splits
    token = pl.program_id(0) * config.tokens + jnp.arange(config.tokens, dtype=jnp.int32)
    exists = token < x.shape[0]
    row = pl.program_id(1) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    inside = jnp.minimum(row, outputs - 1)  # rows beyond the last read the last one's, and are not written
    weight, share = FewBits(values, scales, *zeros), (pl.program_id(2) * steps, steps, span)
    [sums] = products(x, token, exists, weight, [inside], share, is_plain)
    target = out.at[pl.program_id(2), token[None, :], row[:, None]]
    mask = exists[None, :] & (row < outputs)[:, None]
    pltriton.store(target, sums.astype(out.dtype), mask=mask)
