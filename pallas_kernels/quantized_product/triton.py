"""The product with a weight in few bits on Pallas' Triton backend: numbers are widened in registers, exactly.

A program multiplies some rows of the weight by a block of tokens, a span of inputs at a time (``layout``): 16-bit
numbers on the tensor cores, whose float32 sums are then multiplied by the scale of the span. So neither the numbers nor
the scales are rounded, and each byte of the weight is read once for up to 128 tokens.

Rows of the weight are the first operand of the MMA, as in ``lib.streams``. Where a weight has too few rows to fill the
device, its inputs are split, and the parts are summed by whoever reads the product (``add_norm``).

What a step must not do was read from machine code (BENCH.md): wait for a scale, load bytes one by one, or convert
numbers by the instructions that run at an eighth of the rate of others.
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
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.quantized_product.layout import LONGEST, PLACES, span_of_group
from pallas_kernels.quantized_product.reference import MIDDLE

LEAST = 16  # inputs and tokens of an MMA
MOST_SPLITS = 8
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

    Inputs are split until every multiprocessor has about two programs, whose loads hide each other's latency.
    """
    count, rows = max(1, tokens_of(x)), len(scales)
    is_small = _compat.compute_capability() in SMALL
    if count > 64:
        return Config(rows=128, tokens=64 if is_small else 128, num_stages=2 if is_small else 3, num_warps=8)
    config = Config(
        rows=128 if values.dtype == jnp.uint16 else 64,  # e4m3 takes twice the registers of 4 bits
        tokens=max(LEAST, 1 << (count - 1).bit_length()),
    )
    span = _step(values, x.shape[-1] // scales.shape[1], config)
    size = span * (config.rows * values.shape[-1] * values.dtype.itemsize // x.shape[-1] + 2 * config.tokens)
    stages = min(6, max(3, 1 + (IN_FLIGHT_SMALL if is_small else IN_FLIGHT) // size))
    spans, splits, programs = x.shape[-1] // span, 1, -(-rows // config.rows)
    while may_split and programs * splits < 2 * _compat.sm_count() and spans % (2 * splits) == 0:
        if splits == MOST_SPLITS:
            break
        splits *= 2
    return dataclasses.replace(config, num_stages=stages, splits=splits)


def _step(values: Any, group: int, config: Config) -> int:
    """Inputs of a step, which are of one group."""
    return span_of_group(group) if values.dtype == jnp.uint16 else math.gcd(group, config.depth)


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
    span, outputs = _step(values, group, config), values.shape[0]
    spans = x.shape[1] // span
    width = span // PLACES if values.dtype == jnp.uint16 else span  # of the weight's elements, not of its numbers
    steps = spans // config.splits
    token = pl.program_id(0) * config.tokens + jnp.arange(config.tokens, dtype=jnp.int32)
    exists = token < x.shape[0]
    row = pl.program_id(1) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    inside = jnp.minimum(row, outputs - 1)  # rows beyond the last read the last one's, and are not written
    first = pl.program_id(2) * steps

    def factors(at: Any) -> list[jax.Array]:
        """Scales, and zero points if there are any, of a span; the next step's are loaded before this one's are used.

        Triton keeps only those loads in flight that feed the tensor cores, so a step would wait for these.
        """
        place = inside, jnp.full_like(inside, lax.div(jnp.minimum(at, spans - 1) * span, group))
        return [pltriton.load(part.at[place]) for part in (scales, *zeros)]

    def step(k: Any, carried: Any) -> Any:
        sums, (scale, *zero) = carried
        at = first + k
        ahead = factors(at + 1)
        # Columns are counted in elements. Half of a number of inputs would be a division that rounds down, behind which
        # Triton does not see that columns are neighbours: it loaded byte by byte, and kept none of it in flight.
        column = (at * width + jnp.arange(width, dtype=jnp.int32))[None, :]
        weight = _widened(pltriton.load(values.at[inside[:, None], column]), zero, is_plain)
        column = (at * span + jnp.arange(span, dtype=jnp.int32))[None, :]
        inputs = pltriton.load(x.at[token[:, None], column], mask=exists[:, None], other=0.0).T
        return sums + pltriton.dot(weight, inputs) * scale.astype(jnp.float32)[:, None], ahead

    sums = jnp.zeros((config.rows, config.tokens), jnp.float32)
    sums, _ = lax.fori_loop(0, steps, step, (sums, factors(first)))
    target = out.at[pl.program_id(2), token[None, :], row[:, None]]
    mask = exists[None, :] & (row < outputs)[:, None]
    pltriton.store(target, sums.astype(out.dtype), mask=mask)


def _widened(tile: jax.Array, zero: list[jax.Array], is_plain: bool) -> jax.Array:
    """A tile of the weight, less its zero points, exactly, in bfloat16 [row, input]."""
    if tile.dtype != jnp.uint16:  # by way of float32: Triton's direct way takes an instruction at an eighth of the rate
        return tile.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
    offset = -(zero[0].astype(jnp.bfloat16) + _EXACT)[:, None] if zero else jnp.bfloat16(-_EXACT - MIDDLE)
    offset = jnp.broadcast_to(offset, tile.shape)
    first, second, third, fourth = (_numbers(tile, offset, place, is_plain) for place in range(PLACES))
    return _beside(_beside(first, second), _beside(third, fourth))


_EXACT = 128  # a bfloat16 from here to 255 has its integer in its last seven bits


def _numbers(words: jax.Array, offset: jax.Array, place: int, is_plain: bool) -> jax.Array:
    """The 4-bit numbers in one of the four places of 16-bit words, plus an offset of -128 or less, in bfloat16.

    An integer that is put into the last bits of the number 128 is 128 more than itself, so no integer is converted. The
    compiler does not see that two words in a register can be shifted, masked and joined as one: the assembly does two
    in three instructions, where it takes six. Pallas cannot interpret assembly, and is given the plain expression.
    """
    if is_plain:
        bits = ((words >> jnp.uint16(4 * place)) & jnp.uint16(15)) | jnp.uint16(0x4300)
        return lax.bitcast_convert_type(bits, jnp.bfloat16) + offset
    [numbers] = pltriton.elementwise_inline_asm(
        "{ .reg .b32 bits, one;\n"
        "mov.b32 one, 0x3f803f80;\n"
        f"shr.b32 bits, $1, {4 * place};\n"
        "lop3.b32 bits, bits, 0x000f000f, 0x43004300, 0xea;\n"  # (a & b) | c
        "fma.rn.bf16x2 $0, bits, one, $2; }",  # from sm_80 on; an addition would need sm_90
        args=[words, offset],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return numbers


def _beside(left: jax.Array, right: jax.Array) -> jax.Array:
    """Two tiles of as many rows, side by side: no data moves, since a thread holds as many neighbours of each."""
    rows, width = left.shape
    return jnp.stack([left, right], axis=-1).transpose(0, 2, 1).reshape(rows, 2 * width)
