"""What a CTA of the experts of few tokens does: tile after tile, of one touched expert after another (Mosaic GPU).

A producer warpgroup finds out which experts are touched, and keeps a ring in shared memory full of their weights, from
one expert to the next. A pair of consumers multiplies the two blocks of 64 rows of a tile by all tokens. Two pairs take
steps in turns, and the first consumer adds up and finishes; or tiles, where blocks are finished by themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.experts.few_plan import BLOCKS, CONSUMERS, ROWS, TILE, TURNS, Plan
from pallas_kernels.experts.pairs import list_touched
from pallas_kernels.lib import prefetch
from pallas_kernels.lib.shared_memory import tiled
from pallas_kernels.quantized_product import registers
from pallas_kernels.quantized_product.mosaic_plan import registers_of


class Matrix(NamedTuple):
    """A weight's rows, those of one expert after another.

    Attributes:
        values: numbers of few bits [R, W].
        scales: [R, G].
        zeros: zero points [R, G]; None where there are none.
    """

    values: Any
    scales: Any
    zeros: Any


class Job(NamedTuple):
    """What a CTA does for an expert.

    Attributes:
        matrix: references to the weight.
        first: takes a tile and a block of it, and gives the block's first row.
        inputs: takes a run of inputs, and gives a reference to all tokens'.
        finish: takes a tile, a block, and the sums [64, tokens] of this block and of those behind it.
    """

    matrix: Matrix
    first: Callable[[Any, Any], Any]
    inputs: Callable[[Any], Any]
    finish: Callable[[Any, Any, list[jax.Array]], None]


def launch(
    kernel: Callable[..., None], plan: Plan, operands: Any, outputs: list[jax.ShapeDtypeStruct],
    weights: list[Matrix], sizes: tuple[int, int],
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel on all multiprocessors.

    Args:
        kernel: takes its scratch, references to the operands in their tree, and those to the outputs; profilers show
            its name.
        plan: of the product.
        operands: a tree of arrays.
        outputs: shapes and dtypes.
        weights: among the operands.
        sizes: numbers of experts and of pairs.
    """
    leaves, tree = jax.tree.flatten(operands)
    # A shared expert in e4m3 has numbers one by one where the others have words of two: its tiles use the same memory.
    dtypes = list(dict.fromkeys(matrix.values.dtype for matrix in weights))
    rings = [tiled((plan.stages, TILE, plan.width(dtype)), dtype) for dtype in dtypes]

    def body(*refs: Any, weight_s: Any, **s: Any) -> None:
        s["rings"] = dict(zip(dtypes, [weight_s] if len(dtypes) == 1 else [*weight_s], strict=True))
        kernel(s, jax.tree.unflatten(tree, refs[: len(leaves)]), *refs[len(leaves) :])

    body.__name__ = kernel.__name__
    experts, pairs = sizes
    results = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(_compat.sm_count(),),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_s": tiled((plan.stages, plan.tokens, plan.depth), jnp.bfloat16),
            "weight_s": rings[0] if len(rings) == 1 else plgpu.RefUnion(*rings),
            "sums_s": tiled((CONSUMERS - 1, ROWS, plan.tokens), jnp.float32),
            "touched_s": plgpu.SMEM((pairs + 1,), jnp.int32),
            "chosen_s": plgpu.SMEM((pairs,), jnp.int32),
            "flags_s": plgpu.SMEM((experts + 4,), jnp.int32),
            "listed": plgpu.Barrier(),
            "full": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=BLOCKS + 1),
            "empty": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=BLOCKS),
            "sums_full": plgpu.Barrier(num_arrivals=CONSUMERS - 1),
            "sums_empty": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*leaves)
    return list(_compat.vary_alike(*results, leaves[0])[: len(outputs)])  # Mosaic does not mark its outputs as varying


def run(
    plan: Plan, pairs: Any, experts: int, of_expert: Callable[[Any, Any], Job], of_all: Job | None, s: dict[str, Any]
) -> None:
    """The body of one CTA, which takes every ``ctas``-th tile: first of the shared expert's, then of touched experts'.

    Args:
        plan: of the product.
        pairs: reference to the experts of all pairs.
        experts: how many there are.
        of_expert: takes an expert and its place among those that are touched.
        of_all: job of the shared expert, or None.
        s: the kernel's scratch.
    """
    cta, me, ctas = lax.axis_index("cta"), lax.axis_index("warpgroup"), _compat.sm_count()
    producer_registers, consumer_registers = registers_of(CONSUMERS)
    before = lax.div(plan.of_shared - jnp.minimum(cta, plan.of_shared) + ctas - 1, ctas)  # tiles of the shared expert
    first = lax.rem(cta + ctas - plan.of_shared % ctas, ctas)

    def over_tiles(do: Callable[[Job, Any, Any], None]) -> None:
        """Call with the job of each tile of the CTA, the tile's number in the CTA, and that in its expert."""
        if of_all is not None:
            lax.fori_loop(0, before, lambda i, _: do(of_all, i, cta + i * ctas), None)

        def routed(i: Any, nothing: None) -> None:
            place, tile = lax.div(first + i * ctas, plan.tiles), lax.rem(first + i * ctas, plan.tiles)
            do(of_expert(s["touched_s"][place], place), before + i, tile)

        total = s["touched_s"][len(pairs)] * plan.tiles
        lax.fori_loop(0, lax.div(total - first + ctas - 1, ctas), routed, None)

    @pl.when(me == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        list_touched(pairs, experts, s["touched_s"], s["chosen_s"], s["flags_s"])
        plgpu.barrier_arrive(s["listed"])
        over_tiles(lambda job, i, tile: _produce(plan, job, i, tile, s))

    @pl.when(me < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        plgpu.barrier_wait(s["listed"])
        over_tiles(lambda job, i, tile: _finish(plan, job, i, tile, me, s))


def _finish(plan: Plan, job: Job, i: Any, tile: Any, me: Any, s: dict[str, Any]) -> None:
    """A consumer's part in the CTA's i-th tile."""
    turn, block = lax.div(me, BLOCKS), lax.rem(me, BLOCKS)
    if not plan.by_tile:
        start = lax.rem(turn + i * plan.steps, TURNS)  # whose number among all steps is the pair's
        sums = _multiply(plan, job, i, tile, block, (start, TURNS), s)
        return _meet(sums, i, me, functools.partial(job.finish, tile, 0), s)

    @pl.when(lax.rem(i, TURNS) == turn)
    def _() -> None:
        job.finish(tile, block, [_multiply(plan, job, i, tile, block, (jnp.int32(0), 1), s)])


def _meet(sums: jax.Array, i: Any, me: Any, finish: Callable[[list[jax.Array]], None], s: dict[str, Any]) -> None:
    """Hand a consumer's sums of the CTA's i-th tile to the first one, who adds up those of a block and finishes."""

    @pl.when(me > 0)
    def _() -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(s["sums_empty"]))
        s["sums_s"].at[me - 1][...] = sums
        plgpu.barrier_arrive(s["sums_full"])

    @pl.when(me == 0)
    def _() -> None:
        plgpu.barrier_wait(s["sums_full"])
        others = [_compat.smem_load(s["sums_s"].at[n], plgpu.Layout.WGMMA) for n in range(CONSUMERS - 1)]
        plgpu.barrier_arrive(s["sums_empty"])
        every = [sums, *others]
        finish([functools.reduce(jnp.add, every[block::BLOCKS]) for block in range(BLOCKS)])


def _produce(plan: Plan, job: Job, i: Any, tile: Any, s: dict[str, Any]) -> None:
    """Copy the CTA's i-th tile into the ring, as slots come free, and fetch its scales into L2."""
    values, *by_group = job.matrix
    ring, width = s["rings"][values.dtype], plan.width(values.dtype)
    for part, block in itertools.product(by_group, range(BLOCKS)):
        if part is not None:
            prefetch.into_l2(part, job.first(tile, block), ROWS)

    def step(k: Any, nothing: None) -> None:
        count = i * plan.steps + k
        slot = lax.rem(count, plan.stages)

        @pl.when(count >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        full = s["full"].at[slot]
        for block in range(BLOCKS):
            rows, target = pl.ds(job.first(tile, block), ROWS), ring.at[slot, pl.ds(block * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(values.at[rows, pl.ds(k * width, width)], target, full)
        plgpu.copy_gmem_to_smem(job.inputs(pl.ds(k * plan.depth, plan.depth)), s["x_s"].at[slot], full)

    lax.fori_loop(0, plan.steps, step, None)


def _multiply(
    plan: Plan, job: Job, i: Any, tile: Any, block: Any, turn: tuple[Any, int], s: dict[str, Any]
) -> jax.Array:
    """Sums [64, tokens] of a block of the CTA's i-th tile; a turn is its first step, and how far it is to the next."""
    start, stride = turn
    rows, ring = pl.ds(job.first(tile, block), ROWS), s["rings"][job.matrix.values.dtype]
    by_group = [part for part in (job.matrix.scales, job.matrix.zeros) if part is not None]

    def factors(k: Any) -> list[list[jax.Array]]:
        """Scales, and zero points if there are any, of each group of a step; loaded a turn ahead."""
        columns = [k * plan.groups + group for group in range(plan.groups)]
        by_row = plgpu.Layout.WGMMA.reduce(1)
        return [[registers.load(part.at[rows, column], by_row) for part in by_group] for column in columns]

    def step(n: Any, carried: Any) -> Any:
        sums, ready = carried
        k = start + stride * n
        ahead = factors(jnp.minimum(k + stride, plan.steps - 1))
        slot = lax.rem(i * plan.steps + k, plan.stages)
        plgpu.barrier_wait(s["full"].at[slot])
        weight = registers.loaded(ring.at[slot, pl.ds(block * ROWS, ROWS)])
        products = _products(plan, weight, s["x_s"].at[slot], [zero for _, *zeros in ready for zero in zeros])
        for product, (scale, *_) in zip(products, ready, strict=True):
            sums += product * lax.broadcast_in_dim(scale.astype(jnp.float32), sums.shape, (0,))
        plgpu.barrier_arrive(s["empty"].at[slot])
        return sums, ahead

    count = lax.div(plan.steps - start + stride - 1, stride)
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, plan.tokens), jnp.float32), plgpu.Layout.WGMMA)
    sums, _ = lax.fori_loop(0, count, step, (zeros, factors(jnp.minimum(start, plan.steps - 1))))
    return sums


def _products(plan: Plan, weight: Any, x: Any, zeros: list[jax.Array]) -> list[jax.Array]:
    """Products [64, tokens] of a block over each group of a step, without scales."""
    last = 2 * plan.groups - 1

    def product(*sums: Any) -> list[jax.Array]:
        for at, (group, inputs, numbers) in enumerate(registers.widened(weight, zeros, plan.groups)):
            plgpu.wgmma(sums[group], numbers, _compat.smem_transpose(x.at[:, inputs]))
            if 0 < at < last:  # the last two are waited for together (`lib.products`)
                plgpu.wgmma_wait(1)
        return [ref[...] for ref in sums]

    shape = (ROWS, plan.tokens)
    products: list[jax.Array] = pl.run_scoped(product, *(plgpu.ACC(shape, jnp.float32) for _ in range(plan.groups)))
    return products
