"""The argmax of a head by way of its 8-bit copy, on Hopper: half of the bytes, and the same result.

The copy (``screen``) is multiplied by integers on tensor cores (this kernel), which gives each product an upper bound.
Then exact products are computed of the rows whose bound reaches the best one's exact product (``candidates``).

As many CTAs as there are multiprocessors go from tile to tile of the copy. A producer warpgroup starts TMA copies into
a ring in shared memory; two consumers have half of a tile's rows each, and both terms of all tokens.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.largest_product.candidates import exact_largest
from pallas_kernels.largest_product.mosaic import largest_product
from pallas_kernels.largest_product.pieces import largest_of_pieces
from pallas_kernels.largest_product.screen import NORM, REST, SCALE, Screen
from pallas_kernels.largest_product.terms import ROWS, TERM, Terms, terms_of
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import SHARED_MEMORY, WIDEST, tiled

CONSUMERS = 2
TILES = (128, 256), (192, 128)  # rows of the head, and inputs of a step: longer runs of a row are read faster
_LEAST_STAGES = 4  # of the first kind of tile; with fewer the second is faster
_MIN_ROWS = 192  # of the head: the widest tile
_PART = 32  # columns that are finished at a time; TMA stores bounds in tiles of so many, which must divide a head
_MIN_BYTES = (
    1 << 28
)  # of a head, read in some 65 us; its copy in half of that, and the other kernels take 22 (BENCH.md)
_MIN_STEPS = 8  # of 128 bytes of a tile
_ROUNDED = 2.0**-8  # of a bound: at least what bfloat16 rounds down

Best = tuple[jax.Array, jax.Array]  # of each token the largest product, and its row as float32: below 2**24 exact


class _Plan(NamedTuple):
    """How a call is cut up.

    Attributes:
        tokens: rows of a term, a multiple of 8.
        columns: rows of the head in a tile.
        depth: inputs of a step.
        stages: slots of the ring, fewer than steps.
        steps: of a tile.
        pieces: tiles of the head.
        ctas: that share them.
        bounds: whether upper bounds are wanted.
    """

    tokens: int
    columns: int
    depth: int
    stages: int
    steps: int
    pieces: int
    ctas: int
    bounds: bool

    @property
    def mine(self) -> int:
        """Rows of the head that a consumer has of a tile."""
        return self.columns // CONSUMERS


def refusal(x: Any, weight: Any, screen: Screen) -> str | None:
    """Why the kernels cannot do this call, or None."""
    del weight
    if tokens_of(x) > ROWS:
        return f"The screened argmax is for up to {ROWS} tokens; these are {tokens_of(x)}."
    return approximate_refusal(x, screen)


def approximate_refusal(x: Any, screen: Screen) -> str | None:
    """Why the kernels cannot multiply tokens by a copy, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The screened argmax takes bf16 and f16; this is {x.dtype}."
    rows, width = screen.values.shape
    if width % WIDEST or width < _MIN_STEPS * WIDEST or rows % _PART or rows < _MIN_ROWS:
        return (
            f"The screened argmax needs a width that {WIDEST} divides, of at least {_MIN_STEPS * WIDEST}, and a number "
            f"of rows that {_PART} divides, of at least {_MIN_ROWS}; the head is {[rows, width]}."
        )
    return None


def slower(x: Any, weight: Any, screen: Screen) -> str | None:
    """Why exact products with the whole head are measured faster (BENCH.md), or None."""
    del x, screen
    if (size := weight.size * weight.dtype.itemsize) < _MIN_BYTES:
        return f"It was measured faster from {_MIN_BYTES >> 20} MiB on; this head has {size / (1 << 20):.3g}."
    return None


@jax.jit
def screened_largest(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    screen: Screen,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.screened_largest``; every token gets a result."""
    del length
    if reason := refusal(x, weight, screen):
        raise NotImplementedError(reason)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 0:
        return jnp.zeros(x.shape[:-1], jnp.int32), jnp.zeros(x.shape[:-1], jnp.float32)
    values, indices, upper = bounded(terms_of(rows), screen, limit, bounds=True)
    index, value = exact_largest(rows, weight, upper, values, indices, limit)
    return index.reshape(x.shape[:-1]), value.reshape(x.shape[:-1])


@jax.jit
def approximate_largest(
    x: Float[Array, "*T D"], screen: Screen, limit: int | Int[Array, ""] | None = None
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.approximate_largest``; more than 64 tokens are rounded to 8 bits, too."""
    if reason := approximate_refusal(x, screen):
        raise NotImplementedError(reason)
    tokens = math.prod(x.shape[:-1])
    if tokens == 0:
        return jnp.zeros(x.shape[:-1], jnp.int32), jnp.zeros(x.shape[:-1], jnp.float32)
    terms = terms_of(x.reshape(tokens, -1))
    if tokens > ROWS:
        numbers = terms.values[0, :tokens]
        index, value = largest_product(numbers, screen.values, screen.factors[SCALE], limit=limit)
        value *= terms.factors[SCALE, :tokens] * TERM
    else:
        values, indices, *_ = bounded(terms, screen, limit, bounds=False)
        index, value = largest_of_pieces(values, indices, tokens=tokens)
    return index.reshape(x.shape[:-1]), value.reshape(x.shape[:-1])


def bounded(
    terms: Terms, screen: Screen, limit: Any, *, bounds: bool, tile: tuple[int, int] | None = None
) -> list[jax.Array]:
    """The largest approximate product of each consumer's rows, the row, and, if wanted, upper bounds of all."""
    (V, D), tokens = screen.values.shape, terms.values.shape[1]
    plan = _plan(tokens, V, D, tile, bounds=bounds)
    optional = {} if limit is None else {"limit": jnp.asarray(limit, jnp.int32).reshape(1)}
    operands = _compat.vary_alike(*terms, *screen, *optional.values())

    def screened_largest_kernel(*refs: Any, **s: Any) -> None:  # profilers show its name
        of_call, limit, outputs = refs[:4], dict(zip(optional, refs[4:], strict=False)), refs[4 + len(optional) :]
        _multiply(Terms(*of_call[:2]), Screen(*of_call[2:]), limit.get("limit"), outputs, plan, s)

    shape, consumers = (CONSUMERS, ROWS), plan.ctas * CONSUMERS
    scratch: dict[str, Any] = {
        "x_s": tiled((plan.stages * 2 * tokens + ROWS, plan.depth), jnp.int8),  # wgmma reads 64 rows of any slot
        "weight_s": tiled((plan.stages * plan.columns, plan.depth), jnp.int8),
        "rows_s": plgpu.SMEM((2, 3, plan.columns), jnp.float32),
        "tokens_s": plgpu.SMEM((3, ROWS), jnp.float32),
        "value_s": plgpu.SMEM(shape, jnp.float32),
        "index_s": plgpu.SMEM(shape, jnp.int32),
        "full": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=3),
        "empty": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=CONSUMERS),
        "rows_full": plgpu.Barrier(num_barriers=2),
        "tokens_full": plgpu.Barrier(),
    }
    outputs = [((consumers, ROWS), jnp.float32), ((consumers, ROWS), jnp.int32)]
    if bounds:
        scratch["upper_s"] = tiled((CONSUMERS, ROWS, plan.mine), jnp.bfloat16, _PART)
        outputs.append(((tokens, V), jnp.bfloat16))
    results = plgpu.kernel(
        screened_largest_kernel,
        out_type=[_compat.out_like(shape, dtype, operands[0]) for shape, dtype in outputs],
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)
    return list(_compat.vary_alike(*results, *operands)[: len(results)])


def _plan(tokens: int, V: int, D: int, tile: tuple[int, int] | None, *, bounds: bool) -> _Plan:
    """The plan with this tile, or, without one, with the faster kind."""
    if tile is None:
        plans = [_plan(tokens, V, D, tile, bounds=bounds) for tile in TILES if D % tile[1] == 0]
        return next((plan for plan in plans if plan.stages >= _LEAST_STAGES), plans[-1])
    columns, depth = tile
    pieces, steps = pl.cdiv(V, columns), D // depth
    beside = ROWS * depth + 8 * 3 * columns + (3 + 2 * CONSUMERS) * ROWS * 4 + bounds * ROWS * columns * 2
    stages = min((SHARED_MEMORY - beside) // ((2 * tokens + columns) * depth), steps - 1)
    return _Plan(tokens, columns, depth, stages, steps, pieces, min(pieces, _compat.sm_count()), bounds)


def _multiply(terms: Any, screen: Any, limit: Any, outputs: Any, plan: _Plan, s: dict[str, Any]) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    cta, me = lax.axis_index("cta"), lax.axis_index("warpgroup")
    count = pl.cdiv(plan.pieces - cta, plan.ctas)
    *best, bounds = outputs if plan.bounds else (*outputs, None)

    @pl.when(me == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        plgpu.copy_gmem_to_smem(terms.factors, s["tokens_s"], s["tokens_full"])

        def produce(i: Any, nothing: None) -> None:
            _produce(i, _first_of(cta + i * plan.ctas, screen, plan), terms, screen, plan, s)

        lax.fori_loop(0, count, produce, None)

    @pl.when(me < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(s["tokens_full"])

        def consume(i: Any, best: Best) -> Best:
            first = _first_of(cta + i * plan.ctas, screen, plan) + me * plan.mine
            return _finished(_consume(i * plan.steps, me, plan, s), i, first, me, (limit, best), bounds, plan, s)

        column = plgpu.Layout.WGMMA.reduce(1)
        nothing = (plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), column) for number in (-jnp.inf, 0))
        results = lax.fori_loop(0, count, consume, tuple(nothing))
        for staged, array, out in zip((s["value_s"], s["index_s"]), results, best, strict=True):
            staged.at[me][...] = array.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[me], out.at[cta * CONSUMERS + me])
        plgpu.wait_smem_to_gmem(0)


def _first_of(piece: Any, screen: Any, plan: _Plan) -> Any:
    """First row of a tile; the last tile overlaps the one before, since TMA brings zeros from beyond the end."""
    return jnp.minimum(piece * plan.columns, screen.values.shape[0] - plan.columns)


def _produce(i: Any, first: Any, terms: Any, screen: Any, plan: _Plan, s: dict[str, Any]) -> None:
    """Copy a tile into the ring, as slots come free, and its factors.

    Their slot is free: when tile i starts, the consumers have given back the first slots of the ring for tile i - 1,
    since a tile has more steps than the ring, and so are done with tile i - 2.
    """
    slot = lax.rem(i, 2)
    plgpu.copy_gmem_to_smem(
        screen.factors.at[:, pl.ds(first, plan.columns)], s["rows_s"].at[slot], s["rows_full"].at[slot]
    )

    def step(k: Any, nothing: None) -> None:
        slot, inputs = lax.rem(i * plan.steps + k, plan.stages), pl.ds(k * plan.depth, plan.depth)

        @pl.when(i * plan.steps + k >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        full = s["full"].at[slot]
        target = s["weight_s"].at[pl.ds(slot * plan.columns, plan.columns)]
        plgpu.copy_gmem_to_smem(screen.values.at[pl.ds(first, plan.columns), inputs], target, full)
        for term in range(2):
            target = s["x_s"].at[pl.ds((2 * slot + term) * plan.tokens, plan.tokens)]
            plgpu.copy_gmem_to_smem(terms.values.at[term, :, inputs], target, full)

    lax.fori_loop(0, plan.steps, step, None)


def _consume(before: Any, me: Any, plan: _Plan, s: dict[str, Any]) -> list[jax.Array]:
    """Sums of a consumer's half of a tile, of first and second terms; a slot is given back one step later."""
    last = plan.steps - 1

    def give_back(k: Any) -> None:
        plgpu.barrier_arrive(s["empty"].at[lax.rem(before + k, plan.stages)])

    def run(*sums: Any) -> list[jax.Array]:
        def start(k: Any) -> None:
            slot = lax.rem(before + k, plan.stages)
            plgpu.barrier_wait(s["full"].at[slot])
            weight = _compat.smem_transpose(s["weight_s"].at[pl.ds(slot * plan.columns + me * plan.mine, plan.mine)])
            for term, total in enumerate(sums):
                plgpu.wgmma(total, s["x_s"].at[pl.ds((2 * slot + term) * plan.tokens, ROWS)], weight)

        def step(k: Any, nothing: None) -> None:
            start(k)
            plgpu.wgmma_wait(len(sums))
            pl.when(k > 0)(lambda: give_back(k - 1))

        lax.fori_loop(0, last, step, None)
        start(last)
        return [total[...] for total in sums]

    sums: list[jax.Array] = pl.run_scoped(run, *(plgpu.ACC((ROWS, plan.mine), jnp.int32) for _ in range(2)))
    give_back(last - 1)
    give_back(last)
    return sums


def _finished(
    sums: list[jax.Array], i: Any, first: Any, me: Any, before: tuple[Any, Best], bounds: Any, plan: _Plan,
    s: dict[str, Any],
) -> Best:  # fmt: skip
    """The best row of a token after a half of a tile, which begins at ``first``; writes the half's bounds.

    ``before`` is the limit, and the best of earlier halves.
    """
    limit, (value, index) = before
    plgpu.barrier_wait(s["rows_full"].at[lax.rem(i, 2)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the bounds before have left
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, _PART), 1, layout=plgpu.Layout.WGMMA)
    tokens = [_factors(s["tokens_s"], factor, 1) for factor in (SCALE, REST, NORM)]
    parts = []
    for start in range(0, plan.mine, _PART):
        here = s["rows_s"].at[lax.rem(i, 2), :, pl.ds(me * plan.mine + start, _PART)]
        rows = [_factors(here, factor, 0) for factor in (SCALE, REST, NORM)]
        high, low = (total[:, start : start + _PART].astype(jnp.float32) for total in sums)
        product = (TERM * high + low) * (tokens[SCALE] * rows[SCALE])
        if bounds is not None:
            upper = product + tokens[NORM] * rows[REST] + tokens[REST] * rows[NORM]
            upper = upper + jnp.maximum(upper, -upper) * _ROUNDED
            s["upper_s"].at[me, :, pl.ds(start, _PART)][...] = upper.astype(jnp.bfloat16)
        counts = None if limit is None else column < limit[0] - first - start
        parts.append(product if counts is None else jnp.where(counts, product, -jnp.inf))
    if bounds is not None:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["upper_s"].at[me, pl.ds(0, plan.tokens)], bounds.at[:, pl.ds(first, plan.mine)])
    highest = functools.reduce(jnp.maximum, [part.max(axis=1) for part in parts])
    firsts = []
    for k, part in enumerate(parts):
        is_lower = part < lax.broadcast_in_dim(highest, part.shape, [0])
        firsts.append(jnp.where(is_lower, plan.columns, column).min(axis=1) + k * _PART)
    mine = (functools.reduce(jnp.minimum, firsts) + first).astype(jnp.float32)
    return jnp.maximum(value, highest), jnp.where(highest > value, mine, index)


def _factors(factors: Any, factor: int, axis: int) -> jax.Array:
    """A factor of tokens (axis 1 is missing) or of rows of the head (axis 0), over a part of the products."""
    loaded = _compat.smem_load(factors.at[factor], plgpu.Layout.WGMMA.reduce(axis))
    return lax.broadcast_in_dim(loaded, (ROWS, _PART), [1 - axis])
