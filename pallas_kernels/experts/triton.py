"""The routed experts on Pallas' Triton backend: a product with gate and up, one with down, and the sum over experts.

A program multiplies some rows of one expert's weight by the tokens of a block, along all inputs, so weights stream
through once. Rows of the weight are the first operand of the MMA, tokens the second. Up to 16 tokens need no sorting: a
block's rows are all tokens, and each program finds out by itself which of them chose its expert. Up to 256 the first
programs may have the shared expert, whose two products would be kernels of 3 to 6 us each where they add 2 (BENCH.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts.config import MANY_ROWS, Config, Tile, default_config, fitted, power_of_two_in
from pallas_kernels.experts.shared import Shared, output
from pallas_kernels.experts.triton_sort import sort
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, tokens_of
from pallas_kernels.quantized_product import tiles
from pallas_kernels.quantized_product.layout import FewBits
from pallas_kernels.quantized_product.tiles import group_refusal

LEAST = 16  # rows and inputs of a tile: the least that the MMA takes
# Tokens up to which programs have the shared expert; each block of rows reads all of it.
MAX_JOINED_IN_16_BITS, MAX_JOINED_IN_FEW_BITS = 64, 256


class Work(NamedTuple):
    """What the programs of both products have to do.

    Attributes:
        operands: from which a program finds its rows.
        find: inside a kernel, the rows of a block; takes references to the operands, and the number of the block.
        blocks: how many there are.
        rows: of a block.
    """

    operands: tuple[Array, ...]
    find: Callable[[Any, Any], Rows]
    blocks: int
    rows: int = MAX_STREAM_TOKENS


class Rows(NamedTuple):
    """The rows of a block, inside a kernel.

    Attributes:
        expert: theirs; no number of an expert if there is nothing to do.
        pair: of each row; P, which is out of range, for one that does not exist.
        exists: whether the row does.
        target: of each row, where its output goes; out of range for one that does not exist.
        unused: a row of the outputs that no block writes if this one has nothing to do; -1 for none.
    """

    expert: Any
    pair: jax.Array
    exists: jax.Array
    target: jax.Array
    unused: Any


def refusal(x: Any, gate_up: Any, down: Any, chosen: Any, shared: Any = None) -> str | None:
    """Say why the Triton backend cannot do this call, or None."""
    del chosen, shared
    few = [weight for weight in (gate_up, down) if isinstance(weight, FewBits)]
    if few and x.dtype != jnp.bfloat16:
        return f"The Triton experts in few bits take bf16; this is {x.dtype}."
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Triton experts take bf16 and f16; these are {x.dtype}."
    if any(size % LEAST for size in gate_up.shape[2:]):
        return (
            f"The Triton experts need widths that {LEAST} divides; these are {gate_up.shape[3]} (of tokens) and "
            f"{gate_up.shape[2]} (of experts)."
        )
    for weight in few:
        if reason := group_refusal(weight.group):
            return reason
    return None


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def experts(
    x: Float[Array, "*T D"],
    gate_up: Float[Array, "X 2 M D"] | FewBits,
    down: Float[Array, "X D M"] | FewBits,
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    shared: Shared | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.experts``; it sums over a token's experts in the order in which they stand in ``chosen``."""
    if reason := refusal(x, gate_up, down, chosen):
        raise NotImplementedError(reason)
    (X, _, _, D), k = gate_up.shape, chosen.shape[-1]
    tokens = tokens_of(x)
    if tokens * k == 0:
        return jnp.zeros_like(x)
    config = fitted(config or default_config(tokens, k, gate_up, down), gate_up, down)
    is_joined = shared is not None and _can_join(shared, tokens, config)
    apart = None if shared is None or is_joined else output(x, shared, kernels=not interpret)
    joined = shared._replace(weights=shared.weights.reshape(-1)) if shared is not None and is_joined else None
    operands = (x.reshape(-1, D), gate_up, down, chosen.reshape(-1, k), weights.reshape(-1, k), joined)
    x_rows, gate_up, down, chosen, scales, joined = _compat.vary_alike(*operands)
    work = plan(chosen, X, config, interpret=interpret)
    hidden = gate_up_product(x_rows, gate_up, joined, work, k, config.gate_up, interpret=interpret)
    dtype = jnp.float32 if config.tokens < MANY_ROWS else x.dtype
    parts = down_product(hidden, down, scales, joined, work, config.down, dtype, interpret=interpret)
    if tokens > MAX_STREAM_TOKENS:
        total = summed(parts[: tokens * k], chosen, X).reshape(x.shape)
        apart = parts[tokens * k :].reshape(x.shape) if is_joined else apart
        return (total if apart is None else total + apart).astype(x.dtype)
    terms = [*parts.reshape(-1, *x.shape), *([] if apart is None else [apart])]
    return functools.reduce(jnp.add, terms).astype(x.dtype)  # in a fixed order


def _can_join(shared: Shared, tokens: int, config: Config) -> bool:
    """Whether programs of both products have the shared expert, too."""
    most = MAX_JOINED_IN_FEW_BITS if isinstance(shared.gate_up, FewBits) else MAX_JOINED_IN_16_BITS
    return tokens <= most and config.tokens < MANY_ROWS and shared.width % config.gate_up.rows == 0


def plan(chosen: Int[Array, "T k"], experts: int, config: Config, *, interpret: bool) -> Work:
    """The work of a call."""
    tokens, k = chosen.shape
    if tokens == 1:
        return Work((chosen,), functools.partial(_rows_of_one, experts=experts), k)
    if tokens <= MAX_STREAM_TOKENS:
        return Work((chosen,), functools.partial(_rows_of_tokens, experts=experts), tokens * k)
    blocks = sort(chosen, experts, config.tokens, interpret=interpret)
    find = functools.partial(_rows_of_list, rows=config.tokens)
    return Work(tuple(blocks), find, len(blocks.expert), config.tokens)


def gate_up_product(
    x: Float[Array, "T D"],
    gate_up: Float[Array, "X 2 M D"] | FewBits,
    shared: Shared | None,
    work: Work,
    k: int,
    tile: Tile,
    *,
    interpret: bool,
) -> list[Array]:
    """Hidden units of each pair [P, M], those of skipped pairs not written; and the shared expert's [T, F]."""
    X, _, M, _ = gate_up.shape
    sizes = [(len(x) * k, M)] + ([(len(x), shared.width)] if shared is not None else [])
    first = 0 if shared is None else shared.width // tile.rows * pl.cdiv(len(x), work.rows)
    units = 0 if shared is None else shared.gate_up.shape[2]
    hidden: list[Array] = _compat.triton_call(
        functools.partial(
            _gate_up, work=work, tile=tile, k=k, sizes=(X, M), first=first, units=units, is_plain=interpret
        ),
        grid=(first + work.blocks * (M // tile.rows),),
        out_shape=[_compat.out_like(size, x.dtype, x) for size in sizes],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        name="experts_gate_up",
    )(work.operands, x, _matrix(gate_up), None if shared is None else _matrix(shared.gate_up))
    return hidden


def down_product(
    hidden: list[Array],
    down: Float[Array, "X D M"] | FewBits,
    weights: Float[Array, "T k"],
    shared: Shared | None,
    work: Work,
    tile: Tile,
    dtype: Any,
    *,
    interpret: bool,
) -> Array:
    """Weighted outputs of all pairs.

    Of up to 16 tokens they are [k, T, D], zeros for skipped pairs; of more [T, k, D], those of skipped pairs not
    written. The shared expert's are behind them.
    """
    X, D, _ = down.shape
    rows = weights.size + (len(weights) if shared is not None else 0)
    first = 0 if shared is None else D // tile.rows * pl.cdiv(len(weights), work.rows)
    [parts] = _compat.triton_call(
        functools.partial(_down, work=work, tile=tile, sizes=(X, D), first=first, is_plain=interpret),
        grid=(first + work.blocks * (D // tile.rows),),
        out_shape=[_compat.out_like((rows, D), dtype, hidden[0])],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        name="experts_down",
    )(
        work.operands,
        hidden,
        _matrix(down),
        weights.reshape(-1),
        None if shared is None else (_matrix(shared.down), shared.weights),
    )
    return parts


def summed(parts: Float[Array, "P D"], chosen: Int[Array, "T k"], experts: int) -> Float[Array, "T D"]:
    """Sum over each token's experts in float32, skipped pairs left out.

    The order is fixed by one addition a pair. XLA fuses them with what the caller does with the sum.
    """
    by_token = parts.reshape(*chosen.shape, -1)
    is_pair = ((chosen >= 0) & (chosen < experts))[:, :, None]
    terms = [jnp.where(is_pair[:, j], by_token[:, j].astype(jnp.float32), 0) for j in range(chosen.shape[1])]
    return functools.reduce(jnp.add, terms)


def _matrix(weight: Array | FewBits) -> Any:
    """A stack of matrices, or its parts, as one matrix with all rows."""
    return jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)


def _gate_up(
    operands: Any, x: Any, weight: Any, shared: Any, hidden: Any, *by_all: Any,
    work: Work, tile: Tile, k: int, sizes: tuple[int, int], first: int, units: int, is_plain: bool,
) -> None:  # fmt: skip
    """One program: some hidden units of the rows of a block; the first ones have the shared expert's."""
    experts, width = sizes
    program = pl.program_id(0) - first

    def store(out: Any, rows: Rows, inputs: Any, weight: Any, unit: Any, gate: Any, up: Any) -> None:
        # The MMA takes at least 16 rows: fewer of gate and of up are one operand.
        outputs = [gate, up] if tile.rows >= LEAST else [jnp.stack([gate, up], axis=-1).T.reshape(-1)]
        sums = _products(x, inputs, rows.exists, weight, outputs, tile.depth, is_plain)
        if len(sums) == 1:
            sums = _halves(sums[0])
        opened, up = (product.astype(out.dtype).astype(jnp.float32) for product in sums)
        _store(opened / (1 + jnp.exp(-opened)) * up, out, rows.pair, rows.exists, unit)

    def routed() -> None:
        block, part = _place(program, width // tile.rows)
        rows = work.find(operands, block)

        @pl.when((rows.expert >= 0) & (rows.expert < experts))
        def _() -> None:
            unit = part * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
            gate = 2 * width * rows.expert + unit
            store(hidden, rows, rows.pair // k, weight, unit, gate, gate + width)

    if shared is None:
        return routed()
    pl.when(program >= 0)(routed)

    @pl.when(program < 0)
    def _() -> None:
        block, place = _place(program + first, by_all[0].shape[1] // tile.rows)
        unit = place * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        part = lax.div(unit, jnp.full_like(unit, units))  # of its width; gate and up of each follow each other
        rows = _all_tokens(x.shape[0], 0, block, work.rows)
        store(by_all[0], rows, rows.pair, shared, unit, unit + part * units, unit + (part + 1) * units)


def _down(
    operands: Any, hidden: Any, weight: Any, weights: Any, shared: Any, parts: Any, *,
    work: Work, tile: Tile, sizes: tuple[int, int], first: int, is_plain: bool,
) -> None:  # fmt: skip
    """One program: some outputs of the rows of a block; the first ones have the shared expert's."""
    experts, width = sizes
    program = pl.program_id(0) - first

    def store(rows: Rows, hidden: Any, weight: Any, row: Any, column: Any, weights: Any) -> None:
        scale = pltriton.load(weights.at[rows.pair], mask=rows.exists, other=0.0)  # before a product that would wait
        [sums] = _products(hidden, rows.pair, rows.exists, weight, [row], tile.depth, is_plain)
        _store(sums * scale[None, :], parts, rows.target, rows.exists, column)

    def routed() -> None:
        block, part = _place(program, width // tile.rows)
        rows = work.find(operands, block)
        column = part * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        is_expert = (rows.expert >= 0) & (rows.expert < experts)

        @pl.when(is_expert)
        def _() -> None:
            store(rows, hidden[0], weight, width * rows.expert + column, column, weights)

        @pl.when(~is_expert & (rows.unused >= 0))
        def _() -> None:
            nothing = jnp.zeros((tile.rows,), parts.dtype)
            pltriton.store(parts.at[jnp.zeros_like(column) + rows.unused, column], nothing)

    if shared is None:
        return routed()
    pl.when(program >= 0)(routed)

    @pl.when(program < 0)
    def _() -> None:
        block, part = _place(program + first, width // tile.rows)
        column = part * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        matrix, opened = shared
        rows = _all_tokens(opened.shape[0], weights.shape[0], block, work.rows)
        store(rows, hidden[1], matrix, column, column, opened)


def _halves(values: jax.Array) -> list[jax.Array]:
    """The first and the last rows of an array [row, token]; Triton has no slices."""
    rows, tokens = values.shape
    halves = values.reshape(2, rows // 2, tokens)
    half = lax.broadcasted_iota(jnp.int32, halves.shape, 0)
    return [jnp.sum(jnp.where(half == i, halves, 0.0), axis=0) for i in range(2)]


def _place(program: Any, parts: int) -> tuple[Any, Any]:
    """Block and part of a program; programs of a block follow each other, so that what they share stays in L2."""
    return lax.div(program, jnp.int32(parts)), lax.rem(program, jnp.int32(parts))


def _all_tokens(tokens: int, first: int, block: Any, rows: int) -> Rows:
    """The rows of a block of the shared expert, whose outputs are behind `first` others."""
    token = block * rows + jnp.arange(rows, dtype=jnp.int32)
    return Rows(jnp.int32(0), token, token < tokens, first + token, jnp.int32(-1))  # out of range from `tokens` on


def _rows_of_tokens(operands: Any, block: Any, *, experts: int) -> Rows:
    """Rows of up to 16 tokens: a row is a token, and a block is done by the first pair with its expert.

    A token's experts are loaded one by one. Of a reduction over all of them, Triton would not compute the addresses of
    the rows in the layout of their copies: they moved through shared memory in each step, for a third of its
    instructions.
    """
    [chosen] = operands
    tokens, k = chosen.shape
    mine = lax.div(block, jnp.int32(k))
    expert = chosen[mine, lax.rem(block, jnp.int32(k))]
    token = jnp.arange(MAX_STREAM_TOKENS, dtype=jnp.int32)
    pair = jnp.full_like(token, tokens * k)
    target = jnp.full_like(token, tokens * (k + 1))  # out of range, as is P
    for j in range(k):
        ids = pltriton.load(chosen.at[token, jnp.full_like(token, j)], mask=token < tokens, other=-1)
        pair = jnp.where(ids == expert, token * k + j, pair)
        target = jnp.where(ids == expert, j * tokens + token, target)
    exists = pair < tokens * k
    is_done_before = jnp.sum((exists & (token < mine)).astype(jnp.int32)) > 0
    unused = jnp.where((expert >= 0) & (expert < experts), -1, lax.rem(block, jnp.int32(k)) * tokens + mine)
    return Rows(jnp.where(is_done_before, -1, expert), pair, exists, target, unused)


def _rows_of_one(operands: Any, block: Any, *, experts: int) -> Rows:
    """The row of one token, as `_rows_of_tokens`: its experts differ, so no other pair is looked at."""
    [chosen] = operands
    expert = chosen[0, block]
    token = jnp.arange(MAX_STREAM_TOKENS, dtype=jnp.int32)
    pair = jnp.where(token == 0, block, jnp.int32(2 * chosen.shape[1]))  # out of range, as a pair and as a target
    unused = jnp.where((expert >= 0) & (expert < experts), jnp.int32(-1), block)
    return Rows(expert, pair, token == 0, pair, unused)


def _rows_of_list(operands: Any, block: Any, *, rows: int) -> Rows:
    """Rows of a block of a sorted list."""
    pairs, experts, firsts, ends = operands
    place = firsts[block] + jnp.arange(rows, dtype=jnp.int32)
    exists = place < ends[block]
    pair = pltriton.load(pairs.at[place], mask=exists, other=pairs.shape[0])
    return Rows(experts[block], pair, exists, pair, jnp.int32(-1))


def _products(
    x: Any, row: Any, exists: Any, weight: Any, outputs: list[jax.Array], depth: int, is_plain: bool
) -> list[jax.Array]:
    """The product of each set of rows of the weight with some rows of x, float32 [row of the weight, row of x]."""
    width = x.shape[1]
    if isinstance(weight, FewBits):
        depth = tiles.step_of(weight.values, width // weight.scales.shape[1], depth)
        return tiles.products(x, row, exists, weight, outputs, (0, width // depth, depth), is_plain)
    depth = power_of_two_in(width, depth)

    def step(i: Any, sums: Any) -> Any:
        column = (i * depth + jnp.arange(depth, dtype=jnp.int32))[None, :]
        inputs = pltriton.load(x.at[row[:, None], column], mask=exists[:, None], other=0.0).T
        parts = [pltriton.load(weight.at[output[:, None], column]) for output in outputs]
        return [total + pltriton.dot(part, inputs) for total, part in zip(sums, parts, strict=True)]

    zeros = [jnp.zeros((len(output), len(row)), jnp.float32) for output in outputs]
    sums: list[jax.Array] = lax.fori_loop(0, width // depth, step, zeros)
    return sums


def _store(values: jax.Array, out: Any, row: jax.Array, exists: jax.Array, column: jax.Array) -> None:
    """Write values [column, row] to ``out`` [row, column]."""
    target = out.at[row[None, :], column[:, None]]
    pltriton.store(target, values.astype(out.dtype), mask=jnp.broadcast_to(exists[None, :], values.shape))
