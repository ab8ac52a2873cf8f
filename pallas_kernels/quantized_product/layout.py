"""How weights in few bits lie in memory, and how those in 4 bits put four numbers into a 16-bit word.

A span is 128 inputs of one group, or what divides both. Word j of a span holds inputs j, j + span / 4, j + span / 2
and j + 3 span / 4, the first in its lowest four bits. So the numbers in one place of a run of words are a run of
inputs: a kernel shifts and masks two words in a register at once, has two neighbours then, and moves nothing to other
threads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, UInt8, UInt16

PLACES = 4  # numbers of a word
LONGEST = 128  # inputs of a span: a kernel's step


class FewBits(NamedTuple):
    """A weight [*O, I] in few bits: (number - zero point) * scale; the I / G inputs of a group share both.

    Attributes:
        values: 4-bit numbers, four to a word, or e4m3 numbers, which have no zero point.
        scales: bf16, f16 or f32.
        zeros: zero points of 4-bit numbers, 0 to 16; None is 8.
    """

    values: UInt16[Array, "*O packed"] | Float8e4m3fn[Array, "*O I"]
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
        return (*outputs, length * (PLACES if self.is_packed else 1))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.shape[-1] // self.scales.shape[-1])

    def check(self) -> None:
        """Raise ValueError, which prints them, for parts that do not belong together."""
        values, scales, zeros = self
        if not self.is_packed and (values.dtype != jnp.float8_e4m3fn or zeros is not None):
            points = "" if zeros is None else " with zeros"
            raise ValueError(f"values must be uint16, or e4m3 without zeros; got {values.dtype}{points}")
        *outputs, groups = scales.shape
        is_float = jnp.issubdtype(scales.dtype, jnp.floating)
        if self.shape[:-1] != tuple(outputs) or self.shape[-1] % groups or not is_float:
            raise ValueError(
                f"scales must be floats [*O, G] for a weight {list(self.shape)}, G dividing the last; got "
                f"{scales.dtype}{list(scales.shape)}"
            )
        if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != jnp.uint8):
            raise ValueError(f"zeros must be uint8 {list(scales.shape)}; got {zeros.dtype}{list(zeros.shape)}")


def span_of(values: Any, scales: Any) -> int:
    """Inputs of a span, of a packed weight [..., I / 4] and its scales [..., G]."""
    return span_of_group(PLACES * values.shape[-1] // scales.shape[-1])


def span_of_group(group: int) -> int:
    """Inputs of a span where so many inputs share a scale."""
    return math.gcd(group, LONGEST)
