"""Products of more than a few rows on Pallas' Mosaic GPU backend (Hopper), as a piece of kernels that go on with them.

As many CTAs as there are multiprocessors go from tile to tile of ``x @ weight.T``. The warpgroups of a CTA:

* one producer starts TMA copies of rows of x and of the weight into a ring in shared memory, tile after tile;
* one or two consumers multiply their part of the rows of x by wgmma, and hand the float32 products to ``finish`` (of
  integers of 8 bits those of 32, which are exact).

If the inputs are split, each CTA of a cluster multiplies one part of them for the same tile. Each CTA finishes a part
of the columns, and the others send it their sums of these columns through shared memory.

TMA copies zeros from beyond the ends of x and of the weight, and drops writes beyond the end of a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.lib import gather
from pallas_kernels.lib.shared_memory import SHARED_MEMORY, WIDEST, tiled

STEP = WIDEST  # bytes of a row that a step reads (or a multiple)
BAND = 8  # blocks of rows that CTAs work on together, so that the weight that they read at a time stays in L2
LATE = 2  # steps that may be on their way when the producer waits for rows that it gathers
Copy = Callable[[Any, Any, Any, Any], None]
Gather = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The part of a product that a CTA computes at a time.

    Attributes:
        rows: of x.
        columns: of the product, that is rows of the weight.
        extra_bytes: of shared memory that the kernel needs beside the ring.
        consumers: warpgroups that multiply.
        step: bytes of a row that a step of the ring reads.
        splits: CTAs of a cluster; each multiplies a part of the inputs, and finishes a part of the columns.
    """

    rows: int
    columns: int
    extra_bytes: int
    consumers: int = 2
    step: int = STEP
    splits: int = 1

    @property
    def stages(self) -> int:
        """Steps that the ring holds."""
        return (SHARED_MEMORY - self.extra_bytes - self._parts_bytes) // ((self.rows + self.columns) * self.step)

    @property
    def _parts_bytes(self) -> int:
        """Bytes of shared memory for the sums that the other CTAs of the cluster send."""
        return 4 * self.rows * self.columns * (self.splits - 1) // self.splits

    @property
    def width(self) -> int:
        """Columns that a CTA finishes."""
        return self.columns // self.splits

    def depth(self, dtype: Any) -> int:
        """Inputs that a step reads of each row."""
        return self.step // jnp.dtype(dtype).itemsize

    @property
    def traffic(self) -> int:
        """Bytes that ``STEP`` bytes of a row move to and from shared memory, whose speed limits wgmma at these sizes.

        A wgmma reads its 64 rows and all columns.
        """
        return (self.rows + self.columns + self.rows // 64 * (64 + self.columns)) * STEP


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut up.

    Attributes:
        tile: what a CTA computes at a time.
        blocks: tiles along the rows of x.
        pieces: tiles along the rows of the weight.
        steps: of the ring, along the inputs of a CTA.
    """

    tile: Tile
    blocks: int
    pieces: int
    steps: int

    @property
    def count(self) -> int:
        """The number of tiles."""
        return self.blocks * self.pieces

    @property
    def _resident(self) -> int:
        """Tiles that are resident on the card at once."""
        return _compat.sm_count() // self.tile.splits

    @property
    def clusters(self) -> int:
        """Clusters that the kernel is launched with; a cluster is one CTA unless inputs are split."""
        return min(self._resident, self.count)

    @property
    def is_one_round(self) -> bool:
        """Whether no CTA has more than one tile."""
        return self.clusters == self.count

    @property
    def cost(self) -> int:
        """Shared-memory bytes that the busiest CTA moves."""
        return pl.cdiv(self.count, self.clusters) * self.tile.traffic * self.steps * self.tile.step // STEP

    def fill(self, rows: int, columns: int) -> float:
        """The useful share of the numbers that all resident tiles compute, over all rounds of them."""
        computed = pl.cdiv(self.count, self._resident) * self._resident * self.tile.rows * self.tile.columns
        return rows * columns / computed

    def place(self, i: Any, blocks: Any) -> tuple[Any, Any]:
        """Block and piece of tile i: all pieces with one band of blocks, then all pieces with the next band.

        Args:
            i: number of the tile, traced.
            blocks: that are computed, at most ``self.blocks``.
        """
        band, rest = lax.div(i, BAND * self.pieces), lax.rem(i, BAND * self.pieces)
        blocks = jnp.minimum(BAND, blocks - band * BAND)
        return band * BAND + lax.rem(rest, blocks), lax.div(rest, blocks)


def best(plans: Iterable[Plan]) -> Plan:
    """The plan with the lowest cost; the first of several."""
    return min(plans, key=lambda plan: plan.cost)


def block_rows(tile: Tile, block: Any) -> Any:
    """The rows of a block."""
    return pl.ds(block * tile.rows, tile.rows)


def consumer_rows(tile: Tile, me: Any) -> Any:
    """The rows of a tile that consumer ``me`` multiplies."""
    count = tile.rows // tile.consumers
    return pl.ds(me * count, count)


def finished_columns(plan: Plan, piece: Any) -> Any:
    """The columns of the product that this CTA finishes in a piece."""
    start = piece * plan.tile.columns
    if plan.tile.splits > 1:
        start += lax.axis_index("member") * plan.tile.width
    return pl.ds(start, plan.tile.width)


def launch(
    kernel: Callable[..., None], plan: Plan, outputs: list[jax.ShapeDtypeStruct], scratch: dict[str, Any], copies: int
) -> Callable[..., Any]:
    """A kernel over all CTAs of a plan.

    Args:
      kernel: takes references to operands and outputs, and scratch by name, and calls ``multiply``; profilers show its
        name.
      plan: of the product.
      outputs: shapes and dtypes.
      scratch: the ring, and what the kernel needs beside it.
      copies: TMA copies that fetch a step's part of the weight.
    """
    tile = plan.tile
    cluster: dict[str, Any] = {}
    if tile.splits > 1:
        assert plan.is_one_round, "the other CTAs' sums have one buffer, which is filled once"
        cluster = {"cluster": (tile.splits,), "cluster_names": ("member",)}
    return plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(plan.clusters,),
        grid_names=("cta",),
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch
        | {
            "full": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=1 + copies),
            "empty": plgpu.Barrier(num_barriers=tile.stages, num_arrivals=tile.consumers),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **cluster,
    )


def ring(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Scratch of the ring, and of the sums that the other CTAs of a cluster send."""
    tile = plan.tile
    depth = tile.depth(dtype)
    scratch: dict[str, Any] = {"x_s": tiled((tile.stages, tile.rows, depth), dtype)}
    scratch["weight_s"] = tiled((tile.stages, tile.columns, depth), dtype)
    if (others := tile.splits - 1) > 0:
        scratch["parts_s"] = tiled((tile.consumers, others, tile.rows // tile.consumers, tile.width), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=tile.consumers * others)
    return scratch


def multiply(
    plan: Plan,
    fetch: Callable[[Any, Any, Any], Copy],
    finish: Callable[..., None],
    s: dict[str, Any],
    length: Any = None,
    rows_of: Callable[[Any], Any] | None = None,
    place: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    gather_of: Callable[[Any], Gather] | None = None,
) -> None:
    """The body of one CTA.

    Args:
      plan: of the product.
      fetch: what the producer does at the start of a tile; takes the number of tiles that the CTA has done, the block
        and the piece, and returns what starts the copies of a step: it takes the slice of the inputs, the targets for
        rows of x and of the weight in shared memory, and the barrier.
      finish: what a consumer does with its products; takes the products, the number of tiles that the CTA has done, the
        block, the piece and the number of the consumer.
      s: the kernel's scratch.
      length: only the first ``length`` rows are needed; None is all.
      rows_of: takes a block, and returns how many of its first rows are needed; None is all. A consumer whose rows are
        not needed leaves the tensor cores to the other one.
      place: block and piece of a tile, from its number and the number of blocks; None is ``plan.place``.
      gather_of: takes a block, and returns what starts to gather a step's rows of x (``lib.gather``), which ``fetch``
        leaves alone then: it takes the first of the inputs and the target in shared memory.
    """
    assert gather_of is None or plan.tile.stages >= LATE + 2, "the ring would wait for rows that wait for the ring"
    place = place or plan.place
    cta, me, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), plan.tile.consumers
    blocks = plan.blocks if length is None else lax.div(length + plan.tile.rows - 1, plan.tile.rows)
    count = pl.cdiv(blocks * plan.pieces - cta, plan.clusters)

    @pl.when(me == consumers)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def produce(i: Any, nothing: None) -> None:
            block, piece = place(cta + i * plan.clusters, blocks)
            _produce(i * plan.steps, plan, fetch(i, block, piece), s, gather_of and gather_of(block))

        lax.fori_loop(0, count, produce, None)
        if gather_of:
            _gathered_last(count * plan.steps, plan, s)

    @pl.when(me < consumers)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def consume(i: Any, nothing: None) -> None:
            block, piece = place(cta + i * plan.clusters, blocks)
            if rows_of is None:
                return finish(_consume(i * plan.steps, me, plan, s), i, block, piece, me)
            is_needed = me * (plan.tile.rows // consumers) < rows_of(block)

            @pl.when(is_needed)
            def _() -> None:
                finish(_consume(i * plan.steps, me, plan, s), i, block, piece, me)

            @pl.when(jnp.logical_not(is_needed))
            def _() -> None:
                _skip(i * plan.steps, plan, s)

        lax.fori_loop(0, count, consume, None)
        plgpu.wait_smem_to_gmem(0)


def _produce(first: Any, plan: Plan, copy: Copy, s: dict[str, Any], start_gather: Gather | None = None) -> None:
    """Copy the steps of a tile into the ring, as slots come free.

    Rows that are gathered are waited for two steps later, so that this step's and the next are on their way meanwhile.
    """
    depth = s["x_s"].shape[-1]
    start = lax.axis_index("member") * plan.steps if plan.tile.splits > 1 else 0

    def step(k: Any, nothing: None) -> None:
        slot, inputs = lax.rem(first + k, plan.tile.stages), pl.ds((start + k) * depth, depth)

        @pl.when(first + k >= plan.tile.stages)
        def _():
            plgpu.barrier_wait(s["empty"].at[slot])

        copy(inputs, s["x_s"].at[slot], s["weight_s"].at[slot], s["full"].at[slot])
        if start_gather:
            start_gather(inputs.start, s["x_s"].at[slot])
            gather.commit()

            @pl.when(first + k >= LATE)
            def _():
                gather.arrived(LATE)
                plgpu.barrier_arrive(s["full"].at[lax.rem(first + k - LATE, plan.tile.stages)])

    lax.fori_loop(0, plan.steps, step, None)


def _gathered_last(steps: Any, plan: Plan, s: dict[str, Any]) -> None:
    """Wait for the rows that are gathered last."""
    gather.arrived(0)
    for back in range(LATE, 0, -1):

        @pl.when(steps >= back)
        def _(back: int = back) -> None:
            plgpu.barrier_arrive(s["full"].at[lax.rem(steps - back, plan.tile.stages)])


def _skip(first: Any, plan: Plan, s: dict[str, Any]) -> None:
    """Give back the slots of a tile's steps unread."""

    def step(k: Any, nothing: None) -> None:
        slot = lax.rem(first + k, plan.tile.stages)
        plgpu.barrier_wait(s["full"].at[slot])
        plgpu.barrier_arrive(s["empty"].at[slot])

    lax.fori_loop(0, plan.steps, step, None)


def _consume(first: Any, me: Any, plan: Plan, s: dict[str, Any]) -> jax.Array:
    """The products of a consumer's rows of a tile; if inputs are split, of the columns that its CTA finishes.

    A slot is given back once the next wgmma has been issued, so that the tensor cores never wait for the arrival.
    Behind the last wgmma the first wait is for all: ptxas 13 moves conversions of the sums up to the first wait that it
    sees. Where that one was for all but the last, hidden units in float16 came out wrong by half.
    """
    rows, stages, last = consumer_rows(plan.tile, me), plan.tile.stages, plan.steps - 1

    def give_back(k: Any) -> None:
        plgpu.barrier_arrive(s["empty"].at[lax.rem(first + k, stages)])

    def run(products: Any) -> jax.Array:
        def start(k: Any) -> None:
            slot = lax.rem(first + k, stages)
            plgpu.barrier_wait(s["full"].at[slot])
            plgpu.wgmma(products, s["x_s"].at[slot, rows], _compat.smem_transpose(s["weight_s"].at[slot]))

        def step(k: Any, nothing: None) -> None:
            start(k)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: give_back(k - 1))

        lax.fori_loop(0, last, step, None)
        start(last)
        return products[...]

    dtype = jnp.int32 if s["x_s"].dtype == jnp.int8 else jnp.float32
    products = pl.run_scoped(run, plgpu.ACC((rows.size, plan.tile.columns), dtype))
    if last:
        give_back(last - 1)
    give_back(last)
    return _summed(products, me, plan.tile, s) if plan.tile.splits > 1 else products


def _summed(products: jax.Array, me: Any, tile: Tile, s: dict[str, Any]) -> jax.Array:
    """Sum all CTAs' products of the columns that this CTA finishes, after sending the other CTAs theirs."""
    member = lax.axis_index("member")
    parts = [products[:, peer * tile.width :][:, : tile.width] for peer in range(tile.splits)]
    for peer, part in enumerate(parts):
        sender = jnp.where(member < peer, member, member - 1)  # our number among the CTAs that send to this peer

        @pl.when(member != peer)
        def _(peer: int = peer, part: jax.Array = part, sender: Any = sender) -> None:
            plgpu.async_store_smem(
                part, s["parts_s"].at[me, sender], s["arrived"], cluster_idx=jnp.int32(peer), cluster_dim="member"
            )

    ours = parts[0]
    for peer, part in enumerate(parts[1:], 1):
        ours = jnp.where(lax.broadcast_in_dim(member == peer, ours.shape, ()), part, ours)
    plgpu.barrier_wait(s["arrived"])
    others = [_compat.smem_load(s["parts_s"].at[me, i], plgpu.Layout.WGMMA) for i in range(tile.splits - 1)]
    return sum(others, ours)
