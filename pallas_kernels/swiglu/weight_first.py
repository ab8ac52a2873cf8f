"""Gate and up of an MLP for up to 64 tokens on Hopper (``lib.weight_first``): a tile has the same units of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.lib import weight_first
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.lib.weight_first import Block, Plan


def plan_of(x: Any, weight: Any) -> Plan | None:
    """How the product is cut up, or None if it cannot be: a tile has units of one part of the weight."""
    parts, sets, units, width = weight.shape
    return weight_first.best_plan(tokens_of(x), parts * units, width, sets, part=units)


def slower(x: Any, weight: Any) -> str | None:
    """Why other products are measured faster, or None."""
    return weight_first.slower(x, weight, plan_of(x, weight))


def refusal(x: Any, weight: Any) -> str | None:
    """Why this kernel cannot do this call, or None."""
    return weight_first.refusal(x, weight, plan_of(x, weight))


@jax.jit
def swiglu(x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"]) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    parts, _, units, _ = weight.shape
    tokens, plan = tokens_of(x), plan_of(x, weight)
    if reason := weight_first.refusal(x, weight, plan):
        raise NotImplementedError(reason)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), x.dtype)
    assert plan is not None, "else it is refused"
    operands = _compat.vary_alike(weight_first.padded(x, plan), weight)
    output = _compat.out_like((1, tokens, parts * units), x.dtype, operands[0])

    def swiglu_weight_first(x: Any, weight: Any, out: Any, **s: Any) -> None:
        tile, of_part = lax.axis_index("tile"), units // plan.rows
        part, unit = lax.div(tile, of_part), lax.rem(tile, of_part) * plan.rows

        def finish(block: Block, *sums: jax.Array) -> None:
            gate, up = (half.astype(out.dtype).astype(jnp.float32) for half in sums)
            hidden = gate / (1 + jnp.exp(-gate)) * up
            store_transposed(hidden, out, 0, tile * plan.rows + block.start, block.kept)

        sources = [weight.at[part, half, pl.ds(unit, plan.rows)] for half in range(2)]
        weight_first.multiply(plan, x, sources, finish, s)

    (out,) = weight_first.launch(swiglu_weight_first, plan, [output], x.dtype)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    return out.reshape(*x.shape[:-1], parts * units)
