"""How weights in 4 bits lie in memory: four numbers to a 16-bit word, a quarter of a span of inputs apart.

A span is 128 inputs of one group, or what divides both. Word j of a span holds inputs j, j + span / 4, j + span / 2
and j + 3 span / 4, the first in its lowest four bits. So the numbers in one place of a run of words are a run of
inputs: a kernel shifts and masks two words in a register at once, has two neighbours then, and moves nothing to other
threads.
"""

from __future__ import annotations

import math
from typing import Any

PLACES = 4  # numbers of a word
LONGEST = 128  # inputs of a span: a kernel's step


def span_of(values: Any, scales: Any) -> int:
    """Inputs of a span, of a packed weight [..., I / 4] and its scales [..., G]."""
    return span_of_group(PLACES * values.shape[-1] // scales.shape[-1])


def span_of_group(group: int) -> int:
    """Inputs of a span where so many inputs share a scale."""
    return math.gcd(group, LONGEST)
