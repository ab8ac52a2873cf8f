"""What 4-bit pages (``lib.int4_kv``) change in the Triton kernel: numbers are multiplied, sums get scales and middles.

A stored number n is ``(n - 7.5) * scale + middle``, so for one key and one row

    q.k = scale * (q.n - 7.5 * sum(q)) + middle * sum(q),

and likewise for values, whose scales join the weights of the softmax. Products thus see numbers 0 to 15, which 16 bits
hold exactly, and no element is scaled. What is subtracted is computed from the operands as they were rounded: the
numbers' offset cancels without an error of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.lib.halves import Halves, half_rows
from pallas_kernels.lib.int4_kv import CENTRE, HIGHEST, signs
from pallas_kernels.paged_attention.arguments import Arguments, operand

# Of weights times scales of values, which float16's range would cut off, and bfloat16 holds down to 1e-38.
_WEIGHTS = jnp.bfloat16


def rotation(args: Arguments) -> Float[Array, "H2 H2"]:
    """The signs that rotate a half of the queries, in the dtype of the product with them."""
    dtype = args.q.dtype if args.q.dtype.itemsize == 2 else jnp.float16
    return jnp.asarray(signs(args.q.shape[-1] // 2), dtype)


def rotated_queries(q: tuple[Any, Any], rows: tuple[Any, ...], valid: jax.Array) -> Halves:
    """Rows of the queries, rotated as keys are, in float16; zeros for rows that are not valid.

    Each program rotates its own: two products with a matrix of signs, which 16 bits hold, so that sums are as exact as
    float32. They are less work than one page.

    Args:
        q: references to queries and to the signs of ``rotation``.
        rows: sequence, tokens and heads of the rows.
        valid: [rows, 1].
    """
    queries, matrix = q[0], q[1][...]
    halves = [pltriton.load(x, mask=valid, other=0.0) for x in half_rows(queries, *rows)]
    left, right = (pltriton.dot(operand(half, matrix.dtype), matrix) for half in halves)
    factor = queries.shape[-1] ** -0.5
    return [operand(half * factor, jnp.float16) for half in (left + right, left - right)]


def int4_products(queries: Halves, pages: Any, place: tuple[Any, Any]) -> jax.Array:
    """Products of rotated queries and the keys of a page of 4-bit ``pages``, references, [rows, S]."""
    halves = _unpacked(pages.numbers[*place, :, pl.ds(0, pages.shape[-1] // 2)], queries[0].dtype)
    left, right = (pltriton.dot(q, k.T) for q, k in zip(queries, halves, strict=True))
    sums = [q.astype(jnp.float32).sum(1)[:, None] for q in queries]
    total = sums[0] + sums[1]
    scale, middle = (x[*place, :].astype(jnp.float32)[None, :] for x in (pages.scale, pages.middle))
    return (left + right - CENTRE * total) * scale + middle * total


def int4_weighted(weights: jax.Array, pages: Any, place: tuple[Any, Any], inside: jax.Array) -> Halves:
    """Halves of the sums of a page's values, weighted; scales of positions that are not inside may be NaN."""
    scale, middle = (
        pltriton.load(x.at[place], mask=inside, other=0.0).astype(jnp.float32)[None, :]
        for x in (pages.scale, pages.middle)
    )
    scaled = (weights * scale).astype(_WEIGHTS)
    rest = (weights * middle - CENTRE * scaled.astype(jnp.float32)).sum(1)[:, None]
    halves = _unpacked(pages.numbers[*place, :, pl.ds(0, pages.shape[-1] // 2)], _WEIGHTS)
    return [pltriton.dot(scaled, half) + rest for half in halves]


def _unpacked(numbers: jax.Array, dtype: Any) -> Halves:
    """The numbers of the first and of the second half of heads."""
    wide = numbers.astype(jnp.int32)
    return [(wide & HIGHEST).astype(dtype), (wide >> 4).astype(dtype)]
