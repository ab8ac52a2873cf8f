"""The product of more than 64 tokens with a weight in few bits on Hopper, whose speed is that of the tensor cores.

As in ``mosaic``, a producer warpgroup fills a ring and consumers widen 64 rows of the weight each to bfloat16 in
registers. Here the CTAs go from tile to tile of rows and tokens, and a pair of CTAs with neighbouring rows reads each
tile of tokens once: each copies one half of it into the shared memory of both.

A consumer's sums fill most of its registers, so a group has no sums of its own (``rescaled``).

`two_sided_product` rounds activations to e4m3 first, by one scale for each token, and multiplies them with numbers in
e4m3 as both lie in shared memory: the tensor cores are twice as fast then, and nothing is widened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED, SHARED_MEMORY, tiled
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.quantized_product import hidden, mosaic_plan, registers, rescaled, staged
from pallas_kernels.quantized_product.hidden import HALF
from pallas_kernels.quantized_product.layout import LONGEST, PLACES
from pallas_kernels.quantized_product.mosaic_plan import MAX_TOKENS, ROWS, registers_of
from pallas_kernels.quantized_product.rescaled import Rows
from pallas_kernels.quantized_product.wide_plan import Config, Plan, default_config, plan_of


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None; any dtype of the result will do."""
    if (tokens := tokens_of(x)) <= MAX_TOKENS:
        return f"The wide Mosaic product with few bits is for more than {MAX_TOKENS} tokens; these are {tokens}."
    return mosaic_plan.unfit(x, values, scales)


def two_sided_refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call with e4m3 on both sides, or None."""
    if values.dtype != jnp.float8_e4m3fn:
        return f"The Mosaic product of e4m3 and e4m3 needs weights in e4m3; these are {values.dtype}."
    return refusal(x, values, scales, zeros, dtype)


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
    plan = plan_of(config or default_config(x, values, scales), x, values, scales)
    operands = values, scales, *([] if zeros is None else [zeros])
    return _product(plan, x, operands, dtype, may_split=may_split)


@functools.partial(jax.jit, static_argnames=("dtype", "may_split", "config", "units"))
def two_sided_product(
    x: Float[Array, "*T I"],
    values: Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: None,
    dtype: DTypeLike,
    *,
    may_split: bool = False,
    config: Config | None = None,
    units: int = 0,
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """As `quantized_product`, with activations rounded to e4m3, a scale for each token.

    With ``units`` the rows are the gates and up projections of so many hidden units, part after part, and the result is
    hidden units (``swiglu``).
    """
    if reason := two_sided_refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    numbers, of_tokens = quantize_rows(x)
    config = config or default_config(x, values, scales, is_two_sided=True, may_split=not units)
    plan = plan_of(config, x, values, scales, units)
    padded = jnp.pad(of_tokens.reshape(-1), (0, -of_tokens.size % plan.config.tokens))
    return _product(plan, numbers, (values, scales, padded), dtype, may_split=may_split)


def _product(
    plan: Plan, x: jax.Array, operands: tuple[jax.Array, ...], dtype: DTypeLike, *, may_split: bool
) -> jax.Array:
    """The product of a plan, in parts where it may be split."""
    splits, tokens, outputs = plan.config.splits, tokens_of(x), len(operands[0]) // (2 if plan.units else 1)
    rows = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % ALIGNED), (0, 0)))
    if plan.units:  # TMA can fetch rows of gate and up in turns of 8 then
        of_parts = operands[0].reshape(-1, 2, plan.units // ALIGNED, ALIGNED, operands[0].shape[1])
        operands = (of_parts, *operands[1:])
    operands = _compat.vary_alike(rows, *operands)
    result = _compat.out_like((splits, len(rows), outputs), jnp.float32 if splits > 1 else dtype, operands[0])
    (out,) = _launch(plan, operands, result)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    out = out[:, :tokens].reshape(splits, *x.shape[:-1], outputs)
    if splits == 1:
        return out[0]
    # One after another: XLA's own sum over an axis takes another order for another number of tokens.
    return out if may_split else functools.reduce(jnp.add, out).astype(dtype)


def _launch(plan: Plan, operands: tuple[jax.Array, ...], result: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    """The kernel over all CTAs of a plan."""
    config, is_packed = plan.config, operands[1].dtype == jnp.uint16
    stages, consumers = config.stages, config.consumers
    width = LONGEST // (PLACES if is_packed else 1)
    of_step = plan.rows * width * operands[1].dtype.itemsize + config.tokens * LONGEST * operands[0].dtype.itemsize
    room = SHARED_MEMORY - stages * of_step
    slots = hidden.BUFFERS if plan.units else staged.slots_of(consumers, config.tokens, result.dtype.itemsize, room)

    def quantized_product(*refs: Any, **scratch: Any) -> None:
        _body(*refs, plan=plan, **scratch)

    barrier: Any = plgpu.Barrier
    cluster: dict[str, Any] = {}
    if config.pair > 1:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",))
        cluster = {"cluster": (config.pair,), "cluster_names": ("member",)}
    return plgpu.kernel(
        quantized_product,
        out_type=[result],
        grid=(plan.clusters,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_s": tiled((stages, config.tokens, LONGEST), operands[0].dtype),
            "weight_s": _weight_memory(plan, width, operands[1].dtype),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=1 + (consumers if plan.units else 1)),
            "empty": barrier(num_barriers=stages, num_arrivals=consumers),
            "out_s": staged.scratch(consumers, slots, result.dtype),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **cluster,
    )


def _weight_memory(plan: Plan, width: int, dtype: Any) -> Any:
    """Shared memory of the weight's rows; for hidden units, also seen as turns of 8 rows of gate and 8 of up.

    Both views begin at one address and have the same swizzle, so that 8 rows lie alike in them.
    """
    rows = tiled((plan.config.stages, plan.rows, width), dtype)
    if not plan.units:
        return rows
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    shape = (plan.config.stages, plan.rows // (2 * ALIGNED), 2, ALIGNED, width)
    return plgpu.RefUnion(rows, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def _body(x: Any, values: Any, scales: Any, *rest: Any, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    *more, out = rest
    if plan.units:
        s["weight_s"], s["turns_s"] = s["weight_s"]
    first, me, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), plan.config.consumers
    member = lax.axis_index("member") if plan.config.pair > 1 else 0
    producer_registers, consumer_registers = registers_of(consumers)

    def tiles(over: Callable[..., Any]) -> Any:
        """Go from tile to tile; ``over`` takes the number of steps before, the tile's place, and its steps."""

        def tile(i: Any, count: Any) -> Any:
            piece, block, part = plan.place(first + i * plan.clusters)
            row = (piece * plan.config.pair + member) * plan.rows
            start, end = plan.inputs(part)
            over(count, (row, block * plan.config.tokens, part), (start, end))
            return count + end - start

        return lax.fori_loop(0, pl.cdiv(plan.count - first, plan.clusters), tile, jnp.int32(0))

    @pl.when(me == consumers)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        count = tiles(functools.partial(_produce, x, values, plan, s))

        # A CTA must not end before the other one has given back what it was sent.
        def wait(step: Any, nothing: None) -> None:
            plgpu.barrier_wait(s["empty"].at[lax.rem(step, plan.config.stages)])

        lax.fori_loop(jnp.maximum(0, count - plan.config.stages), count, wait, None)

    @pl.when(me < consumers)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")

        def consume(count: Any, place: Any, steps: Any) -> None:
            row, token, part = place
            ours = row + me * ROWS
            rows = plan.rows_of(ours)
            if x.dtype == jnp.bfloat16:
                sums = rescaled.sums((scales, *more), rows, me, (count, *steps), s)
            else:
                sums = _two_sided_sums(scales, rows, me, (count, *steps), s)
                of_tokens = registers.load(more[0].at[pl.ds(token, sums.shape[1])], plgpu.Layout.WGMMA.reduce(0))
                sums *= lax.broadcast_in_dim(of_tokens, sums.shape, (1,))

            @pl.when(ours < len(scales))
            def _() -> None:
                if plan.units:
                    hidden.store(sums, out, (token, lax.div(ours, 2)), me, s["out_s"])
                else:
                    staged.store(sums, out, (part, token, ours), me, s["out_s"])

        tiles(consume)
        staged.drain()


def _produce(x: Any, values: Any, plan: Plan, s: dict[str, Any], count: Any, place: Any, steps: Any) -> None:
    """Copy the steps of a tile into the ring, as slots come free in both CTAs of a pair."""
    (row, token, _), (start, end) = place, steps
    width = s["weight_s"].shape[-1]

    def step(k: Any, nothing: None) -> None:
        at = count + k - start
        slot = lax.rem(at, plan.config.stages)

        @pl.when(at >= plan.config.stages)
        def _() -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        full = s["full"].at[slot]
        tokens, columns = pl.ds(token, plan.config.tokens), pl.ds(k * width, width)
        if not plan.units:
            rows = pl.ds(row, plan.rows)
            plgpu.copy_gmem_to_smem(values.at[rows, columns], s["weight_s"].at[slot], full)
        for me in range(plan.config.consumers if plan.units else 0):
            part, unit = plan.unit_of(row + me * ROWS)
            turns = HALF // ALIGNED
            goal = _compat.smem_transpose(s["turns_s"].at[slot, pl.ds(me * turns, turns)], (1, 0, 2, 3))
            source = values.at[part, :, pl.ds(lax.div(unit, ALIGNED), turns), :, columns]
            plgpu.copy_gmem_to_smem(source, goal, full)
        plgpu.copy_gmem_to_smem(
            x.at[tokens, pl.ds(k * LONGEST, LONGEST)],
            s["x_s"].at[slot],
            full,
            collective_axes="member" if plan.config.pair > 1 else None,
        )

    lax.fori_loop(start, end, step, None)


def _two_sided_sums(scales: Any, rows: Rows, me: Any, steps: tuple[Any, Any, Any], s: dict[str, Any]) -> jax.Array:
    """As `rescaled.sums`, of e4m3 numbers on both sides.

    Each group has sums of its own, which are added in float32: tensor cores add products of 8 bits to sums of fewer
    bits than that (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    """
    count, start, end = steps
    stages, tokens, _ = s["x_s"].shape
    ours = pl.ds(me * ROWS, ROWS)

    def load(k: Any) -> jax.Array:
        """Scales of a step; loaded one step ahead, and converted there, or it would wait for memory."""
        return rows.load(scales, k)

    def step(k: Any, carried: Any) -> Any:
        total, scale = carried
        ahead = load(jnp.minimum(k + 1, end - 1))
        slot = lax.rem(count + k - start, stages)
        plgpu.barrier_wait(s["full"].at[slot])

        def run(products: Any) -> jax.Array:
            plgpu.wgmma(products, s["weight_s"].at[slot, ours], _compat.smem_transpose(s["x_s"].at[slot]))
            return products[...]

        products = pl.run_scoped(run, plgpu.ACC((ROWS, tokens), jnp.float32))
        plgpu.barrier_arrive(s["empty"].at[slot])
        return total + products * lax.broadcast_in_dim(scale.astype(jnp.float32), products.shape, (0,)), ahead

    total = plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)
    total, _ = lax.fori_loop(start, end, step, (total, load(start)))
    return total
