"""Gate and up of an MLP for up to 64 tokens on Hopper (``lib.weight_first``): a tile has the same units of both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from pallas_kernels import _compat
from pallas_kernels.lib import weight_first
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.lib.weight_first import Block, Plan
from pallas_kernels.quantize import quantize_rows

LEAST_ROWS = 64  # of a tile in e4m3: with fewer, a block of 64 reads the scales of units behind the last


def plan_of(x: Any, weight: Any) -> Plan | None:
    """How the product is cut up, or None if it cannot be: a tile has units of one part of the weight."""
    parts, sets, units, width = weight.shape
    return weight_first.best_plan(tokens_of(x), parts * units, width, x.dtype, sets=sets, part=units)


def slower(x: Any, weight: Any) -> str | None:
    """Why other products are measured faster, or None."""
    return weight_first.slower(x, weight, plan_of(x, weight))


def refusal(x: Any, weight: Any) -> str | None:
    """Why this kernel cannot do this call, or None."""
    if x.dtype == jnp.float8_e4m3fn:
        return "The product of gate and up takes e4m3 with scales alone (`fp8_swiglu`)."
    return weight_first.refusal(x, weight, plan_of(x, weight))


@jax.jit
def swiglu(x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"]) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    if reason := refusal(x, weight):
        raise NotImplementedError(reason)
    return _hidden_units(x, weight, (), x.dtype)


def fp8_refusal(x: Any, weight: Any) -> str | None:
    """Why this kernel cannot do this call in e4m3, or None; it loads the scales of 64 rows at a time."""
    plan = plan_of(x, weight)
    if reason := weight_first.refusal(x, weight, plan):
        return reason
    if plan is not None and plan.rows >= LEAST_ROWS:
        return None
    return f"The product of gate and up in e4m3 needs tiles of at least {LEAST_ROWS} units."


@functools.partial(jax.jit, static_argnames="dtype")
def fp8_swiglu(
    x: Float8e4m3fn[Array, "*T D"],
    of_tokens: Float[Array, "*T"],
    weight: Float8e4m3fn[Array, "E 2 I D"],
    of_units: Float[Array, "E 2 I"],
    dtype: DTypeLike,
) -> tuple[Float8e4m3fn[Array, "*T F"], Float[Array, "*T"]]:
    """See ``pallas_kernels.fp8_swiglu``."""
    if reason := fp8_refusal(x, weight):
        raise NotImplementedError(reason)
    return quantize_rows(_hidden_units(x, weight, (of_tokens.reshape(-1), of_units), dtype))


def _hidden_units(x: jax.Array, weight: jax.Array, scales: tuple[jax.Array, ...], dtype: DTypeLike) -> jax.Array:
    """The hidden units of a call that is not refused; scales are those of tokens and of rows of the weight, or none."""
    parts, _, units, _ = weight.shape
    tokens, plan = tokens_of(x), plan_of(x, weight)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), dtype)
    assert plan is not None, "else it is refused"
    if scales:
        of_tokens, of_units = scales
        scales = jnp.pad(of_tokens, (0, plan.tokens - tokens)), of_units
    operands = _compat.vary_alike(weight_first.padded(x, plan), weight, *scales)
    output = _compat.out_like((1, tokens, parts * units), dtype, operands[0])

    def swiglu_weight_first(x: Any, weight: Any, *refs: Any, **s: Any) -> None:
        *scales, out = refs
        tile, of_part = lax.axis_index("tile"), units // plan.rows
        part, unit = lax.div(tile, of_part), lax.rem(tile, of_part) * plan.rows

        def finish(block: Block, *sums: jax.Array) -> None:
            if scales:
                rows = pl.ds(unit + block.start, block.count)
                sums = tuple(_scaled(half, scales[0], scales[1].at[part, i, rows]) for i, half in enumerate(sums))
            gate, up = (half.astype(out.dtype).astype(jnp.float32) for half in sums)
            hidden = gate / (1 + jnp.exp(-gate)) * up
            store_transposed(hidden, out, 0, tile * plan.rows + block.start, block.kept)

        sources = [weight.at[part, half, pl.ds(unit, plan.rows)] for half in range(2)]
        weight_first.multiply(plan, x, sources, finish, s)

    (out,) = weight_first.launch(swiglu_weight_first, plan, [output], x.dtype)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    return out.reshape(*x.shape[:-1], parts * units)


def _scaled(sums: jax.Array, of_tokens: Any, of_rows: Any) -> jax.Array:
    """Sums [rows, tokens] times the scales of both, which lie in global memory."""
    for axis, scales in enumerate((of_rows, of_tokens)):
        loaded = _compat.smem_load(scales, plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        sums *= lax.broadcast_in_dim(loaded, sums.shape, (axis,))
    return sums
