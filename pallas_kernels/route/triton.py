"""The choice of experts in one kernel on Pallas' Triton backend: a program of one warp for each token.

XLA sorts all logits of a token to take the largest few, and goes on in four more kernels: some 10 us of a layer of one
token, of which this takes 2 to 3 (BENCH.md).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float

from pallas_kernels import _compat
from pallas_kernels.route import Routes

CHUNK = 2048  # inputs of the shared expert's gate that a program reads at a time


@functools.partial(jax.jit, static_argnames=("per_token", "renormalize", "interpret"))
def route(
    logits: Float[Array, "S *T X"],
    is_token: Bool[Array, "*T"],
    per_token: int,
    *,
    renormalize: bool,
    shared: tuple[Float[Array, "*T D"], Float[Array, " D"]] | None,
    interpret: bool = False,
) -> Routes:
    """See ``pallas_kernels.route``."""
    S, X, tokens = logits.shape[0], logits.shape[-1], is_token.size
    outer = is_token.shape
    if tokens == 0:
        nothing = jnp.zeros((*outer, per_token), jnp.float32)
        return Routes(nothing.astype(jnp.int32), nothing, None if shared is None else nothing[..., 0])
    flat = None if shared is None else (shared[0].reshape(tokens, -1), shared[1])
    operands = (logits.reshape(S, tokens, X), is_token.reshape(-1).astype(jnp.int32), flat)
    logits, mask, flat = _compat.vary_alike(*operands)
    shapes: list[tuple[tuple[int, ...], Any]] = [((tokens, per_token), jnp.int32), ((tokens, per_token), jnp.float32)]
    if shared is not None:
        shapes.append(((tokens,), jnp.float32))
    chosen, weights, *opened = _compat.triton_call(
        functools.partial(_route, renormalize=renormalize),
        grid=(tokens,),
        out_shape=[_compat.out_like(shape, dtype, logits) for shape, dtype in shapes],
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="route",
    )(logits, mask, flat)
    chosen, weights = (array.reshape(*outer, per_token) for array in (chosen, weights))
    return Routes(chosen, weights, opened[0].reshape(outer) if opened else None)


def _route(logits: Any, is_token: Any, shared: Any, chosen: Any, weights: Any, *opened: Any, renormalize: bool) -> None:
    """One program: the experts of a token."""
    (S, _, X), k, t = logits.shape, chosen.shape[1], pl.program_id(0)
    wide = pl.next_power_of_2(X)
    expert = jnp.arange(wide, dtype=jnp.int32)
    at = jnp.zeros_like(expert)
    total = jnp.zeros((wide,), jnp.float32)
    for s in range(S):
        total += pltriton.load(logits.at[at + s, at + t, expert], mask=expert < X, other=0.0)
    total = jnp.where(expert < X, total, -jnp.inf)
    is_here = is_token[t] > 0
    pieces = [] if shared is None else _pieces(*shared, t=t)  # on their way while logits are compared
    place = jnp.arange(max(2, pl.next_power_of_2(k)), dtype=jnp.int32)
    experts, values, left = jnp.zeros_like(place), jnp.full(place.shape, -jnp.inf, jnp.float32), total
    for j in range(k):
        mine = jnp.argmax(left).astype(jnp.int32)  # the first of equals
        experts, values = jnp.where(place == j, mine, experts), jnp.where(place == j, jnp.max(left), values)
        left = jnp.where(expert == mine, -jnp.inf, left)
    largest = jnp.max(values)
    scale = jnp.sum(jnp.exp((values if renormalize else total) - largest))
    exists = place < k
    row = jnp.zeros_like(place) + t
    pltriton.store(chosen.at[row, place], jnp.where(is_here, experts, jnp.int32(X)), mask=exists)
    pltriton.store(weights.at[row, place], jnp.exp(values - largest) / scale, mask=exists)
    if shared is not None:
        products = [x.astype(jnp.float32) * gate.astype(jnp.float32) for x, gate in pieces]
        opened[0][t] = 1 / (1 + jnp.exp(-jnp.sum(sum(products[1:], products[0]))))


def _pieces(x: Any, gate: Any, *, t: Any) -> list[tuple[jax.Array, jax.Array]]:
    """A token's inputs and the shared expert's gate, in pieces of equal length."""
    width = x.shape[1]
    chunk = min(CHUNK, pl.next_power_of_2(width))
    pieces = []
    for first in range(0, width, chunk):
        column = first + jnp.arange(chunk, dtype=jnp.int32)
        mask = column < width
        inputs = pltriton.load(x.at[jnp.zeros_like(column) + t, column], mask=mask, other=0.0)
        pieces.append((inputs, pltriton.load(gate.at[column], mask=mask, other=0.0)))
    return pieces
