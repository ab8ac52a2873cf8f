"""The routed experts in plain jnp: the oracle of the kernels, the path of CPUs and TPUs, and differentiable.

A loop goes over blocks of rows of one expert: weights of experts that no token chose are not read, and memory is
bounded by a block's. Gradients are exact, but each block adds to a gradient as large as all experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts.shared import Shared, output
from pallas_kernels.experts.sort import rows_of, sort
from pallas_kernels.quantized_product.layout import FewBits
from pallas_kernels.quantized_product.reference import widened

MIN_ROWS = 2  # of a block; for a single row XLA's CPUs would widen the weight in memory first


def experts(
    x: Float[Array, "*T D"],
    gate_up: Float[Array, "X 2 M D"] | FewBits,
    down: Float[Array, "X D M"] | FewBits,
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    shared: Shared | None = None,
) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.experts``; it sums over a token's experts by their number."""
    (X, _, _, D), k = gate_up.shape, chosen.shape[-1]
    tokens = x.size // D
    if tokens * k == 0:
        return jnp.zeros_like(x)
    rows = max(MIN_ROWS, min(rows_of(tokens * k, X, least=8), tokens))
    operands = (x.reshape(-1, D), gate_up, down, chosen.reshape(-1, k), weights.reshape(-1))
    zeros = [jnp.zeros((size, D), jnp.float32) for size in (tokens, rows)]
    x_rows, gate_up, down, chosen, scales, total, nothing = _compat.vary_alike(*operands, *zeros)
    pairs, *blocks = sort(chosen, X, rows)

    @jax.checkpoint  # or the loop would keep each block's weights for the gradient
    def block(x_rows: Array, gate_up: Any, down: Any, scales: Array, expert: Array, pair: Array) -> Array:
        def products() -> Array:
            hidden = _hidden(x_rows[pair // k], _of_expert(gate_up, expert))
            out = _product(hidden, _of_expert(down, expert))
            return out * scales[pair, None].astype(jnp.float32)

        return lax.cond(expert >= 0, products, lambda: nothing)

    def add(total: Array, at: tuple[Array, ...]) -> tuple[Array, None]:
        expert, first, end = at
        place = first + jnp.arange(rows, dtype=jnp.int32)
        pair = pairs.at[place].get(mode="clip")
        out = block(x_rows, gate_up, down, scales, expert, pair)
        return total.at[jnp.where(place < end, pair // k, tokens)].add(out, mode="drop"), None

    total, _ = lax.scan(add, total, tuple(blocks))
    total = total.reshape(x.shape)
    return (total if shared is None else total + output(x, shared, kernels=False)).astype(x.dtype)


def _of_expert(weight: Array | FewBits, expert: Array) -> Array:
    """One expert's matrix; one in few bits is widened to float32, which is exact where its scales have 16 bits."""
    mine = jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, expert, keepdims=False), weight)
    if not isinstance(mine, FewBits):
        return mine
    matrix = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), mine)
    return widened(*matrix).reshape(mine.shape)


def _hidden(x: Float[Array, "R D"], gate_up: Float[Array, "2 M D"]) -> Float[Array, "R M"]:
    gate, up = (_product(x, weight).astype(x.dtype).astype(jnp.float32) for weight in gate_up)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _product(x: Float[Array, "R D"], weight: Float[Array, "O D"]) -> Float[Array, "R O"]:
    x = x.astype(weight.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
