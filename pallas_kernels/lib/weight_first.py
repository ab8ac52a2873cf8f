"""Products of few tokens on Pallas' Mosaic GPU backend (Hopper), as a piece of kernels that go on with them.

Rows of the weight are wgmma's first operand, so tokens are padded to 8 and not to 64. Each CTA has one tile, as many
rows as give nearly every multiprocessor one: it reads them to their end, and nothing has to be summed up in memory. A
producer starts TMA copies into rings in shared memory; one consumer multiplies, since tensor cores have little to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, tokens_of, too_small
from pallas_kernels.lib.shared_memory import ALIGNED, SHARED_MEMORY, tiled

MAX_TOKENS = 64
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
_ROWS = 64  # of a wgmma
_MOST_ROWS = 256  # of a copy by TMA
_LINES = 256, 128  # bytes of a row in a step; longer runs are read faster
_MIN_STAGES = 3  # slots of the ring, and one more for another set
_THREADS = 128  # of the consumer
_MOST_SUMS = 192  # registers of a thread, of 255
_MAX_STAGES = 32  # barriers that Mosaic takes at once
_MIN_FILL = 0.9  # of the card
_LEAST_ROWS = 40  # of a tile, where Triton can: with 32, [4096, 12288] takes an H200 26.5 us where Triton takes 25.3


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a set that are multiplied together, and which of them are kept.

    Attributes:
        start: first row.
        count: rows, a multiple of 64.
        kept: those that no other block has, and that are the set's: first and end.
    """

    start: int
    count: int
    kept: tuple[int, int]


def blocks_of(rows: int) -> Iterator[Block]:
    """What a set of rows is multiplied in: whole blocks of 64, and the last 64, some of which were had before.

    A set of fewer rows is multiplied with what lies behind it.
    """
    whole = rows // _ROWS * _ROWS
    if whole:
        yield Block(0, whole, (0, whole))
    if rest := rows - whole:
        start = max(rows - _ROWS, 0)
        yield Block(start, _ROWS, (whole - start, whole - start + rest))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut up.

    Attributes:
        rows: of each set in a tile, a multiple of 8.
        sets: of rows in a tile, such as gate and up.
        tiles: of the weight; each has a CTA.
        line: bytes of a row in a step.
        depth: inputs of a step.
        steps: of a tile.
        tokens: of the call, a multiple of 8.
    """

    rows: int
    sets: int
    tiles: int
    line: int
    depth: int
    steps: int
    tokens: int

    @property
    def behind(self) -> int:
        """Rows of shared memory behind the ring that wgmma reads."""
        return max(_ROWS - self.rows, 0)

    @property
    def stages(self) -> int:
        """Slots of the weight's ring; each holds a step's rows of one set."""
        free = SHARED_MEMORY - self.behind * self.line
        fits = range(min(free // (self.rows * self.line), _MAX_STAGES), 0, -1)
        return next((n for n in fits if (n * self.rows + self._token_stages(n) * self.tokens) * self.line <= free), 0)

    @property
    def token_stages(self) -> int:
        """Slots of the ring of tokens."""
        return self._token_stages(self.stages)

    @property
    def sums(self) -> int:
        """Registers of a thread for sums."""
        return sum(block.count for block in blocks_of(self.rows)) * self.sets * self.tokens // _THREADS

    def _token_stages(self, stages: int) -> int:
        """So many that a step's slot is free once the slot of its first set is."""
        return pl.cdiv(stages - 1, self.sets) + 1


def best_plan(
    tokens: int, rows: int, width: int, dtype: DTypeLike = jnp.bfloat16, *, sets: int = 1, part: int = 0
) -> Plan | None:
    """The plan with the most tiles that run at once, or None if there is none.

    Args:
        tokens: of the call.
        rows: of the weight, of each set, which tiles divide.
        width: inputs.
        dtype: of both operands.
        sets: of rows in a tile.
        part: rows that tiles divide, too; 0 is all.
    """
    size = jnp.dtype(dtype).itemsize
    tokens = -(-tokens // ALIGNED) * ALIGNED
    counts = tiles_of(rows, _compat.sm_count())
    plans = (
        Plan(rows // count, sets, count, line, line // size, width * size // line, tokens)
        for count in counts
        for line in _LINES
        if width * size % line == 0 and rows // count <= _MOST_ROWS and (part or rows) % (rows // count) == 0
    )
    fits = (plan for plan in plans if plan.stages >= _MIN_STAGES + sets - 1 and plan.sums <= _MOST_SUMS)
    return next(fits, None)


def tiles_of(rows: int, most: int) -> Iterator[int]:
    """How many tiles rows may have, the most first."""
    return (count for count in range(most, 0, -1) if rows % (count * ALIGNED) == 0)


def refusal(x: Any, weight: Any, plan: Plan | None) -> str | None:
    """Why these kernels cannot multiply x by a weight, or None."""
    if x.dtype not in _DTYPES:
        return f"The product with the weight first takes bf16, f16 and e4m3; this is {x.dtype}."
    if tokens_of(x) > MAX_TOKENS:
        return f"The product with the weight first is for up to {MAX_TOKENS} tokens; these are {tokens_of(x)}."
    if plan is None:
        inputs = _LINES[-1] // jnp.dtype(x.dtype).itemsize
        return (
            f"The product with the weight first needs a width that {inputs} divides, and tiles of a multiple of "
            f"{ALIGNED} and at most {_MOST_ROWS} rows, whose sums registers hold; the weight is {list(weight.shape)}, "
            f"and {tokens_of(x)} tokens are multiplied."
        )
    return None


def slower(x: Any, weight: Any, plan: Plan | None) -> str | None:
    """Why other products are measured faster (product/BENCH.md), or None; `refusal` may object all the same."""
    if not 0 < tokens_of(x) <= MAX_TOKENS:
        return f"It was measured faster for 1 to {MAX_TOKENS} tokens; these are {tokens_of(x)}."
    if sentence := too_small(weight):
        return sentence
    has_triton = tokens_of(x) <= MAX_STREAM_TOKENS and x.dtype != jnp.float8_e4m3fn
    least = _LEAST_ROWS if has_triton else ALIGNED
    if plan is not None and (plan.tiles < _MIN_FILL * _compat.sm_count() or plan.rows < least):
        return (
            f"It was measured faster with tiles of at least {least} rows on {_MIN_FILL:.0%} of the "
            f"{_compat.sm_count()} multiprocessors; these are {plan.tiles} of {plan.rows}."
        )
    return None


def padded(x: jax.Array, plan: Plan) -> jax.Array:
    """The rows of x, in whole tiles of shared memory if there are several; TMA fills up a single one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if len(rows) <= ALIGNED else jnp.pad(rows, ((0, plan.tokens - len(rows)), (0, 0)))


def launch(
    kernel: Callable[..., None], plan: Plan, outputs: list[jax.ShapeDtypeStruct], dtype: Any, others: int = 0
) -> Callable[..., list[jax.Array]]:
    """A kernel over all CTAs of a plan.

    Args:
      kernel: takes references to operands and outputs, and scratch by name, and calls ``multiply``; profilers show its
        name.
      plan: of the product.
      outputs: shapes and dtypes.
      dtype: of the operands.
      others: CTAs behind those of the plan.
    """
    launched: Callable[..., list[jax.Array]] = plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(plan.tiles + others,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "x_s": tiled((plan.token_stages, plan.tokens, plan.depth), dtype),
            "weight_s": tiled((plan.stages * plan.rows + plan.behind, plan.depth), dtype),
            "x_full": plgpu.Barrier(num_barriers=plan.token_stages),
            "full": plgpu.Barrier(num_barriers=plan.stages),
            "empty": plgpu.Barrier(num_barriers=plan.stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return launched


def multiply(plan: Plan, x: Any, sources: list[Any], finish: Callable[..., None], s: dict[str, Any]) -> None:
    """The body of one CTA.

    Args:
      plan: of the product.
      x: reference to the tokens [T, D].
      sources: references to the CTA's rows of the weight, [rows, D] of each set; at most as many as the plan's.
      finish: takes a block, and its float32 sums [count, tokens] of each set.
      s: the kernel's scratch.
    """
    me = lax.axis_index("warpgroup")

    @pl.when(me == 1)
    def _() -> None:
        lax.fori_loop(0, plan.steps, lambda k, nothing: _produce(k, plan, x, sources, s), None)

    @pl.when(me == 0)
    def _() -> None:
        blocks = list(blocks_of(sources[0].shape[0]))
        sums = _consume(plan, blocks, s)
        for number, block in enumerate(blocks):
            finish(block, *sums[number * plan.sets :][: plan.sets])


def _produce(k: Any, plan: Plan, x: Any, sources: list[Any], s: dict[str, Any]) -> None:
    """Copy a step into the rings, as slots come free."""
    inputs, slot_of_tokens = pl.ds(k * plan.depth, plan.depth), lax.rem(k, plan.token_stages)
    for number, source in enumerate(sources):
        count = k * plan.sets + number
        slot = lax.rem(count, plan.stages)

        @pl.when(count >= plan.stages)
        def _(slot: Any = slot) -> None:
            plgpu.barrier_wait(s["empty"].at[slot])

        target = s["weight_s"].at[pl.ds(slot * plan.rows, source.shape[0])]
        plgpu.copy_gmem_to_smem(source.at[:, inputs], target, s["full"].at[slot])
        if number == 0:
            tokens = x.at[pl.ds(jnp.int32(0), plan.tokens), inputs]
            plgpu.copy_gmem_to_smem(tokens, s["x_s"].at[slot_of_tokens], s["x_full"].at[slot_of_tokens])


def _consume(plan: Plan, blocks: list[Block], s: dict[str, Any]) -> list[jax.Array]:
    """The sums of each set of each block.

    A slot is given back once the next slot's wgmmas have been issued. Behind the last ones the first wait is for all
    (`lib.products`).
    """
    last = plan.steps - 1

    def run(*sums: Any) -> list[jax.Array]:
        def start(k: Any, number: int) -> None:
            count = k * plan.sets + number
            slot, slot_of_tokens = lax.rem(count, plan.stages), lax.rem(k, plan.token_stages)
            if number == 0:
                plgpu.barrier_wait(s["x_full"].at[slot_of_tokens])
            plgpu.barrier_wait(s["full"].at[slot])
            for block, total in zip(blocks, sums[number :: plan.sets], strict=True):
                rows = s["weight_s"].at[pl.ds(slot * plan.rows + block.start, block.count)]
                plgpu.wgmma(total, rows, _compat.smem_transpose(s["x_s"].at[slot_of_tokens]))

        def give_back_before(count: Any) -> None:
            """Give back the slot before a count, whose wgmmas may be running."""
            plgpu.wgmma_wait(len(blocks))
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(s["empty"].at[lax.rem(count - 1, plan.stages)]))

        def step(k: Any, nothing: None) -> None:
            for number in range(plan.sets):
                start(k, number)
                give_back_before(k * plan.sets + number)

        lax.fori_loop(0, last, step, None)
        for number in range(plan.sets):
            start(last, number)
        return [total[...] for total in sums]

    totals = [plgpu.ACC((block.count, plan.tokens), jnp.float32) for block in blocks for _ in range(plan.sets)]
    products: list[jax.Array] = pl.run_scoped(run, *totals)
    return products
