"""The product of more than 64 tokens with a weight in few bits on Hopper, whose speed is that of the tensor cores.

As in ``mosaic``, a producer warpgroup fills a ring and consumers widen 64 rows of the weight each to bfloat16 in
registers. Here the CTAs go from tile to tile of rows and tokens, and a pair of CTAs with neighbouring rows reads each
tile of tokens once: each copies one half of it into the shared memory of both.

A consumer's sums fill most of its registers, so a group has no sums of its own (``rescaled``).

`two_sided_product` rounds activations to e4m3 first, by one scale for each token, and multiplies them with numbers in
e4m3 as both lie in shared memory: the tensor cores are twice as fast then, and nothing is widened.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, UInt8, UInt16

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import tiled
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.quantized_product import mosaic, registers, rescaled, staged
from pallas_kernels.quantized_product.layout import LONGEST, PLACES
from pallas_kernels.quantized_product.mosaic import ALIGNED, MAX_TOKENS, ROWS, registers_of

PAIR = 2  # CTAs of a cluster
BAND = 8  # tiles of tokens that CTAs work on together, so that what they read of both sides stays in L2
MOST_STAGES = 5
# Microseconds of a step by consumers and tokens, and of a tile, on an H200 with all multiprocessors at work (BENCH.md).
STEP_TIMES = {(3, 128): 1.02, (2, 128): 0.71, (2, 256): 1.34}
TWO_SIDED_STEP_TIMES = {(3, 128): 0.65, (2, 128): 0.47}
TILE_TIME = 2.0
MOST_SPLITS, MOST_OF_PARTS = 4, 512  # parts of the inputs, and tokens of a call that has any


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        consumers: warpgroups that multiply 64 rows of the weight each.
        tokens: of a tile.
        stages: steps in the ring; a step has the 128 inputs of a group.
        splits: parts of the inputs, each of which is a tile of its own.
        pair: CTAs that share a tile of tokens, 1 or 2.
        step_time: microseconds of a step, about.
    """

    consumers: int
    tokens: int
    stages: int
    splits: int = 1
    pair: int = PAIR
    step_time: float = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each pair of CTAs computes, tile after tile.

    Attributes:
        config: how the product is cut up.
        pieces: tiles along the rows of the weight, two to a pair.
        blocks: tiles along the tokens.
        steps: groups of inputs.
    """

    config: Config
    pieces: int
    blocks: int
    steps: int

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return ROWS * self.config.consumers

    @property
    def share(self) -> int:
        """Steps of a part of the inputs; the last one may have fewer."""
        return pl.cdiv(self.steps, self.config.splits)

    @property
    def count(self) -> int:
        """Tiles of a pair."""
        return self.pieces * self.blocks * self.config.splits

    @property
    def clusters(self) -> int:
        """Pairs that the kernel is launched with."""
        return min(self.count, _compat.sm_count() // self.config.pair)

    @property
    def cost(self) -> float:
        """Microseconds on an H200, about: of the busiest CTA, and to write and read parts."""
        config = self.config
        a_tile = config.step_time * self.share + TILE_TIME
        parts = config.splits * self.blocks * config.tokens * self.pieces * config.pair * self.rows
        return pl.cdiv(self.count, self.clusters) * a_tile + (parts * 8 / 5e6 if config.splits > 1 else 0)

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Piece, block and part of a tile: a band of blocks with all pieces and parts, then the next band."""
        each = self.pieces * self.config.splits
        band, rest = lax.div(tile, BAND * each), lax.rem(tile, BAND * each)
        width = jnp.minimum(BAND, self.blocks - band * BAND)
        block, rest = band * BAND + lax.rem(rest, width), lax.div(rest, width)
        return lax.rem(rest, self.pieces), block, lax.div(rest, self.pieces)

    def inputs(self, part: Any) -> tuple[Any, Any]:
        """First step of a part, and the one behind its last."""
        return part * self.share, jnp.minimum(self.steps, (part + 1) * self.share)


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None; any dtype of the result will do."""
    if (tokens := tokens_of(x)) <= MAX_TOKENS:
        return f"The wide Mosaic product with few bits is for more than {MAX_TOKENS} tokens; these are {tokens}."
    return mosaic.unfit(x, values, scales)


def two_sided_refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call with e4m3 on both sides, or None."""
    if values.dtype != jnp.float8_e4m3fn:
        return f"The Mosaic product of e4m3 and e4m3 needs weights in e4m3; these are {values.dtype}."
    return refusal(x, values, scales, zeros, dtype)


def configs(x: Any, values: Any, scales: Any, *, is_two_sided: bool = False) -> Iterator[Config]:
    """The configurations that fit into registers and shared memory, and whose parts all have steps."""
    tokens, steps, is_packed = tokens_of(x), scales.shape[1], values.dtype == jnp.uint16
    for (consumers, width), step_time in (TWO_SIDED_STEP_TIMES if is_two_sided else STEP_TIMES).items():
        if width > 128 and tokens <= 128:
            continue
        size = LONGEST * (consumers * ROWS // (2 if is_packed else 1) + width * (1 if is_two_sided else 2))
        stages = min(MOST_STAGES, (mosaic.SHARED_MEMORY - staged.least_bytes(consumers)) // size)
        for splits in range(1, MOST_SPLITS + 1 if tokens <= MOST_OF_PARTS else 2):
            if pl.cdiv(steps, splits) * (splits - 1) >= steps:
                break
            yield Config(consumers, width, stages, splits, step_time=step_time)


def default_config(x: Any, values: Any, scales: Any, *, is_two_sided: bool = False) -> Config:
    """The configuration of the least cost."""
    choices = configs(x, values, scales, is_two_sided=is_two_sided)
    return min(choices, key=lambda config: plan_of(config, x, values, scales).cost)


def plan_of(config: Config, x: Any, values: Any, scales: Any) -> Plan:
    """The plan of a call that is cut up like this."""
    pieces = pl.cdiv(len(values), ROWS * config.consumers * config.pair)
    return Plan(config, pieces, pl.cdiv(tokens_of(x), config.tokens), scales.shape[1])


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


@functools.partial(jax.jit, static_argnames=("dtype", "may_split", "config"))
def two_sided_product(
    x: Float[Array, "*T I"],
    values: Float8e4m3fn[Array, "O I"],
    scales: Float[Array, "O G"],
    zeros: None,
    dtype: DTypeLike,
    *,
    may_split: bool = False,
    config: Config | None = None,
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """As `quantized_product`, with activations rounded to e4m3, a scale for each token."""
    if reason := two_sided_refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    numbers, of_tokens = quantize_rows(x)
    plan = plan_of(config or default_config(x, values, scales, is_two_sided=True), x, values, scales)
    padded = jnp.pad(of_tokens.reshape(-1), (0, -of_tokens.size % plan.config.tokens))
    return _product(plan, numbers, (values, scales, padded), dtype, may_split=may_split)


def _product(
    plan: Plan, x: jax.Array, operands: tuple[jax.Array, ...], dtype: DTypeLike, *, may_split: bool
) -> jax.Array:
    """The product of a plan, in parts where it may be split."""
    splits, tokens, outputs = plan.config.splits, tokens_of(x), len(operands[0])
    rows = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % ALIGNED), (0, 0)))
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
    room = mosaic.SHARED_MEMORY - stages * of_step
    slots = staged.slots_of(consumers, config.tokens, result.dtype.itemsize, room)

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
            "weight_s": tiled((stages, plan.rows, width), operands[1].dtype),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": barrier(num_barriers=stages, num_arrivals=consumers),
            "out_s": staged.scratch(consumers, slots, result.dtype),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **cluster,
    )


def _body(x: Any, values: Any, scales: Any, *rest: Any, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    *more, out = rest
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
            if x.dtype == jnp.bfloat16:
                sums = rescaled.sums((scales, *more), ours, me, (count, *steps), s)
            else:
                sums = _two_sided_sums(scales, ours, me, (count, *steps), s)
                of_tokens = registers.load(more[0].at[pl.ds(token, sums.shape[1])], plgpu.Layout.WGMMA.reduce(0))
                sums *= lax.broadcast_in_dim(of_tokens, sums.shape, (1,))

            @pl.when(ours < len(values))
            def _() -> None:
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
        rows, tokens = pl.ds(row, plan.rows), pl.ds(token, plan.config.tokens)
        plgpu.copy_gmem_to_smem(values.at[rows, pl.ds(k * width, width)], s["weight_s"].at[slot], full)
        plgpu.copy_gmem_to_smem(
            x.at[tokens, pl.ds(k * LONGEST, LONGEST)],
            s["x_s"].at[slot],
            full,
            collective_axes="member" if plan.config.pair > 1 else None,
        )

    lax.fori_loop(start, end, step, None)


def _two_sided_sums(scales: Any, row: Any, me: Any, steps: tuple[Any, Any, Any], s: dict[str, Any]) -> jax.Array:
    """As `rescaled.sums`, of e4m3 numbers on both sides.

    Each group has sums of its own, which are added in float32: tensor cores add products of 8 bits to sums of fewer
    bits than that (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    """
    count, start, end = steps
    stages, tokens, _ = s["x_s"].shape
    rows, ours = rescaled.rows_of(scales, row), pl.ds(me * ROWS, ROWS)

    def load(k: Any) -> jax.Array:
        """Scales of a step; loaded one step ahead, or it would wait for memory."""
        return registers.load(scales.at[rows, k], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)

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
        return total + products * lax.broadcast_in_dim(scale, products.shape, (0,)), ahead

    total = plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)
    total, _ = lax.fori_loop(start, end, step, (total, load(start)))
    return total
