"""Products of more than a few rows on Hopper, on Pallas' Mosaic GPU backend, for kernels that go on with them there.

As many CTAs as there are multiprocessors go from tile to tile of ``x @ weight.T``. Warpgroups:

* one producer starts TMA copies of rows of x and of the weight into a ring in shared memory, tile after tile;
* one or two consumers multiply their part of the rows of x by wgmma, and then ``finish`` it, in float32.

Where the inputs are split, the CTAs of a cluster take a part of them each, for one tile, and send each other their sums
of the columns that the other has, through shared memory.

Copies from beyond the ends of x and of the weight bring zeros; what is copied to beyond the end of a result is dropped.
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
from pallas_kernels.shared_memory import tiled

STEP = 128  # bytes of a row that a step reads, or a multiple: as wide as TMA swizzles
ALIGNED = 8  # rows, of which arrays that are copied hold multiples
BAND = 8  # blocks of rows that are taken together, so that what CTAs read at a time stays in L2
_SHARED_MEMORY = 225 * 1024  # bytes of a CTA, less 2 KiB for barriers and alignment


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a CTA computes at a time: rows of x by rows of the weight, ``columns``, and the bytes it needs for more.

    Each CTA of a cluster of ``splits`` multiplies a part of the inputs, and finishes a part of the columns.
    """

    rows: int
    columns: int
    more: int
    consumers: int = 2
    step: int = STEP
    splits: int = 1

    @property
    def stages(self) -> int:
        """Steps that the ring holds."""
        return (_SHARED_MEMORY - self.more - self._parts) // ((self.rows + self.columns) * self.step)

    @property
    def _parts(self) -> int:
        """Bytes of the others' sums."""
        return 4 * self.rows * self.columns * (self.splits - 1) // self.splits

    @property
    def width(self) -> int:
        """Columns that a CTA finishes."""
        return self.columns // self.splits

    def depth(self, dtype: Any) -> int:
        """Inputs of a step."""
        return self.step // jnp.dtype(dtype).itemsize

    @property
    def traffic(self) -> int:
        """Bytes that ``STEP`` moves to shared memory and from it, whose speed binds wgmma with tiles of this size.

        A wgmma reads its 64 rows and all columns.
        """
        return (self.rows + self.columns + self.rows // 64 * (64 + self.columns)) * STEP


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is cut: ``blocks`` of rows of x by ``pieces`` of the weight, and ``steps`` along a CTA's inputs."""

    tile: Tile
    blocks: int
    pieces: int
    steps: int

    @property
    def count(self) -> int:
        """Of all tiles."""
        return self.blocks * self.pieces

    @property
    def _most(self) -> int:
        """Tiles that the card takes at a time."""
        return _compat.sm_count() // self.tile.splits

    @property
    def clusters(self) -> int:
        """That the kernel is launched with, of a CTA each where inputs are not split."""
        return min(self._most, self.count)

    @property
    def is_one_round(self) -> bool:
        """Whether no CTA has more than one tile."""
        return self.clusters == self.count

    @property
    def cost(self) -> int:
        """Bytes by which the CTA with most tiles is busy."""
        return pl.cdiv(self.count, self.clusters) * self.tile.traffic * self.steps * self.tile.step // STEP

    def fill(self, rows: int, columns: int) -> float:
        """The part of what the card could compute meanwhile that is asked for."""
        room = pl.cdiv(self.count, self._most) * self._most * self.tile.rows * self.tile.columns
        return rows * columns / room

    def place(self, i: Any, blocks: Any) -> tuple[Any, Any]:
        """Block and piece of tile i of so many blocks: through all pieces with a band of them, then with the next."""
        band, rest = lax.div(i, BAND * self.pieces), lax.rem(i, BAND * self.pieces)
        blocks = jnp.minimum(BAND, blocks - band * BAND)
        return band * BAND + lax.rem(rest, blocks), lax.div(rest, blocks)


def best(plans: Iterable[Plan]) -> Plan:
    """The plan that keeps the busiest CTA least busy; the first of several."""
    return min(plans, key=lambda plan: plan.cost)


def own_rows(tile: Tile, me: Any) -> Any:
    """The rows of a tile that are a consumer's."""
    each = tile.rows // tile.consumers
    return pl.ds(me * each, each)


def own_columns(plan: Plan, piece: Any) -> Any:
    """The columns of a piece that a CTA finishes."""
    start = piece * plan.tile.columns
    if plan.tile.splits > 1:
        start += lax.axis_index("member") * plan.tile.width
    return pl.ds(start, plan.tile.width)


def launch(
    kernel: Callable[..., None], plan: Plan, outputs: list[jax.ShapeDtypeStruct], scratch: dict[str, Any], copies: int
) -> Callable[..., Any]:
    """The kernel over all CTAs: it is given operands, outputs and, by name, scratch, and calls ``multiply``.

    Args:
      kernel: by whose name profilers know it.
      plan: of the product.
      outputs: shapes and dtypes.
      scratch: what it wants beside the ring.
      copies: that bring a step's part of the weight.
    """
    tile = plan.tile
    cluster: dict[str, Any] = {}
    if tile.splits > 1:
        assert plan.is_one_round, "the others' sums have one place, which is never given back"
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
    """The scratch of the ring, and of the others' sums."""
    tile = plan.tile
    depth = tile.depth(dtype)
    scratch: dict[str, Any] = {"x_s": tiled((tile.stages, tile.rows, depth), dtype)}
    scratch["weight_s"] = tiled((tile.stages, tile.columns, depth), dtype)
    if (others := tile.splits - 1) > 0:
        scratch["parts_s"] = tiled((tile.consumers, others, tile.rows // tile.consumers, tile.width), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=tile.consumers * others)
    return scratch


def multiply(
    x: Any,
    plan: Plan,
    fetch: Callable[[Any, Any, Any, Any], None],
    finish: Callable[..., None],
    s: dict[str, Any],
    enter: Callable[[Any, Any], None] = lambda i, piece: None,
    length: Any = None,
) -> None:
    """One CTA.

    Args:
      x: the rows.
      plan: of the product.
      fetch: starts the copies of a piece of the weight, given the piece, the inputs of a step, where to, the barrier.
      finish: what a consumer does with its products, given these, how many tiles the CTA had before, the block and the
        piece, and which consumer it is.
      s: the kernel's scratch.
      enter: what the producer does at the start of a tile, given how many the CTA had before and the piece.
      length: rows that are wanted, the first so many; None is all.
    """
    cta, me, consumers = lax.axis_index("cta"), lax.axis_index("warpgroup"), plan.tile.consumers
    blocks = plan.blocks if length is None else lax.div(length + plan.tile.rows - 1, plan.tile.rows)
    count = pl.cdiv(blocks * plan.pieces - cta, plan.clusters)

    @pl.when(me == consumers)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def produce(i: Any, nothing: None) -> None:
            block, piece = plan.place(cta + i * plan.clusters, blocks)
            enter(i, piece)
            rows = pl.ds(block * plan.tile.rows, plan.tile.rows)
            _produce(x, rows, i * plan.steps, plan, lambda *where: fetch(piece, *where), s)

        lax.fori_loop(0, count, produce, None)

    @pl.when(me < consumers)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def consume(i: Any, nothing: None) -> None:
            products = _consume(i * plan.steps, me, plan, s)
            finish(products, i, *plan.place(cta + i * plan.clusters, blocks), me)

        lax.fori_loop(0, count, consume, None)
        plgpu.wait_smem_to_gmem(0)


def _produce(x: Any, rows: Any, first: Any, plan: Plan, fetch: Callable[..., None], s: dict[str, Any]) -> None:
    """The steps of a tile into the ring, as slots come free."""
    depth = s["x_s"].shape[-1]
    start = lax.axis_index("member") * plan.steps if plan.tile.splits > 1 else 0

    def step(k: Any, nothing: None) -> None:
        slot, inputs = lax.rem(first + k, plan.tile.stages), pl.ds((start + k) * depth, depth)

        @pl.when(first + k >= plan.tile.stages)
        def _():
            plgpu.barrier_wait(s["empty"].at[slot])

        plgpu.copy_gmem_to_smem(x.at[rows, inputs], s["x_s"].at[slot], s["full"].at[slot])
        fetch(inputs, s["weight_s"].at[slot], s["full"].at[slot])

    lax.fori_loop(0, plan.steps, step, None)


def _consume(first: Any, me: Any, plan: Plan, s: dict[str, Any]) -> jax.Array:
    """The products of a consumer's rows of a tile, where inputs are split of its CTA's columns.

    A slot is given back when the product after its own has begun, so that the tensor cores never wait for that.
    """
    mine, stages = own_rows(plan.tile, me), plan.tile.stages

    def run(products: Any) -> jax.Array:
        def step(k: Any, nothing: None) -> None:
            slot = lax.rem(first + k, stages)
            plgpu.barrier_wait(s["full"].at[slot])
            plgpu.wgmma(products, s["x_s"].at[slot, mine], _compat.smem_transpose(s["weight_s"].at[slot]))
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(s["empty"].at[lax.rem(first + k - 1, stages)])

        lax.fori_loop(0, plan.steps, step, None)
        return products[...]

    products = pl.run_scoped(run, plgpu.ACC((mine.size, plan.tile.columns), jnp.float32))
    plgpu.barrier_arrive(s["empty"].at[lax.rem(first + plan.steps - 1, stages)])
    return _summed(products, me, plan.tile, s) if plan.tile.splits > 1 else products


def _summed(products: jax.Array, me: Any, tile: Tile, s: dict[str, Any]) -> jax.Array:
    """What all CTAs of a cluster have of this one's columns; the others are sent theirs."""
    member = lax.axis_index("member")
    parts = [products[:, peer * tile.width :][:, : tile.width] for peer in range(tile.splits)]
    for peer, part in enumerate(parts):
        place = jnp.where(member < peer, member, member - 1)  # among those who send something to this peer

        @pl.when(member != peer)
        def _(peer: int = peer, part: jax.Array = part, place: Any = place) -> None:
            plgpu.async_store_smem(
                part, s["parts_s"].at[me, place], s["arrived"], cluster_idx=jnp.int32(peer), cluster_dim="member"
            )

    own = parts[0]
    for peer, part in enumerate(parts[1:], 1):
        own = jnp.where(lax.broadcast_in_dim(member == peer, own.shape, ()), part, own)
    plgpu.barrier_wait(s["arrived"])
    others = [_compat.smem_load(s["parts_s"].at[me, i], plgpu.Layout.WGMMA) for i in range(tile.splits - 1)]
    return sum(others, own)
