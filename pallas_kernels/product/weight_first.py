"""The product of up to 64 tokens on Hopper, which reads its weight nearly as fast as a copy (``lib.weight_first``)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat
from pallas_kernels.lib import weight_first
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.lib.weight_first import Block, Plan

RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)


def plan_of(x: Any, weight: Any) -> Plan | None:
    """How the product is cut up, or None if it cannot be."""
    return weight_first.best_plan(tokens_of(x), len(weight), weight.shape[1], x.dtype)


def slower(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why other products are measured faster, or None; any dtype of the result will do."""
    del dtype
    return weight_first.slower(x, weight, plan_of(x, weight))


def refusal(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why this kernel cannot do this call with results of that dtype, or None."""
    if dtype not in RESULTS:
        return f"The product with the weight first gives bf16, f16 and f32; {jnp.dtype(dtype)} is asked for."
    return weight_first.refusal(x, weight, plan_of(x, weight))


@functools.partial(jax.jit, static_argnames="dtype")
def product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``."""
    dtype = dtype or x.dtype
    if reason := refusal(x, weight, dtype):
        raise NotImplementedError(reason)
    [out] = _products(x, [weight], dtype)
    return out


def slower_beside(x: Any, weight: Any, other: Any) -> str | None:
    """Why two products are faster, or None."""
    return slower(x, weight, x.dtype) or _unfit(x, weight, other)


def refusal_beside(x: Any, weight: Any, other: Any) -> str | None:
    """Why this kernel cannot do this call, or None."""
    return refusal(x, weight, x.dtype) or _unfit(x, weight, other)


def _unfit(x: Any, weight: Any, other: Any) -> str | None:
    """Why another weight has no room beside the first, or None."""
    plan = plan_of(x, weight)
    if plan is None or _tiles_beside(plan, other):
        return None
    idle = _compat.sm_count() - plan.tiles
    return (
        f"The other weight must fit on the multiprocessors that the first one leaves idle, in tiles of at most "
        f"{plan.rows} rows; it has {len(other)}, and {idle} are idle."
    )


def _tiles_beside(plan: Plan, other: Any) -> int:
    """Tiles of another weight on multiprocessors that a plan leaves idle; 0 if they do not fit there."""
    tiles = next(weight_first.tiles_of(len(other), _compat.sm_count() - plan.tiles), 0)
    return tiles if tiles and len(other) // tiles <= plan.rows else 0


@jax.jit
def product_beside(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], other: Float[Array, "P D"]
) -> tuple[Float[Array, "*T O"], Float[Array, "*T P"]]:
    """See ``pallas_kernels.product_beside``."""
    if reason := refusal_beside(x, weight, other):
        raise NotImplementedError(reason)
    out, beside = _products(x, [weight, other], x.dtype)
    return out, beside


def _products(x: jax.Array, weights: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """The products with the first weight, and with another beside it if there is one."""
    tokens, plan = tokens_of(x), plan_of(x, weights[0])
    if tokens == 0:
        return [jnp.zeros((*x.shape[:-1], len(weight)), dtype) for weight in weights]
    assert plan is not None, "else it is refused"
    tiles = [plan.tiles, *(_tiles_beside(plan, other) for other in weights[1:])]
    operands = _compat.vary_alike(weight_first.padded(x, plan), *weights)
    outputs = [_compat.out_like((1, tokens, len(weight)), dtype, operands[0]) for weight in weights]

    def product_weight_first(x: Any, *refs: Any, **s: Any) -> None:
        tile, first = lax.axis_index("tile"), 0
        for weight, out, count in zip(refs[: len(weights)], refs[len(weights) :], tiles, strict=True):
            is_mine = (tile >= first) & (tile < first + count)
            pl.when(is_mine)(functools.partial(_multiply, plan, x, weight, out, tile - first, count, s))
            first += count

    run = weight_first.launch(product_weight_first, plan, outputs, x.dtype, others=sum(tiles[1:]))
    results = _compat.vary_alike(*run(*operands), *operands)  # Mosaic does not mark its outputs as varying
    return [out.reshape(*x.shape[:-1], -1) for out in results[: len(weights)]]


def _multiply(plan: Plan, x: Any, weight: Any, out: Any, tile: Any, tiles: int, s: dict[str, Any]) -> None:
    """The body of one CTA, which has one of so many tiles of a weight."""
    rows = weight.shape[0] // tiles

    def finish(block: Block, sums: jax.Array) -> None:
        store_transposed(sums, out, 0, tile * rows + block.start, block.kept)

    weight_first.multiply(plan, x, [weight.at[pl.ds(tile * rows, rows)]], finish, s)
