"""The routed experts of up to 16 tokens, their weights in few bits, on Pallas' Mosaic GPU backend (Hopper).

Triton's programs are one tile each: they find out which tokens have chosen their expert before they read it, and end
with nothing in flight. Here a CTA goes from tile to tile of all touched experts, and its ring never runs empty
(``few_tiles``). Each touched expert is multiplied by all tokens, since wgmma takes at least 8; what a token did not
choose is dropped at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts import few_tiles
from pallas_kernels.experts.few_plan import ROWS, TILE, Plan, plans_of, refusal, slower
from pallas_kernels.experts.few_tiles import Job, Matrix
from pallas_kernels.experts.pairs import store_chosen, store_weighted
from pallas_kernels.experts.shared import Shared
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.quantized_product.layout import FewBits

__all__ = ["experts", "refusal", "slower"]


@jax.jit
def experts(
    x: Float[Array, "*T D"],
    gate_up: FewBits,
    down: FewBits,
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    shared: Shared | None = None,
) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.experts``; it sums over a token's experts in the order in which they stand in ``chosen``."""
    if reason := refusal(x, gate_up, down, chosen, shared):
        raise NotImplementedError(reason)
    (X, _, _, D), k, tokens = gate_up.shape, chosen.shape[-1], tokens_of(x)
    if tokens * k == 0:
        return jnp.zeros_like(x)
    of_gate_up, of_down = plans_of(x, gate_up, down, shared)
    rows = x.reshape(tokens, D)
    if tokens > ALIGNED:  # TMA fills up a tile, but not tiles of which the last one is not whole
        rows = jnp.pad(rows, ((0, of_gate_up.tokens - tokens), (0, 0)))
    of_all = None if shared is None else (_matrix(shared.gate_up), _matrix(shared.down), shared.weights.reshape(-1))
    operands = (rows, _matrix(gate_up), _matrix(down), chosen.reshape(-1), weights.reshape(-1), of_all)
    rows, gate_up_rows, down_rows, pairs, scales, of_all = _compat.vary_alike(*operands)
    units = 0 if shared is None else shared.gate_up.shape[2]
    all_gate_up, all_down, opened = of_all or (None, None, None)
    hidden = _hidden(of_gate_up, rows, (gate_up_rows, all_gate_up), pairs, (X, units))
    parts = _outputs(of_down, hidden, (down_rows, all_down), (pairs, scales, opened), (X, tokens))
    is_pair = ((chosen >= 0) & (chosen < X)).reshape(tokens, k)
    terms = [jnp.where(is_pair[:, j, None], parts[j * tokens :][:tokens], 0) for j in range(k)]
    terms += [] if shared is None else [parts[k * tokens :]]
    return functools.reduce(jnp.add, terms).reshape(x.shape).astype(x.dtype)  # in a fixed order


def _matrix(weight: Any) -> Matrix:
    """A stack of matrices as one with all rows."""
    return Matrix(*(None if part is None else part.reshape(-1, part.shape[-1]) for part in weight))


def _hidden(
    plan: Plan, x: Any, weights: tuple[Matrix, Matrix | None], pairs: Any, sizes: tuple[int, int]
) -> list[jax.Array]:
    """Hidden units of all tokens.

    Args:
        plan: of the product with gate and up.
        x: the tokens, a multiple of 8 or at most 8.
        weights: of the experts, and of the shared one or None.
        pairs: experts of all pairs [P].
        sizes: number of experts, and units of a part of the shared one.

    Returns:
        Those of touched experts, [P, T, M], by an expert's place among these, and those of the shared one, [1, T, F].
    """
    (X, units), width, dtype = sizes, plan.tiles * ROWS, x.dtype

    def experts_gate_up(s: dict[str, Any], operands: Any, hidden: Any, hidden_of_all: Any = None) -> None:
        x, (weight, shared), pairs = operands

        def tokens(inputs: Any) -> Any:
            return x.at[pl.ds(jnp.int32(0), plan.tokens), inputs]

        def store(out: Any, place: Any, tile: Any, block: Any, sums: list[jax.Array]) -> None:
            del block
            gate, up = (half.astype(dtype).astype(jnp.float32) for half in sums)
            store_transposed(gate / (1 + jnp.exp(-gate)) * up, out, place, tile * ROWS)

        def of_expert(expert: Any, place: Any) -> Job:
            def first(tile: Any, block: Any) -> Any:
                return (2 * expert + block) * width + tile * ROWS

            return Job(weight, first, tokens, functools.partial(store, hidden, place))

        def first_of_all(tile: Any, block: Any) -> Any:
            unit = tile * ROWS
            return (2 * lax.div(unit, units) + block) * units + lax.rem(unit, units)

        store_all = functools.partial(store, hidden_of_all, jnp.int32(0))
        of_all = None if shared is None else Job(shared, first_of_all, tokens, store_all)
        few_tiles.run(plan, pairs, X, of_expert, of_all, s)

    present = [matrix for matrix in weights if matrix is not None]
    shapes = [(len(pairs), plan.tokens, width), (1, plan.tokens, plan.of_shared * ROWS)][: len(present)]
    outputs = [_compat.out_like(shape, dtype, x) for shape in shapes]
    return few_tiles.launch(experts_gate_up, plan, (x, weights, pairs), outputs, present, (X, len(pairs)))


def _outputs(
    plan: Plan,
    hidden: list[jax.Array],
    weights: tuple[Matrix, Matrix | None],
    pairs: tuple[Any, Any, Any],
    sizes: tuple[int, int],
) -> Float[Array, "R D"]:
    """Weighted outputs of all pairs, a token's first choices first, and of the shared expert behind them, in float32.

    Args:
        plan: of the product with down.
        hidden: what `_hidden` returns.
        weights: of the experts, and of the shared one or None.
        pairs: experts of all pairs [P], their weights, and how much of the shared one each token takes or None.
        sizes: numbers of experts and of tokens.

    Returns:
        Row ``j T + t`` is that of token t's choice j, and any numbers where there is none.
    """
    (X, tokens), width = sizes, plan.tiles * TILE

    def experts_down(s: dict[str, Any], operands: Any, parts: Any) -> None:
        hidden, (weight, shared), (pairs, scales, opened) = operands

        def row(tile: Any, block: Any) -> Any:
            return tile * TILE + block * ROWS

        def of_expert(expert: Any, place: Any) -> Job:
            def first(tile: Any, block: Any) -> Any:
                return expert * width + row(tile, block)

            def store(tile: Any, block: Any, sums: list[jax.Array]) -> None:
                rows = [row(tile, block + n) for n in range(len(sums))]
                store_chosen(sums, parts, rows, expert, s["chosen_s"], scales, tokens)

            return Job(weight, first, lambda inputs: hidden[0].at[place, :, inputs], store)

        def store_all(tile: Any, block: Any, sums: list[jax.Array]) -> None:
            rows = [row(tile, block + n) for n in range(len(sums))]
            store_weighted(sums, parts, rows, len(scales), opened, tokens)

        of_all = None if shared is None else Job(shared, row, lambda inputs: hidden[1].at[0, :, inputs], store_all)
        few_tiles.run(plan, pairs, X, of_expert, of_all, s)

    present = [matrix for matrix in weights if matrix is not None]
    rows = len(pairs[0]) + tokens * (len(present) - 1)
    outputs = [_compat.out_like((rows, width), jnp.float32, hidden[0])]
    operands = hidden, weights, pairs
    [parts] = few_tiles.launch(experts_down, plan, operands, outputs, present, (X, len(pairs[0])))
    return parts
