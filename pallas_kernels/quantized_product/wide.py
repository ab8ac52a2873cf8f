"""The product of more than 64 tokens with a weight in few bits on Hopper, whose speed is that of the tensor cores.

As in ``mosaic``, a producer warpgroup fills a ring and consumers widen 64 rows of the weight each to bfloat16 in
registers. Here the CTAs go from tile to tile of rows and tokens, and a pair of CTAs with neighbouring rows reads each
tile of tokens once: each copies one half of it into the shared memory of both.

Sums of a consumer fill most of its registers, so scales do not get sums of their own. A consumer's sums are counted in
the scale of the group that it is at: they are multiplied by the ratio of two scales when the next group begins.
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
from pallas_kernels.quantized_product import mosaic, registers
from pallas_kernels.quantized_product.layout import LONGEST, PLACES
from pallas_kernels.quantized_product.mosaic import ALIGNED, MAX_TOKENS, ROWS, registers_of

PAIR = 2  # CTAs of a cluster
BAND = 8  # tiles of tokens that CTAs work on together, so that what they read of both sides stays in L2
MOST_STAGES = 5
LEAST_SCALE = 1e-30  # what scales nearer to 0 count as, since sums are divided by them
# Microseconds of a step by consumers and tokens, on an H200 with all multiprocessors at work (BENCH.md).
STEP_TIMES = {(3, 128): 1.2, (2, 128): 0.88, (2, 256): 1.55}
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
    """

    consumers: int
    tokens: int
    stages: int
    splits: int = 1
    pair: int = PAIR


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
        a_tile = STEP_TIMES[config.consumers, config.tokens] * self.share + 2.5
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


def configs(tokens: int, steps: int, is_packed: bool) -> Iterator[Config]:
    """The configurations that fit into registers and shared memory, and whose parts all have steps."""
    for consumers, width in STEP_TIMES:
        if width > 128 and tokens <= 128:
            continue
        size = consumers * ROWS * LONGEST // (2 if is_packed else 1) + 2 * width * LONGEST
        stages = min(MOST_STAGES, mosaic.SHARED_MEMORY // size)
        for splits in range(1, MOST_SPLITS + 1 if tokens <= MOST_OF_PARTS else 2):
            if pl.cdiv(steps, splits) * (splits - 1) >= steps:
                break
            yield Config(consumers, width, stages, splits)


def default_config(x: Any, values: Any, scales: Any) -> Config:
    """The configuration of the least cost."""
    choices = configs(tokens_of(x), scales.shape[1], values.dtype == jnp.uint16)
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
    config = config or default_config(x, values, scales)
    plan, tokens, outputs = plan_of(config, x, values, scales), tokens_of(x), len(values)
    rows = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % ALIGNED), (0, 0)))
    operands = _compat.vary_alike(rows, values, scales, *([] if zeros is None else [zeros]))
    shape = (config.splits, tokens, outputs)
    result = _compat.out_like(shape, jnp.float32 if config.splits > 1 else dtype, operands[0])
    (out,) = _launch(plan, operands, result)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    out = out.reshape(config.splits, *x.shape[:-1], outputs)
    if config.splits == 1:
        return out[0]
    # One after another: XLA's own sum over an axis takes another order for another number of tokens.
    return out if may_split else functools.reduce(jnp.add, out).astype(dtype)


def _launch(plan: Plan, operands: tuple[jax.Array, ...], result: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    """The kernel over all CTAs of a plan."""
    config, is_packed = plan.config, operands[1].dtype == jnp.uint16
    stages, consumers = config.stages, config.consumers

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
            "x_s": tiled((stages, config.tokens, LONGEST), jnp.bfloat16),
            "weight_s": tiled((stages, plan.rows, LONGEST // (PLACES if is_packed else 1)), operands[1].dtype),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": barrier(num_barriers=stages, num_arrivals=consumers),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **cluster,
    )


def _body(x: Any, values: Any, scales: Any, *rest: Any, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    *zeros, out = rest
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
            sums = _consume(scales, zeros, ours, (count, *steps), me, plan, s)

            @pl.when(ours < len(values))
            def _() -> None:
                registers.store_transposed(sums, out, part, token, ours)

        tiles(consume)


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


def _consume(
    scales: Any, zeros: list[Any], row: Any, steps: tuple[Any, Any, Any], me: Any, plan: Plan, s: dict[str, Any]
) -> jax.Array:
    """Sums [64, tokens] of a consumer's rows over the steps from ``steps[1]`` to ``steps[2]``."""
    count, start, end = steps
    by_row = plgpu.Layout.WGMMA.reduce(1)
    rows = pl.ds(jnp.minimum(row, len(scales) - ROWS), ROWS)  # rows beyond the last tile's end are not stored

    def factors(k: Any) -> list[jax.Array]:
        """Scales, and zero points if there are any, of a step; loaded one step ahead, or it would wait for memory."""
        scale, *points = (registers.load(ref.at[rows, k], by_row) for ref in (scales, *zeros))
        scale = scale.astype(jnp.float32)
        return [jnp.where(jnp.abs(scale) < LEAST_SCALE, LEAST_SCALE, scale), *points]

    def step(k: Any, carried: Any) -> Any:
        sums, last, (scale, *points) = carried
        ahead = factors(jnp.minimum(k + 1, end - 1))
        slot = lax.rem(count + k - start, plan.config.stages)
        sums *= lax.broadcast_in_dim(last / scale, sums.shape, (0,))
        plgpu.barrier_wait(s["full"].at[slot])
        sums = _added(sums, s["weight_s"].at[slot, pl.ds(me * ROWS, ROWS)], s["x_s"].at[slot], points)
        plgpu.barrier_arrive(s["empty"].at[slot])
        return sums, scale, ahead

    sums = plgpu.layout_cast(jnp.zeros((ROWS, plan.config.tokens), jnp.float32), plgpu.Layout.WGMMA)
    first = factors(start)
    sums, last, _ = lax.fori_loop(start, end, step, (sums, first[0], first))
    return sums * lax.broadcast_in_dim(last, sums.shape, (0,))


def _added(sums: jax.Array, weight: Any, x: Any, zeros: list[jax.Array]) -> jax.Array:
    """Sums plus the products [64, tokens] of a consumer's rows over a step, without scales."""

    def run(products: Any) -> None:
        for at, (_, inputs, numbers) in enumerate(registers.widened(weight, zeros, 1)):
            plgpu.wgmma(products, numbers, _compat.smem_transpose(x.at[:, inputs]))
            if at > 0:
                plgpu.wgmma_wait(1)

    added: jax.Array = pl.run_state(run)(plgpu.ACC.init(sums))
    return added
