"""The product of up to 64 tokens with a weight in few bits on Hopper: numbers are widened in registers, exactly.

One CTA a multiprocessor. A producer warpgroup starts TMA copies of tiles of the weight and of the tokens into a ring;
each consumer widens its 64 rows of the weight to bfloat16 in registers, as the first operand of wgmma, and multiplies
the float32 sums of a group by the scales of its rows.

Steps, tile after tile, are dealt out in equal runs (stream-K), so that every CTA reads as many bytes, whatever number
of tiles a weight has: 136 tiles on 132 multiprocessors would take twice as long as 132. A tile whose steps several CTAs
have is a sum of parts, which whoever reads the product adds up; parts that a tile does not need are zero.
"""

from __future__ import annotations

import dataclasses
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
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.quantized_product import registers
from pallas_kernels.quantized_product.layout import LONGEST, PLACES
from pallas_kernels.quantized_product.rescaled import ROWS

MAX_TOKENS = 64
THREADS = 128  # of a warpgroup
_REGISTERS, _MOST_REGISTERS, _PRODUCER_REGISTERS = 1 << 16, 248, 40  # of a multiprocessor, and of a thread
MIN_STAGES, MAX_STAGES = 3, 4  # of a ring; more in flight measured slower


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    Attributes:
        consumers: warpgroups that multiply 64 rows of the weight each.
        groups: of inputs that a step has.
        stages: steps in the ring.
    """

    consumers: int
    groups: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each CTA computes.

    Attributes:
        config: how the product is cut up.
        tiles: of rows of the weight.
        steps: of a tile.
        tokens: of the call, padded.
        is_packed: whether numbers have 4 bits: then the words of the next step are in registers before a step ends.
    """

    config: Config
    tiles: int
    steps: int
    tokens: int
    is_packed: bool

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return ROWS * self.config.consumers

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return LONGEST * self.config.groups

    @property
    def run(self) -> int:
        """Steps of each CTA; the last one may have fewer."""
        return pl.cdiv(self.tiles * self.steps, _compat.sm_count())

    @property
    def ctas(self) -> int:
        """CTAs that have anything to do."""
        return pl.cdiv(self.tiles * self.steps, self.run)

    @property
    def parts(self) -> int:
        """CTAs, at most, that share a tile."""
        if self.steps % self.run == 0 or self.run % self.steps == 0:
            return max(1, self.steps // self.run)
        return pl.cdiv(self.steps - 1, self.run) + 1


def registers_of(consumers: int) -> tuple[int, int]:
    """Registers of a thread of the producer and of a consumer, who gets what the producer gives back.

    More than the CTA was launched with would never be granted; without the request, ptxas spills them.
    """
    warpgroups = consumers + 1
    launched = min(_MOST_REGISTERS, _REGISTERS // (THREADS * warpgroups)) // 8 * 8
    most = min(_MOST_REGISTERS, (launched * warpgroups - _PRODUCER_REGISTERS) // consumers) // 8 * 8
    return _PRODUCER_REGISTERS, most


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why this kernel cannot do this call, or None; any dtype of the result will do."""
    del zeros, dtype
    if (tokens := tokens_of(x)) > MAX_TOKENS:
        return f"The Mosaic product with few bits takes up to {MAX_TOKENS} tokens; these are {tokens}."
    return unfit(x, values, scales)


def unfit(x: Any, values: Any, scales: Any) -> str | None:
    """Why the Mosaic backend cannot multiply such operands, or None."""
    if x.dtype != jnp.bfloat16:
        return f"The Mosaic product with few bits takes bf16; this is {x.dtype}."
    if (group := x.shape[-1] // scales.shape[1]) != LONGEST:
        return f"The Mosaic product with few bits needs groups of {LONGEST} inputs; these have {group}."
    if values.dtype == jnp.int16:
        return "The Mosaic product with few bits takes e4m3 numbers one by one; these are words of two (int16)."
    if len(values) % ROWS:
        return f"The Mosaic product with few bits needs a multiple of {ROWS} rows; these are {len(values)}."
    return None


def default_config(x: Any, values: Any, scales: Any) -> Config:
    """The widest tile and the longest step of which the ring holds enough.

    In 4 bits, beyond 16 tokens, one of four consumers has no registers for the words of its next step (ptxas spills),
    and two that have are faster (32 tokens of 27B on an H100: gate_up 45.8 -> 44.3 us, down 26.2 -> 23.3). In 8 bits,
    beyond 32 tokens, the sums alone need more registers than one of four has.
    """
    is_packed, tokens = values.dtype == jnp.uint16, -(-tokens_of(x) // ALIGNED) * ALIGNED
    most_of_four = 16 if is_packed else 32
    counts = (4, 2, 1) if tokens <= most_of_four else (2, 1)
    consumers = next(count for count in counts if len(values) % (ROWS * count) == 0)
    config = Config(consumers, 1, 1)
    for groups in (2, 1):
        width = LONGEST * groups
        size = consumers * ROWS * width // (2 if is_packed else 1) + 2 * tokens * width
        config = Config(consumers, groups, min(MAX_STAGES, SHARED_MEMORY // size))
        if scales.shape[1] % groups == 0 and config.stages >= MIN_STAGES:
            break
    return config


def plan_of(config: Config, x: Any, values: Any, scales: Any) -> Plan:
    """The plan of a call that is cut up like this."""
    tokens = -(-tokens_of(x) // ALIGNED) * ALIGNED
    tiles, steps = len(values) // (ROWS * config.consumers), scales.shape[1] // config.groups
    return Plan(config, tiles, steps, tokens, values.dtype == jnp.uint16)


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
    tokens, outputs = tokens_of(x), len(values)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], outputs), dtype)
    plan = plan_of(config or default_config(x, values, scales), x, values, scales)
    rows = x.reshape(tokens, -1)
    if tokens > ALIGNED:  # TMA fills up a tile, but not tiles of which the last one is not whole
        rows = jnp.pad(rows, ((0, plan.tokens - tokens), (0, 0)))
    operands = _compat.vary_alike(rows, values, scales, *([] if zeros is None else [zeros]))
    result = _compat.out_like((plan.parts, tokens, outputs), jnp.float32 if plan.parts > 1 else dtype, operands[0])
    (out,) = _launch(plan, operands, result)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    out = out.reshape(plan.parts, *x.shape[:-1], outputs)
    if plan.parts == 1:
        return out[0]
    # One after another: XLA's own sum over an axis takes another order for another number of tokens.
    return out if may_split else functools.reduce(jnp.add, out).astype(dtype)


def _launch(plan: Plan, operands: tuple[jax.Array, ...], result: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    """The kernel over all CTAs of a plan."""
    stages, consumers = plan.config.stages, plan.config.consumers
    width = plan.depth // PLACES if plan.is_packed else plan.depth

    def quantized_product(*refs: Any, **scratch: Any) -> None:
        _body(*refs, plan=plan, **scratch)

    return plgpu.kernel(
        quantized_product,
        out_type=[result],
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_s": tiled((stages, plan.tokens, plan.depth), jnp.bfloat16),
            "weight_s": tiled((stages, plan.rows, width), operands[1].dtype),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _body(x: Any, values: Any, scales: Any, *rest: Any, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    *zeros, out = rest
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
