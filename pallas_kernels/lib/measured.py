"""What products were measured on an H200 (product/BENCH.md): which calls our kernels may be picked for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

MAX_STREAM_TOKENS = 16  # tokens of the Triton products, which are the second operand of an MMA of that width
MIN_BYTES = 1 << 25  # of a 16-bit weight: smaller ones were not measured; half of it for e4m3, as many numbers


def tokens_of(x: Any) -> int:
    """The number of rows of x, over all leading axes; 0 where rows are empty."""
    return x.size // x.shape[-1] if x.shape[-1] else 0


def is_large(weight: Any) -> bool:
    """Whether a weight is as large as those that were measured."""
    return _bytes(weight) >= _min_bytes(weight)


def too_small(weight: Any) -> str | None:
    """One sentence if a weight is smaller than those that were measured, else None."""
    if is_large(weight):
        return None
    size, least = (n / (1 << 20) for n in (_bytes(weight), _min_bytes(weight)))
    return f"It was measured for weights of at least {least:g} MiB of {weight.dtype}; this one has {size:.3g}."


def _bytes(weight: Any) -> int:
    return int(weight.size * weight.dtype.itemsize)


def _min_bytes(weight: Any) -> int:
    return MIN_BYTES // 2 if weight.dtype == jnp.float8_e4m3fn else MIN_BYTES
