"""Gate and up in e4m3 with scales of groups, for up to 64 tokens on Hopper: numbers that nobody widens.

Tensor cores read e4m3 from shared memory as it is, if both operands are: so tokens are split into two numbers in e4m3
each (``pieces``). A CTA has a tile, as many units of gate as of up, reads it to its end, and finishes the hidden units.
A consumer multiplies 64 rows of gate and the 64 of up; the sums of each group are scaled and added in float32, since
tensor cores keep fewer bits of sums in e4m3.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from pallas_kernels import _compat
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.shared_memory import ALIGNED, SHARED_MEMORY, tiled
from pallas_kernels.lib.stores import store_transposed
from pallas_kernels.lib.weight_first import tiles_of
from pallas_kernels.quantized_product import registers
from pallas_kernels.quantized_product.layout import LONGEST
from pallas_kernels.quantized_product.mosaic_plan import registers_of
from pallas_kernels.quantized_product.pieces import split

MIN_TOKENS, MAX_TOKENS = 9, 64
_LEAST_FACTORS = 32  # of a step: TMA copies a multiple of 128 bytes
SETS = 2  # gate and up
_ROWS = 64  # of a wgmma
_MOST_UNITS = 192  # of a tile: three consumers
_GROUPS = 2, 1  # of inputs in a step: longer runs of a row are read faster
_MIN_STAGES = 5  # slots of the ring, two of which are a step
_MIN_FILL = 0.9  # of the card
_COPIES = 3  # of tokens: two pieces and their factors


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut up.

    Attributes:
        units: of a tile, a multiple of 8.
        tiles: each has a CTA.
        groups: of inputs in a step.
        steps: of a tile.
        tokens: of the call, filled up to a power of 2.
    """

    units: int
    tiles: int
    groups: int
    steps: int
    tokens: int

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return LONGEST * self.groups

    @property
    def stages(self) -> int:
        """Slots of the weight's ring; each holds a step's rows of gate, or of up."""
        of_weight, of_tokens = self.units * self.depth, self.tokens * self.groups * (2 * LONGEST + 4)
        most = SHARED_MEMORY // of_weight
        fits = (n for n in range(most, 0, -1) if n * of_weight + _token_stages(n) * of_tokens <= SHARED_MEMORY)
        return next(fits, 0)

    @property
    def token_stages(self) -> int:
        """Slots of the ring of tokens."""
        return _token_stages(self.stages)

    @property
    def starts(self) -> list[int]:
        """The first row of each consumer; the last one's are the last 64, some of which were had before."""
        return [min(first, self.units - _ROWS) for first in range(0, self.units, _ROWS)]

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return len(self.starts)


def _token_stages(stages: int) -> int:
    """So many that a step's slot is free once the slot of its first rows is."""
    return pl.cdiv(stages - 1, SETS) + 1


def plan_of(x: Any, values: Any) -> Plan | None:
    """How a product with e4m3 numbers [E, 2, I, D] is cut up, or None if it cannot be: a tile has units of one part."""
    parts, _, units, inputs = values.shape
    tokens = pl.next_power_of_2(tokens_of(x))
    plans = (
        Plan(parts * units // count, count, groups, inputs // (groups * LONGEST), max(tokens, _LEAST_FACTORS // groups))
        for count in tiles_of(parts * units, _compat.sm_count())
        for groups in _GROUPS
        if inputs % (groups * LONGEST) == 0 and units % (parts * units // count) == 0
    )
    return next((plan for plan in plans if _ROWS <= plan.units <= _MOST_UNITS and plan.stages >= _MIN_STAGES), None)


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why this kernel cannot do this call, or None."""
    if values.dtype != jnp.float8_e4m3fn or zeros is not None:
        return f"The product of pieces takes weights in e4m3; these are {values.dtype}."
    if x.dtype != jnp.bfloat16 or dtype != jnp.bfloat16:
        return f"The product of pieces takes and gives bf16; these are {x.dtype} and {jnp.dtype(dtype).name}."
    if (tokens := tokens_of(x)) > MAX_TOKENS:
        return f"The product of pieces takes up to {MAX_TOKENS} tokens; these are {tokens}."
    if (group := x.shape[-1] // scales.shape[-1]) != LONGEST:
        return f"The product of pieces needs groups of {LONGEST} inputs; these have {group}."
    if plan_of(x, values) is None:
        return (
            f"The product of pieces needs tiles of a multiple of {ALIGNED} and {_ROWS} to {_MOST_UNITS} units, which "
            f"divide a part of the weight; the weight is {list(values.shape)}."
        )
    return None


def slower(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the product and the activation by themselves are as fast (BENCH.md), or None; `refusal` may object."""
    if not MIN_TOKENS <= (tokens := tokens_of(x)) <= MAX_TOKENS:
        return f"It was measured faster for {MIN_TOKENS} to {MAX_TOKENS} tokens; these are {tokens}."
    plan = None if refusal(x, values, scales, zeros, dtype) else plan_of(x, values)
    if plan is not None and plan.tiles < _MIN_FILL * _compat.sm_count():
        return (
            f"It was measured faster with tiles on {_MIN_FILL:.0%} of the {_compat.sm_count()} multiprocessors; these "
            f"are {plan.tiles}."
        )
    return None


@functools.partial(jax.jit, static_argnames="dtype")
def swiglu(
    x: Float[Array, "*T D"],
    values: Float8e4m3fn[Array, "E 2 I D"],
    scales: Float[Array, "E 2 I G"],
    zeros: None,
    dtype: DTypeLike,
) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.quantized_swiglu``; tokens are exact to 2**-17 of the largest of 128 inputs."""
    if reason := refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    (parts, _, units, _), tokens, plan = values.shape, tokens_of(x), plan_of(x, values)
    assert plan is not None, "else it is refused"
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), dtype)
    operands = _compat.vary_alike(*split(x.reshape(tokens, -1), plan.tokens), values, scales)
    output = _compat.out_like((1, tokens, parts * units), dtype, operands[0])
    (out,) = _launch(plan, output, units)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    return out.reshape(*x.shape[:-1], parts * units)


def _launch(plan: Plan, output: jax.ShapeDtypeStruct, units: int) -> Any:
    """The kernel over all CTAs of a plan; a part of the weight has so many units."""

    def swiglu_pieces(first: Any, second: Any, factors: Any, values: Any, scales: Any, out: Any, **s: Any) -> None:
        tile, of_part = lax.axis_index("tile"), units // plan.units
        part, unit = lax.div(tile, of_part), lax.rem(tile, of_part) * plan.units
        me = lax.axis_index("warpgroup")
        producer_registers, consumer_registers = registers_of(plan.consumers)

        @pl.when(me == plan.consumers)
        def _() -> None:
            plgpu.set_max_registers(producer_registers, action="decrease")
            sources = [values.at[part, half, pl.ds(unit, plan.units)] for half in range(SETS)]
            lax.fori_loop(0, plan.steps, lambda k, _: _produce(k, plan, (first, second, factors), sources, s), None)

        @pl.when(me < plan.consumers)
        def _() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")
            start = jnp.minimum(me * _ROWS, plan.units - _ROWS)
            gate, up = _multiply(plan, scales.at[part], unit + start, start, s)
            gate, up = (half.astype(out.dtype).astype(jnp.float32) for half in (gate, up))
            hidden = gate / (1 + jnp.exp(-gate)) * up
            for number, begin in enumerate(plan.starts):
                kept = (number * _ROWS - begin, _ROWS)
                store = functools.partial(store_transposed, hidden, out, 0, tile * plan.units + begin, kept)
                pl.when(me == number)(store)

    tokens, depth, token_stages = plan.tokens, plan.depth, plan.token_stages
    return plgpu.kernel(
        swiglu_pieces,
        out_type=[output],
        grid=(plan.tiles,),
        grid_names=("tile",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "first_s": tiled((token_stages, tokens, depth), jnp.float8_e4m3fn),
            "second_s": tiled((token_stages, tokens, depth), jnp.float8_e4m3fn),
            "factors_s": plgpu.SMEM((token_stages, plan.groups, tokens), jnp.float32),
            "weight_s": tiled((plan.stages * plan.units, depth), jnp.float8_e4m3fn),
            "tokens_full": plgpu.Barrier(num_barriers=token_stages, num_arrivals=_COPIES),
            "full": plgpu.Barrier(num_barriers=plan.stages),
            "empty": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=plan.consumers),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _produce(k: Any, plan: Plan, of_tokens: tuple[Any, Any, Any], sources: list[Any], s: dict[str, Any]) -> None:
    """Copy a step into the rings, as slots come free."""
    inputs, token_slot = pl.ds(k * plan.depth, plan.depth), lax.rem(k, plan.token_stages)
    for number, source in enumerate(sources):
        count = k * SETS + number
        slot = lax.rem(count, plan.stages)

        @pl.when(count >= plan.stages)
        def _(slot: Any = slot) -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        target = s["weight_s"].at[pl.ds(slot * plan.units, plan.units)]
        plgpu.copy_gmem_to_smem(source.at[:, inputs], target, s["full"].at[slot])
        if number == 0:
            first, second, factors = of_tokens
            full = s["tokens_full"].at[token_slot]
            for piece, ring in ((first, "first_s"), (second, "second_s")):
                plgpu.copy_gmem_to_smem(piece.at[:, inputs], s[ring].at[token_slot], full)
            rows = pl.ds(k * plan.groups, plan.groups)
            plgpu.copy_gmem_to_smem(factors.at[rows], s["factors_s"].at[token_slot], full)


def _multiply(plan: Plan, scales: Any, row: Any, start: Any, s: dict[str, Any]) -> list[jax.Array]:
    """Sums [64, tokens] of a consumer's rows of gate and of up.

    Args:
        plan: of the product.
        scales: of a part of the weight [2, I, G].
        row: the consumer's first row in it.
        start: and in the tile.
        s: the kernel's scratch.
    """
    by_row, by_token = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))
    shape = (_ROWS, plan.tokens)

    def of_rows(k: Any) -> list[list[jax.Array]]:
        """Scales of gate and of up in each group of a step; loaded a step ahead."""
        columns, rows = [k * plan.groups + group for group in range(plan.groups)], pl.ds(row, _ROWS)
        return [[registers.load(scales.at[half, rows, column], by_row) for column in columns] for half in range(SETS)]

    def step(k: Any, carried: Any) -> Any:
        sums, ready = carried
        ahead = of_rows(jnp.minimum(k + 1, plan.steps - 1))
        token_slot = lax.rem(k, plan.token_stages)
        plgpu.barrier_wait(s["tokens_full"].at[token_slot])
        factors = [registers.load(s["factors_s"].at[token_slot, group], by_token) for group in range(plan.groups)]
        both = [s[ring].at[token_slot] for ring in ("first_s", "second_s")]
        after = []
        for half, total in enumerate(sums):
            slot = lax.rem(k * SETS + half, plan.stages)
            plgpu.barrier_wait(s["full"].at[slot])
            products = _products(plan, s["weight_s"].at[pl.ds(slot * plan.units + start, _ROWS)], both)
            plgpu.barrier_arrive(s["empty"].at[slot])
            for product, of_row, of_token in zip(products, ready[half], factors, strict=True):
                scaled = product * lax.broadcast_in_dim(of_row.astype(jnp.float32), shape, (0,))
                total += scaled * lax.broadcast_in_dim(of_token, shape, (1,))
            after.append(total)
        return after, ahead

    zeros = [plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA) for _ in range(SETS)]
    sums: list[jax.Array]
    sums, _ = lax.fori_loop(0, plan.steps, step, (zeros, of_rows(jnp.int32(0))))
    return sums


def _products(plan: Plan, rows: Any, both: list[Any]) -> list[jax.Array]:
    """The products [64, tokens] of some rows with both pieces of the tokens, of each group of a step."""

    def run(*sums: Any) -> list[jax.Array]:
        for group, piece in itertools.product(range(plan.groups), both):
            inputs = pl.ds(group * LONGEST, LONGEST)
            plgpu.wgmma(sums[group], rows.at[:, inputs], _compat.smem_transpose(piece.at[:, inputs]))
        return [total[...] for total in sums]

    totals = (plgpu.ACC((_ROWS, plan.tokens), jnp.float32) for _ in range(plan.groups))
    products: list[jax.Array] = pl.run_scoped(run, *totals)
    return products
