"""The product with a weight in few bits on Pallas' Triton backend: numbers are widened in registers, exactly.

A program multiplies some rows of the weight by a block of tokens, a span of inputs at a time (``layout``): 16-bit
numbers on the tensor cores, whose float32 sums are then multiplied by the scale of the span. So neither the numbers nor
the scales are rounded, and each byte of the weight is read once for up to 128 tokens.

Rows of the weight are the first operand of the MMA, as in ``lib.streams``. Where a weight has too few rows to fill the
device, its inputs are split, and the parts are summed by whoever reads the product (``add_norm``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.quantized_product.layout import LONGEST, span_of_group
from pallas_kernels.quantized_product.reference import MIDDLE

LEAST = 16  # inputs and tokens of an MMA
MOST_SPLITS = 8
SMALL = ((8, 6), (8, 9), (12, 0))  # GPUs whose blocks have 99 KiB of shared memory; others have 163 or more


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        rows: of the weight that a program takes.
        tokens: that a program takes.
        num_stages: spans in flight.
        num_warps: of a program.
        splits: parts of the inputs, each of which is a program's.
    """

    rows: int
    tokens: int
    num_stages: int = 4
    num_warps: int = 4
    splits: int = 1


def default_config(x: Any, scales: Any, *, may_split: bool = False) -> Config:
    """A configuration that was not measured yet: at most 32 tokens stream, more take larger tiles.

    Inputs are split until every multiprocessor has about two programs, whose loads hide each other's latency.
    """
    tokens, rows = max(1, tokens_of(x)), len(scales)
    is_small = _compat.compute_capability() in SMALL
    if tokens > 64:
        return Config(rows=128, tokens=64 if is_small else 128, num_stages=2 if is_small else 3, num_warps=8)
    config = Config(rows=64, tokens=max(LEAST, 1 << (tokens - 1).bit_length()), num_stages=3 if is_small else 6)
    spans = x.shape[-1] // span_of_group(x.shape[-1] // scales.shape[1])
    splits = 1
    programs = -(-rows // config.rows)
    while may_split and programs * splits < 2 * _compat.sm_count() and spans % (2 * splits) == 0:
        if splits == MOST_SPLITS:
            break
        splits *= 2
    return dataclasses.replace(config, splits=splits)


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Triton backend cannot do this call, or None; any dtype of the result will do."""
    del values, zeros, dtype
    if x.dtype != jnp.bfloat16:
        return f"The Triton product with few bits takes bf16; this is {x.dtype}."
    group = x.shape[-1] // scales.shape[1]
    if span_of_group(group) < 2 * LEAST:
        return f"The Triton product needs groups of a multiple of {2 * LEAST} inputs; these have {group}."
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "may_split", "config", "interpret"))
def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt8[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
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
    config = config or default_config(x, scales, may_split=may_split)
    tokens, outputs = tokens_of(x), len(values)
    splits, group = config.splits, x.shape[-1] // scales.shape[1]
    shape = (splits, tokens, outputs)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], outputs), dtype)
    operands = _compat.vary_alike(x.reshape(tokens, -1), values, scales, *([] if zeros is None else [zeros]))
    [out] = _compat.triton_call(
        functools.partial(_kernel, config=config, group=group),
        grid=(pl.cdiv(tokens, config.tokens), pl.cdiv(outputs, config.rows), splits),
        out_shape=[_compat.out_like(shape, jnp.float32 if splits > 1 else dtype, operands[0])],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="quantized_product",
    )(*operands)
    return out.reshape(*([splits] if splits > 1 else []), *x.shape[:-1], outputs)


def _kernel(x: Any, values: Any, scales: Any, *rest: Any, config: Config, group: int) -> None:
    *zeros, out = rest
    span, outputs = math.gcd(group, LONGEST), values.shape[0]
    steps = x.shape[1] // span // config.splits
    token = pl.program_id(0) * config.tokens + jnp.arange(config.tokens, dtype=jnp.int32)
    exists = token < x.shape[0]
    row = pl.program_id(1) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    inside = jnp.minimum(row, outputs - 1)  # rows beyond the last read the last one's, and are not written
    first = pl.program_id(2) * steps

    def step(k: Any, sums: Any) -> Any:
        span_at = (first + k) * span
        at = inside, jnp.full_like(inside, lax.div(span_at, group))
        scale = pltriton.load(scales.at[at]).astype(jnp.float32)
        middle = pltriton.load(zeros[0].at[at]).astype(jnp.bfloat16) if zeros else jnp.bfloat16(MIDDLE)

        def inputs(start: int, width: int) -> jax.Array:
            column = (span_at + start + jnp.arange(width, dtype=jnp.int32))[None, :]
            return pltriton.load(x.at[token[:, None], column], mask=exists[:, None], other=0.0).T

        if values.dtype != jnp.uint8:
            column = (span_at + jnp.arange(span, dtype=jnp.int32))[None, :]
            tile = pltriton.load(values.at[inside[:, None], column])
            product = pltriton.dot(tile.astype(jnp.bfloat16), inputs(0, span))
        else:
            half = span // 2
            column = (span_at // 2 + jnp.arange(half, dtype=jnp.int32))[None, :]
            pair = pltriton.load(values.at[inside[:, None], column]).astype(jnp.uint16)
            offset = jnp.reshape(middle + jnp.bfloat16(_EXACT), (-1, 1)) if zeros else middle + jnp.bfloat16(_EXACT)
            low, high = (_numbers(bits, offset) for bits in (pair & jnp.uint16(15), pair >> jnp.uint16(4)))
            product = pltriton.dot(low, inputs(0, half)) + pltriton.dot(high, inputs(half, half))
        return sums + product * scale[:, None]

    sums = lax.fori_loop(0, steps, step, jnp.zeros((config.rows, config.tokens), jnp.float32))
    target = out.at[pl.program_id(2), token[None, :], row[:, None]]
    mask = exists[None, :] & (row < outputs)[:, None]
    pltriton.store(target, sums.astype(out.dtype), mask=mask)


_EXACT = 128  # a bfloat16 from here to 255 has its integer in its last seven bits


def _numbers(bits: jax.Array, offset: jax.Array) -> jax.Array:
    """4-bit numbers less their zero points, exactly, in bfloat16.

    An integer that is put into the last bits of the number 128 is 128 more than itself: three operations on 16 bits
    each, where a conversion from integers takes a quarter of the rate.
    """
    biased = lax.bitcast_convert_type(bits | jnp.uint16(0x4300), jnp.bfloat16)
    return biased - offset
