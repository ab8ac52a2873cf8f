"""The exact argmax of a head from bounds of its products, on Pallas' Triton backend: few rows are read for it.

A kernel before gives an upper bound of every product, and a good guess of the best row. The exact product of that row
is a lower bound of the largest one, and only rows whose upper bound reaches it are multiplied. They are a handful of
rows of a head for each token, far apart in memory: a program looks at the bounds of some rows for some tokens, and
either leaves at once or multiplies the few rows that it found, one after another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.largest_product.reference import largest

CHUNK, TOKENS = 512, 16  # rows of the head, and tokens, whose bounds a program looks at
FEW = 48  # candidates of a program that it multiplies one by one; if there are more it multiplies all of its rows
ROWS, DEPTH, STAGES = 64, 128, 2  # rows and inputs of a step that multiplies all of them, and steps in flight
WIDTH = 1024  # inputs of a single row that are read at a time: 16 bytes for each thread
WARPS = 4  # of the programs of both kernels

State = tuple[jax.Array, jax.Array]  # of each token of a program: the largest product so far, and its row


@functools.partial(jax.jit, static_argnames="interpret")
def exact_largest(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    upper: Float[Array, "R V"],
    values: Float[Array, "P L"],
    indices: Int[Array, "P L"],
    limit: Int[Array, ""] | int | None,
    *,
    interpret: bool = False,
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """The argmax and the maximum of ``x @ weight.T``, whose sums are float32.

    Args:
      x: final hidden states; bf16 or f16.
      weight: the head; dtype like x.
      upper: upper bounds of the products of the first T of R >= T tokens, which allow for the rounding of sums; NaN
        where there is no bound.
      values: float32; of each of P pieces of the head the largest approximate product, of L >= T tokens. It may be
        wrong: a good one leaves few candidates.
      indices: int32; the row of the head that has it. It matters only where the value is a number above -inf.
      limit: only the first ``limit`` rows of the head count; where it is not positive the product is -inf, and the row
        any row. None is all.
      interpret: runs the kernels on any device, slowly.

    Returns:
      The first row (int32) of the largest product, and that product (float32). For a token with a product that is NaN,
      of a row that is multiplied, the product is NaN and the row any row.
    """
    T, V = len(x), len(weight)
    if T == 0:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32)
    limits = None if limit is None else jnp.asarray(limit, jnp.int32).reshape(1)
    x, weight, upper, values, indices, limits = _compat.vary_alike(x, weight, upper, values, indices, limits)
    [least] = _compat.triton_call(
        _least,
        grid=(T,),
        out_shape=[_compat.out_like((T,), jnp.float32, x)],
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        name="least_largest_product",
    )(x, weight, values, indices, limits)
    grid = pl.cdiv(V, CHUNK), pl.cdiv(T, TOKENS)
    shape = grid[0], grid[1] * TOKENS
    of_chunks, rows = _compat.triton_call(
        _candidates,
        grid=grid,
        out_shape=[_compat.out_like(shape, dtype, x) for dtype in (jnp.float32, jnp.int32)],
        num_warps=WARPS,
        num_stages=STAGES,
        interpret=interpret,
        name="exact_largest_product",
    )(x, weight, upper, least, limits)
    chunk, value = largest(of_chunks[:, :T].T)
    return jnp.take_along_axis(rows[:, :T], chunk[None], axis=0)[0], value


def _least(x: Any, weight: Any, values: Any, indices: Any, limit: Any, least: Any) -> None:
    """One program: the exact product of a token with the row that is likely to have the largest; NaN ends the search.

    Rows of padding may be NaN, and then each of their products is.
    """
    t, P, end = pl.program_id(0), len(values), _end(weight, limit)
    piece = jnp.arange(pl.next_power_of_2(P), dtype=jnp.int32)
    value = pltriton.load(values.at[piece, jnp.full_like(piece, t)], mask=piece < P, other=-jnp.inf)
    best = lax.argmax(jnp.where(jnp.isnan(value), -jnp.inf, value), 0, jnp.int32)
    row = jnp.maximum(jnp.minimum(indices[best, t], jnp.maximum(end, 1) - 1), 0)  # is one of the head in any case
    product = _product(x, t, weight, row)
    least[t] = jnp.where(end <= 0, -jnp.inf, product)


def _candidates(x: Any, weight: Any, upper: Any, least: Any, limit: Any, value: Any, index: Any) -> None:
    """One program: the largest product of some tokens with those of a chunk of rows that can be the largest of all."""
    chunk, end = pl.program_id(0), _end(weight, limit)
    first, first_token = chunk * CHUNK, pl.program_id(1) * TOKENS
    place, column = (jnp.arange(size, dtype=jnp.int32) for size in (TOKENS, CHUNK))
    row, token = first + column, first_token + place
    exists = token < len(x)
    mask = exists[:, None] & (row < len(weight))[None, :]  # without the limit, which would read number by number
    bounds = pltriton.load(upper.at[token[:, None], row[None, :]], mask=mask, other=-jnp.inf).astype(jnp.float32)
    lowest = pltriton.load(least.at[token], mask=exists, other=jnp.inf)
    is_nan = jnp.isnan(lowest)
    counts = (row < end)[None, :] & ~is_nan[:, None]
    is_candidate = mask & counts & ~(bounds < lowest[:, None])  # also where the bound is NaN
    nowhere = TOKENS * CHUNK
    candidates = jnp.where(is_candidate, place[:, None] * CHUNK + column[None, :], nowhere)
    count = jnp.sum(is_candidate.astype(jnp.int32))
    nothing = jnp.where(is_nan, jnp.float32(jnp.nan), jnp.float32(-jnp.inf)), jnp.zeros_like(place) + first

    def one(_: Any, carry: Any) -> Any:
        """Multiply the next candidate; those of a token come by their rows."""
        last, state = carry
        at = jnp.min(jnp.where(candidates > last, candidates, nowhere))
        of_token, of_row = lax.div(at, CHUNK), first + lax.rem(at, CHUNK)
        product = _product(x, first_token + of_token, weight, of_row)
        return at, _larger(state, product, of_row, place == of_token)

    def part(k: Any, state: State) -> State:
        return _larger(state, *_largest_of(x, token, weight, first + k * ROWS, end))

    best, best_row = lax.cond(
        count > FEW,
        lambda: lax.fori_loop(0, CHUNK // ROWS, part, nothing),
        lambda: lax.fori_loop(0, count, one, (jnp.int32(-1), nothing))[1],
    )
    here = jnp.full_like(token, chunk)
    pltriton.store(value.at[here, token], best)
    pltriton.store(index.at[here, token], best_row)


def _end(weight: Any, limit: Any) -> Any:
    """The number of rows that count, which is not positive if none do."""
    return len(weight) if limit is None else jnp.minimum(limit[0], len(weight))


def _larger(state: State, value: Any, row: Any, is_here: Any = True) -> State:
    """The state after one more product of the tokens that are here; NaN stays, and the first of equals."""
    best, best_row = state
    is_larger = is_here & ((value > best) | jnp.isnan(value))
    return jnp.where(is_larger, value, best), jnp.where(is_larger, row, best_row)


def _product(x: Any, token: Any, weight: Any, row: Any) -> jax.Array:
    """The product of one token with one row, float32."""
    D = x.shape[1]
    width = min(WIDTH, pl.next_power_of_2(D))
    pairs = []
    for start in range(0, D, width):
        column = start + jnp.arange(width, dtype=jnp.int32)
        mask: Any = {} if start + width <= D else {"mask": column < D, "other": 0.0}
        sides = (x, token), (weight, row)
        pairs.append([pltriton.load(ref.at[jnp.full_like(column, i), column], **mask) for ref, i in sides])
    products = [a.astype(jnp.float32) * b.astype(jnp.float32) for a, b in pairs]
    return jnp.sum(sum(products[1:], products[0]))


def _largest_of(x: Any, token: jax.Array, weight: Any, first: Any, end: Any) -> State:
    """The largest product of each of these tokens with ``ROWS`` rows from ``first`` on, and its row."""
    (T, D), V = x.shape, len(weight)
    row = first + jnp.arange(ROWS, dtype=jnp.int32)
    exists, last = (token < T)[:, None], jnp.minimum(row, V - 1)

    def step(k: Any, total: jax.Array) -> jax.Array:
        column = (k * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32))[None, :]
        inside = column < D
        inputs = pltriton.load(x.at[token[:, None], column], mask=exists & inside, other=0.0).T
        mask: Any = {} if D % DEPTH == 0 else {"mask": jnp.broadcast_to(inside, (ROWS, DEPTH)), "other": 0.0}
        return total + pltriton.dot(pltriton.load(weight.at[last[:, None], column], **mask), inputs)

    total = lax.fori_loop(0, pl.cdiv(D, DEPTH), step, jnp.zeros((ROWS, TOKENS), jnp.float32))
    total = jnp.where((row < end)[:, None], total, -jnp.inf)
    is_nan = jnp.isnan(total)  # which Triton's maximum passes over
    numbers = jnp.where(is_nan, -jnp.inf, total)
    has_nan = jnp.max(is_nan.astype(jnp.int32), axis=0) > 0
    return jnp.where(has_nan, jnp.nan, jnp.max(numbers, axis=0)), first + lax.argmax(numbers, 0, jnp.int32)
