"""Products of some rows of a weight in few bits with some rows of activations, inside of a Triton kernel.

Numbers are widened in registers, exactly, and multiplied on the tensor cores a span of inputs at a time (``layout``);
the float32 sums of a span are then multiplied by its scale. So neither the numbers nor the scales are rounded.

What a step must not do was read from machine code (BENCH.md): wait for a scale, load bytes one by one, or convert
numbers by the instructions that run at an eighth of the rate of others.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.quantized_product.layout import (
    E4M3_BITS,
    PLACES,
    PLACES_E4M3,
    places_of,
    span_of_group,
)
from pallas_kernels.quantized_product.reference import MIDDLE

LEAST = 16  # inputs and rows of x of an MMA


def step_of(values: Any, group: int, depth: int) -> int:
    """Inputs of a step, which are of one group: a span of words, else at most ``depth``."""
    return math.gcd(group, depth) if places_of(values) == 1 else span_of_group(group)


def group_refusal(group: int) -> str | None:
    """Why groups of so many inputs cannot be multiplied so, or None."""
    if span_of_group(group) < 2 * LEAST:
        return f"The Triton product needs groups of a multiple of {2 * LEAST} inputs; these have {group}."
    return None


def products(
    x: Any,
    row: Any,
    exists: Any,
    weight: Any,
    outputs: list[jax.Array],
    steps: tuple[Any, int, int],
    is_plain: bool,
) -> list[jax.Array]:
    """The product of each set of rows of the weight with some rows of x, float32 [row of the weight, row of x].

    Args:
        x: reference to activations [T, I].
        row: rows of x.
        exists: whether each is one; others count as zeros, and are not read.
        weight: a `FewBits` of references to matrices, a row for each output.
        outputs: sets of rows of the weight.
        steps: the first step of the product, the number of its steps, and the inputs of each.
        is_plain: whether Pallas interprets the kernel.
    """
    values, scales, zeros = weight
    first, count, span = steps
    group = x.shape[1] // scales.shape[1]
    spans, width = x.shape[1] // span, span // places_of(values)
    of_input, of_sum = _E4M3_FACTORS if values.dtype == jnp.int16 else (1.0, 1.0)

    def factors(at: Any) -> list[list[jax.Array]]:
        """Scales, and zero points if there are any, of a span; the next step's are loaded before this one's are used.

        Triton keeps only those loads in flight that feed the tensor cores, so a step would wait for these.
        """
        return [_factors(output, lax.div(jnp.minimum(at, spans - 1) * span, group)) for output in outputs]

    def _factors(output: jax.Array, at: Any) -> list[jax.Array]:
        place = output, jnp.full_like(output, at)
        return [pltriton.load(part.at[place]) for part in (scales, zeros) if part is not None]

    def step(k: Any, carried: Any) -> Any:
        sums, parts = carried
        at = first + k
        ahead = factors(at + 1)
        # Columns are counted in elements. Half of a number of inputs would be a division that rounds down, behind which
        # Triton does not see that columns are neighbours: it loaded byte by byte, and kept none of it in flight.
        column = (at * width + jnp.arange(width, dtype=jnp.int32))[None, :]
        tiles = [
            widened(pltriton.load(values.at[output[:, None], column]), zero, is_plain)
            for output, (_, *zero) in zip(outputs, parts, strict=True)
        ]
        column = (at * span + jnp.arange(span, dtype=jnp.int32))[None, :]
        inputs = pltriton.load(x.at[row[:, None], column], mask=exists[:, None], other=0.0).T * of_input
        scaled = [
            pltriton.dot(tile, inputs) * (scale.astype(jnp.float32) * of_sum)[:, None]
            for tile, (scale, *_) in zip(tiles, parts, strict=True)
        ]
        return [total + part for total, part in zip(sums, scaled, strict=True)], ahead

    zero_sums = [jnp.zeros((len(output), len(row)), jnp.float32) for output in outputs]
    sums: list[jax.Array]
    sums, _ = lax.fori_loop(0, count, step, (zero_sums, factors(first)))
    return sums


def widened(tile: jax.Array, zero: list[jax.Array], is_plain: bool) -> jax.Array:
    """A tile of the weight, less its zero points, exactly, in bfloat16 [row, input]; words of e4m3 as `small_e4m3`."""
    if tile.dtype == jnp.int16:
        return _beside(*(small_e4m3(tile, place, is_plain) for place in range(PLACES_E4M3)))
    if tile.dtype != jnp.uint16:  # by way of float32: Triton's direct way takes an instruction at an eighth of the rate
        return tile.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
    offset = -(zero[0].astype(jnp.bfloat16) + _EXACT)[:, None] if zero else jnp.bfloat16(-_EXACT - MIDDLE)
    offset = jnp.broadcast_to(offset, tile.shape)
    first, second, third, fourth = (numbers(tile, offset, place, is_plain) for place in range(PLACES))
    return _beside(_beside(first, second), _beside(third, fourth))


_EXACT = 128  # a bfloat16 from here to 255 has its integer in its last seven bits


def numbers(words: jax.Array, offset: jax.Array, place: int, is_plain: bool) -> jax.Array:
    """The 4-bit numbers in one of the four places of 16-bit words, plus an offset of -128 or less, in bfloat16.

    An integer that is put into the last bits of the number 128 is 128 more than itself, so no integer is converted. The
    compiler does not see that two words in a register can be shifted, masked and joined as one: the assembly does two
    in three instructions, where it takes six. Pallas cannot interpret assembly, and is given the plain expression.
    """
    if is_plain:
        bits = ((words >> jnp.uint16(4 * place)) & jnp.uint16(15)) | jnp.uint16(0x4300)
        return lax.bitcast_convert_type(bits, jnp.bfloat16) + offset
    [wide] = pltriton.elementwise_inline_asm(
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
    return wide


# What products with `small_e4m3` lack of 2**120. The inputs get most of it, so that no sum in float32 underflows, and
# no input of less than 2**63 overflows; both are exact.
_E4M3_FACTORS = 2.0**64, 2.0**56


def small_e4m3(words: jax.Array, place: int, is_plain: bool) -> jax.Array:
    """The e4m3 numbers in one of the two places of 16-bit words, times 2**-120, in bfloat16; NaN is 480.

    The bits of a number are those of a bfloat16 whose exponent has another bias. Moving two at a time takes one or
    four instructions (`layout`), where conversions by way of float16 and float32 take four, two at half the rate.
    """
    if is_plain:
        bits = words & jnp.int16(0x87F0 - 0x10000)
        if place == 1:
            bits = (words << 4 & jnp.int16(0x80F0 - 0x10000)) | (words >> 4 & jnp.int16(0x0700))
        return lax.bitcast_convert_type(bits, jnp.bfloat16)
    [small] = pltriton.elementwise_inline_asm(
        "{ .reg .b32 high, low;\n" + E4M3_BITS[place].format("$0") + " }",
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return small


def _beside(left: jax.Array, right: jax.Array) -> jax.Array:
    """Two tiles of as many rows, side by side: no data moves, since a thread holds as many neighbours of each."""
    rows, width = left.shape
    return jnp.stack([left, right], axis=-1).transpose(0, 2, 1).reshape(rows, 2 * width)
