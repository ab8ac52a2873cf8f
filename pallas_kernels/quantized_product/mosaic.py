"""The product of up to 64 tokens with a weight in few bits on Hopper: numbers are widened in registers, exactly.

One CTA a multiprocessor. A producer warpgroup starts TMA copies of tiles of the weight and of the tokens into a ring;
each consumer widens its 64 rows of the weight to bfloat16 in registers, as the first operand of wgmma, and multiplies
the float32 sums of a group by the scales of its rows.

Steps, tile after tile, are dealt out in equal runs (stream-K), so that every CTA reads as many bytes, whatever number
of tiles a weight has: 136 tiles on 132 multiprocessors would take twice as long as 132. A tile whose steps several CTAs
have is a sum of parts, which whoever reads the product adds up; parts that a tile does not need are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib import warp_product
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED, tiled
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.quantized_product import registers
from pallas_kernels.quantized_product.layout import PLACES
from pallas_kernels.quantized_product.mosaic_plan import Config, Plan, default_config, plan_of, refusal, registers_of
from pallas_kernels.quantized_product.rescaled import ROWS


@functools.partial(jax.jit, static_argnames=("dtype", "may_split", "config"))
def quantized_product(
    x: Float[Array, "*T I"],
    values: UInt16[Array, "O packed"] | Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: UInt8[Array, "O G"] | None,
    dtype: DTypeLike,
    *,
    may_split: bool = False,
    config: Config | None = None,
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """See ``pallas_kernels.quantized_product``; float32 parts [S, *T, O] where it may be split, and is."""
    if reason := refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    if tokens_of(x) == 0:
        return jnp.zeros((*x.shape[:-1], len(values)), dtype)
    plan = plan_of(config or default_config(x, values, scales), x, values, scales)
    parts, _ = in_parts(plan, x, (values, scales, zeros), dtype)
    return parts if may_split and plan.parts > 1 else whole(parts, dtype)


def whole(parts: Float[Array, "S *T O"], dtype: DTypeLike) -> Float[Array, "*T O"]:
    """The sum of parts, one after another: XLA's own sum takes another order for another number of tokens."""
    return functools.reduce(jnp.add, parts).astype(dtype)


def in_parts(
    plan: Plan,
    x: Float[Array, "*T I"],
    weight: tuple[Array, Array, Array | None],
    dtype: DTypeLike,
    other: Float[Array, "P I"] | None = None,
) -> tuple[Float[Array, "S *T O"], Float[Array, "*T P"] | None]:
    """The parts of a product, in float32 if they are several, and the product with another weight beside it.

    Args:
        plan: of the product.
        x: activations, at least one token.
        weight: numbers, scales and zero points.
        dtype: of the result.
        other: weight whose rows go to multiprocessors that the plan leaves idle.
    """
    tokens, outputs, beside = tokens_of(x), len(weight[0]), plan.tiles_beside(other)
    assert beside or other is None, "else it is refused"
    rows = x.reshape(tokens, -1)
    if tokens > ALIGNED:  # TMA fills up a tile, but not tiles of which the last one is not whole
        rows = jnp.pad(rows, ((0, plan.tokens - tokens), (0, 0)))
    operands = _compat.vary_alike(rows, *(array for array in (*weight, other) if array is not None))
    results = [_compat.out_like((plan.parts, tokens, outputs), jnp.float32 if plan.parts > 1 else dtype, operands[0])]
    if other is not None:
        results.append(_compat.out_like((1, tokens, len(other)), dtype, operands[0]))
    run = _launch(plan, operands, results, beside)
    out, *others = _compat.vary_alike(*run(*operands), *operands)[: len(results)]  # Mosaic does not mark its outputs
    of_other = (array.reshape(*x.shape[:-1], -1) for array in others)
    return out.reshape(plan.parts, *x.shape[:-1], outputs), next(of_other, None)


class Other(NamedTuple):
    """References to a weight beside the first one and to its product, and how many CTAs multiply it."""

    weight: Any
    out: Any
    tiles: int


def _launch(
    plan: Plan, operands: tuple[jax.Array, ...], results: list[jax.ShapeDtypeStruct], beside: int
) -> Callable[..., Any]:
    """The kernel over all CTAs of a plan, and over those that multiply another weight."""
    stages, consumers = plan.config.stages, plan.config.consumers
    width = plan.depth // PLACES if plan.is_packed else plan.depth

    def quantized_product(*refs: Any, **s: Any) -> None:
        (x, *weight), (out, *outs) = refs[: len(operands)], refs[len(operands) :]
        other = Other(weight.pop(), outs[0], beside) if beside else None
        _body(x, weight, out, other, plan, s)

    return plgpu.kernel(
        quantized_product,
        out_type=results,
        grid=(plan.ctas + beside,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_s": tiled((stages, plan.tokens, plan.depth), jnp.bfloat16),
            "weight_s": tiled((stages, plan.rows, width), operands[1].dtype),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
        }
        | ({"met": plgpu.Barrier(num_arrivals=consumers)} if beside else {}),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _body(x: Any, weight: list[Any], out: Any, other: Other | None, plan: Plan, s: dict[str, Any]) -> None:
    """The body of one CTA; the weight is numbers, scales and zero points if there are any, ``s`` the scratch."""
    values, scales, *zeros = weight
    cta, me, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), plan.config.consumers
    producer_registers, consumer_registers = registers_of(consumers)
    first = cta * plan.run
    last = jnp.minimum(first + plan.run, plan.tiles * plan.steps)

    @pl.when(me == consumers)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        _produce(x, values, first, last, plan, s)

    @pl.when(me < consumers)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")

        def part(tile: Any, nothing: None) -> None:
            start, end = jnp.maximum(first, tile * plan.steps), jnp.minimum(last, (tile + 1) * plan.steps)
            row = tile * plan.rows + me * ROWS
            sums = _consume(scales, zeros, row, (first, start, end), me, plan, s)
            store_transposed(sums, out, cta - lax.div(tile * plan.steps, plan.run), row)
            if plan.parts > 1:
                _store_zeros(out, cta, tile, row, end, plan)

        lax.fori_loop(lax.div(first, plan.steps), lax.div(last - 1, plan.steps) + 1, part, None)
        if other is not None:  # within this branch: behind it ptxas has the producer's 40 registers, and spills
            _multiply_beside(x, other, plan, s)


def _multiply_beside(x: Any, other: Other, plan: Plan, s: dict[str, Any]) -> None:
    """The other weight's rows, by the consumers of CTAs behind those of the plan, whose rings nobody fills."""
    tile, rows = lax.axis_index("cta") - plan.ctas, other.weight.shape[0] // other.tiles
    shared = plan.config.consumers, s["weight_s"], s["met"]
    pl.when(tile >= 0)(lambda: warp_product.multiply(x, other.weight, other.out, tile * rows, rows, *shared))


def _store_zeros(out: Any, cta: Any, tile: Any, row: Any, end: Any, plan: Plan) -> None:
    """Zero the parts that a tile does not need; whoever has its last step does so."""

    @pl.when(end == (tile + 1) * plan.steps)
    def _() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, plan.tokens), jnp.float32), plgpu.Layout.WGMMA)

        def store(part: Any, nothing: None) -> None:
            store_transposed(zeros, out, part, row)

        lax.fori_loop(cta - lax.div(tile * plan.steps, plan.run) + 1, plan.parts, store, None)


def _produce(x: Any, values: Any, first: Any, last: Any, plan: Plan, s: dict[str, Any]) -> None:
    """Copy steps into the ring, as slots come free."""
    width = s["weight_s"].shape[-1]

    def step(unit: Any, nothing: None) -> None:
        count = unit - first
        slot = lax.rem(count, plan.config.stages)

        @pl.when(count >= plan.config.stages)
        def _() -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        tile, k = lax.div(unit, plan.steps), lax.rem(unit, plan.steps)
        rows = pl.ds(tile * plan.rows, plan.rows)
        full = s["full"].at[slot]
        plgpu.copy_gmem_to_smem(values.at[rows, pl.ds(k * width, width)], s["weight_s"].at[slot], full)
        inputs = pl.ds(k * plan.depth, plan.depth)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(jnp.int32(0), plan.tokens), inputs], s["x_s"].at[slot], full)

    lax.fori_loop(first, last, step, None)


def _consume(
    scales: Any, zeros: list[Any], row: Any, units: tuple[Any, Any, Any], me: Any, plan: Plan, s: dict[str, Any]
) -> jax.Array:
    """Sums [64, tokens] of a consumer's rows over the steps from ``units[1]`` to ``units[2]``."""
    first, start, end = units
    by_row = plgpu.Layout.WGMMA.reduce(1)
    groups, is_ahead = plan.config.groups, plan.is_packed

    def slot_of(unit: Any) -> Any:
        return lax.rem(unit - first, plan.config.stages)

    def weight_in(slot: Any) -> Any:
        return registers.loaded(s["weight_s"].at[slot, pl.ds(me * ROWS, ROWS)])

    def factors(unit: Any) -> list[list[jax.Array]]:
        """Scales, and zero points if there are any, of the groups of a step.

        They are loaded one step before they are used: a step would wait for memory otherwise.
        """
        k = lax.rem(unit, plan.steps)
        rows = pl.ds(row, ROWS)
        return [
            [registers.load(ref.at[rows, k * groups + group], by_row) for ref in (scales, *zeros)]
            for group in range(groups)
        ]

    def load(unit: Any) -> Any:
        plgpu.barrier_wait(s["full"].at[slot_of(unit)])
        return weight_in(slot_of(unit))

    def load_ahead(unit: Any) -> Any:
        """The next step's words; behind the last step they are any words, and nobody uses them."""

        @pl.when(unit < end)
        def _() -> None:
            plgpu.barrier_wait(s["full"].at[slot_of(unit)])

        return weight_in(slot_of(unit))

    def step(unit: Any, carried: Any) -> Any:
        sums, ready, *weight = carried
        ahead = factors(jnp.minimum(unit + 1, end - 1))
        [now] = weight or [load(unit)]
        zero = [part for _, *parts in ready for part in parts]
        next_weight = functools.partial(load_ahead, unit + 1) if is_ahead else None
        products, following = _products(now, s["x_s"].at[slot_of(unit)], zero, plan, next_weight)
        for of_group, (scale, *_) in zip(products, ready, strict=True):
            sums += of_group * lax.broadcast_in_dim(scale.astype(jnp.float32), sums.shape, (0,))
        plgpu.barrier_arrive(s["empty"].at[slot_of(unit)])
        return sums, ahead, *following

    sums = plgpu.layout_cast(jnp.zeros((ROWS, plan.tokens), jnp.float32), plgpu.Layout.WGMMA)
    sums, *_ = lax.fori_loop(start, end, step, (sums, factors(start), *([load(start)] if is_ahead else [])))
    return sums


def _products(
    weight: Any, x: Any, zeros: list[jax.Array], plan: Plan, next_weight: Callable[[], Any] | None
) -> tuple[list[jax.Array], list[Any]]:
    """Products [64, tokens] of a consumer's rows over each group of a step, without scales, and the next weight.

    All groups' products are started before the first is waited for: numbers of the next are widened meanwhile. At most
    two have their numbers in registers, since ptxas runs wgmmas one by one when registers are short. The next weight is
    loaded before the last numbers are widened, so that no step begins with waiting for shared memory.
    """
    groups = range(plan.config.groups)
    last = 2 * len(groups) - 1

    def run(*sums: Any) -> tuple[list[jax.Array], list[Any]]:
        following = []
        for at, (group, inputs, numbers) in enumerate(registers.widened(weight, zeros, plan.config.groups)):
            plgpu.wgmma(sums[group], numbers, _compat.smem_transpose(x.at[:, inputs]))
            if 0 < at < last:  # the last two are waited for together (`lib.products`)
                plgpu.wgmma_wait(1)
            if at == last - 1 and next_weight is not None:
                following.append(next_weight())
        return [ref[...] for ref in sums], following

    shape = (ROWS, plan.tokens)
    products: tuple[list[jax.Array], list[Any]]
    products = pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for _ in groups))
    return products
