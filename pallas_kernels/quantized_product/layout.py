"""How weights in few bits lie in memory, and how 16-bit words hold four numbers of 4 bits, or two in e4m3.

A span is 128 inputs of one group, or what divides both. Word j of a span holds inputs j, j + span / 4, j + span / 2
and j + 3 span / 4, the first in its lowest bits, or j and j + span / 2 in e4m3. So the numbers in one place of a run of
words are a run of inputs: a kernel shifts and masks two words in a register at once, has two neighbours then, and moves
nothing to other threads.

The bits of e4m3 numbers, sign s, exponent e and mantissa m, stand where a bfloat16 has them, those of the first as they
are and of the second after two shifts: five instructions widen two words, where bytes take seven.

    bit of a word    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    first number      s              e  e  e  e  m  m  m
    second number        e  e  e  s                       e  m  m  m

Experts in e4m3 are such words. Other weights in e4m3 are arrays of that dtype, since the tensor cores of a Hopper read
them in shared memory as they are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Int16, UInt8, UInt16

PLACES = 4  # numbers of a word in 4 bits
PLACES_E4M3 = 2  # in e4m3
LONGEST = 128  # inputs of a span: a kernel's step
# PTX that moves the numbers in a place of a register's two words, $1, to where two bfloat16 have their bits.
E4M3_BITS = (
    "and.b32 {}, $1, 0x87f087f0;\n",
    "shl.b32 high, $1, 4;\n"
    "shr.b32 low, $1, 4;\n"
    "and.b32 low, low, 0x07000700;\n"
    "lop3.b32 {}, high, 0x80f080f0, low, 0xea;\n",  # (a & b) | c
)


class FewBits(NamedTuple):
    """A weight [*O, I] in few bits: (number - zero point) * scale; the I / G inputs of a group share both.

    Attributes:
        values: 4-bit numbers, four to a word, or e4m3 numbers, which have no zero point, one by one or two to a word;
            the dtype says which.
        scales: bf16, f16 or f32.
        zeros: zero points of 4-bit numbers, 0 to 16; None is 8.
    """

    values: UInt16[Array, "*O packed"] | Int16[Array, "*O pairs"] | Float8e4m3fn[Array, "*O I"]
    scales: Float[Array, "*O G"]
    zeros: UInt8[Array, "*O G"] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the numbers have 4 bits."""
        return bool(self.values.dtype == jnp.uint16)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [*O, I]."""
        *outputs, length = self.values.shape
        return (*outputs, length * places_of(self.values))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.shape[-1] // self.scales.shape[-1])

    def check(self) -> None:
        """Raise ValueError, which prints them, for parts that do not belong together."""
        values, scales, zeros = self
        if not self.is_packed and (values.dtype not in (jnp.float8_e4m3fn, jnp.int16) or zeros is not None):
            points = "" if zeros is None else " with zeros"
            raise ValueError(
                "values must be uint16 (4 bits), or int16 or float8_e4m3fn (e4m3) without zeros; got "
                f"{values.dtype}{points}"
            )
        *outputs, groups = scales.shape
        is_float = jnp.issubdtype(scales.dtype, jnp.floating)
        if self.shape[:-1] != tuple(outputs) or self.shape[-1] % groups or not is_float:
            raise ValueError(
                f"scales must be floats [*O, G] for a weight {list(self.shape)}, G dividing the last; got "
                f"{scales.dtype}{list(scales.shape)}"
            )
        if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != jnp.uint8):
            raise ValueError(f"zeros must be uint8 {list(scales.shape)}; got {zeros.dtype}{list(zeros.shape)}")


def places_of(values: Any) -> int:
    """Numbers of an element of such values."""
    return {"uint16": PLACES, "int16": PLACES_E4M3}.get(jnp.dtype(values.dtype).name, 1)


def span_of(values: Any, scales: Any) -> int:
    """Inputs of a span, of words [..., words] and their scales [..., G]."""
    return span_of_group(places_of(values) * values.shape[-1] // scales.shape[-1])


def span_of_group(group: int) -> int:
    """Inputs of a span where so many inputs share a scale."""
    return math.gcd(group, LONGEST)
