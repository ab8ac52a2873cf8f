"""How weights in 4 bits lie in memory: two numbers to a byte, half a span of inputs apart.

A span is 128 inputs of one group, or as many as divide both. Byte j of a span holds input j in its low four bits and
input j + span / 2 in its high ones. So the low halves of a run of bytes are a run of inputs, and the high halves the
next: a kernel multiplies each by its own part of x and never has to put neighbours side by side.
"""

from __future__ import annotations

import math
from typing import Any

LONGEST = 128  # inputs of a span: a kernel's step


def span_of(values: Any, scales: Any) -> int:
    """Inputs of a span, of a packed weight [..., I / 2] and its scales [..., G]."""
    return span_of_group(2 * values.shape[-1] // scales.shape[-1])


def span_of_group(group: int) -> int:
    """Inputs of a span where so many inputs share a scale."""
    return math.gcd(group, LONGEST)
