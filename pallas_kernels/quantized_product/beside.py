"""A product with few bits, and another one on multiprocessors that it leaves idle: with a 16-bit weight of few rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib import warp_product
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED
from pallas_kernels.quantized_product import mosaic, mosaic_plan

_MIN_BYTES = 20 << 20  # of numbers of the first weight; beside smaller ones it was not measured
_MOST_ROWS = 24  # of the other weight, on a multiprocessor


def slower(x: Any, values: Any, scales: Any, zeros: Any, other: Any) -> str | None:
    """Why two kernels may be as fast (BENCH.md), or None; `refusal` may object all the same."""
    if (size := values.size * values.dtype.itemsize) < _MIN_BYTES:
        least, mib = _MIN_BYTES >> 20, size / (1 << 20)
        return f"It was measured faster beside weights of at least {least} MiB; this one has {mib:.3g}."
    if refusal(x, values, scales, zeros, other) is None:
        plan = mosaic_plan.plan_of(mosaic_plan.default_config(x, values, scales), x, values, scales)
        if (rows := len(other) // plan.tiles_beside(other)) > _MOST_ROWS:
            return f"It was measured faster for up to {_MOST_ROWS} rows on a multiprocessor; these are {rows}."
    return None


def refusal(x: Any, values: Any, scales: Any, zeros: Any, other: Any) -> str | None:
    """Why this kernel cannot do this call, or None."""
    if reason := mosaic_plan.refusal(x, values, scales, zeros, x.dtype):
        return reason
    config = mosaic_plan.default_config(x, values, scales)
    if reason := warp_product.refusal(x.shape[-1], other.dtype, config.consumers):
        return reason
    plan = mosaic_plan.plan_of(config, x, values, scales)
    if plan.tiles_beside(other):
        return None
    return (
        "The other weight must fit on multiprocessors that the first one leaves idle, in tiles of a multiple of "
        f"{ALIGNED} rows whose sums shared memory holds; it has {len(other)} rows, and "
        f"{_compat.sm_count() - plan.ctas} are idle."
    )


@jax.jit
def product_beside(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    other: Float[Array, "P I"],
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """See ``pallas_kernels.quantized_product_beside``."""
    if reason := refusal(x, values, scales, zeros, other):
        raise NotImplementedError(reason)
    if tokens_of(x) == 0:
        first, second = (jnp.zeros((*x.shape[:-1], len(weight)), x.dtype) for weight in (values, other))
        return first, second
    plan = mosaic_plan.plan_of(mosaic_plan.default_config(x, values, scales), x, values, scales)
    parts, beside = mosaic.in_parts(plan, x, (values, scales, zeros), x.dtype, other)
    assert beside is not None, "there is another weight"
    return mosaic.whole(parts, x.dtype), beside
