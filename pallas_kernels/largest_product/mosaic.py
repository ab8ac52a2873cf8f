"""The largest product on Hopper (see ``lib.products``): the kernel gives each tile's argmax of a row, XLA the row's."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.largest_product.reference import largest
from pallas_kernels.lib import products
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.products import Plan, Tile
from pallas_kernels.lib.shared_memory import ALIGNED

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8)
FEW = Tile(64, 192, extra_bytes=8 * (64 + 192), consumers=1, step=2 * products.STEP)  # the 64 rows of one wgmma
TILES = tuple(
    Tile(rows, columns, extra_bytes=8 * (rows + columns))
    for rows, columns in ((256, 192), (256, 128), (128, 256), (128, 192))
)
MIN_STEPS = 8  # of ``products.STEP`` bytes: more than any ring holds, which ``fetch`` relies on
MIN_ROWS = 256  # of the weight: the widest tile
PART = 64  # columns that are searched at a time
MEASURED_ROWS = 16384  # of the weight: smaller ones were not measured


def refusal(x: Any, weight: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    if x.dtype not in DTYPES:
        return f"The Mosaic largest product takes bf16, f16, e4m3 and int8; this is {x.dtype}."
    depth = products.STEP // jnp.dtype(x.dtype).itemsize
    if weight.shape[1] % depth or weight.shape[1] < MIN_STEPS * depth:
        return (
            f"The Mosaic largest product of {x.dtype} needs a width that {depth} divides, of at least "
            f"{MIN_STEPS * depth}; this is {weight.shape[1]}."
        )
    if len(weight) % ALIGNED or len(weight) < MIN_ROWS:
        return (
            f"The Mosaic largest product needs a number of rows that {ALIGNED} divides, of at least {MIN_ROWS}; "
            f"this is {len(weight)}."
        )
    return None


def slower(x: Any, weight: Any) -> str | None:
    """Why XLA's product and argmax are measured faster (BENCH.md), or None."""
    tokens = tokens_of(x)
    if x.dtype != jnp.float8_e4m3fn and tokens != FEW.rows and tokens < 128:
        return f"It was measured faster for 64 tokens and for 128 or more, or in e4m3; these are {tokens} of {x.dtype}."
    if len(weight) < MEASURED_ROWS:
        return f"It was measured for heads of at least {MEASURED_ROWS} rows; this one has {len(weight)}."
    return None


def best_plan(x: Any, weight: Any) -> Plan:
    """The plan of lowest cost for a call."""
    is_few = x.size // x.shape[-1] <= FEW.rows and x.shape[-1] % FEW.depth(x.dtype) == 0
    return products.best(plan_of(tile, x, weight) for tile in ((FEW,) if is_few else TILES))


def plan_of(tile: Tile, x: Any, weight: Any) -> Plan:
    """The plan of a call with tiles of this kind."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    return Plan(tile, pl.cdiv(rows, tile.rows), pl.cdiv(len(weight), tile.columns), width // tile.depth(x.dtype))


@functools.partial(jax.jit, static_argnames="tile")
def largest_product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    scales: Float[Array, " V"] | None = None,
    length: Int[Array, ""] | None = None,
    limit: int | Int[Array, ""] | None = None,
    *,
    tile: Tile | None = None,
) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
    """See ``pallas_kernels.largest_product``; x and the weight may also be int8, whose products are exact."""
    if reason := refusal(x, weight):
        raise NotImplementedError(reason)
    tokens = math.prod(x.shape[:-1])
    if tokens == 0:
        return jnp.zeros(x.shape[:-1], jnp.int32), jnp.zeros(x.shape[:-1], jnp.float32)
    plan = best_plan(x, weight) if tile is None else plan_of(tile, x, weight)
    # A lone block is padded here: TMA is slow where it has to fill rows from beyond the end of x.
    multiple = plan.tile.rows if plan.blocks == 1 else ALIGNED
    rows = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % multiple), (0, 0)))
    numbers = {"length": length, "limit": limit}
    optional = {"scales": scales}
    optional |= {k: None if n is None else jnp.asarray(n, jnp.int32).reshape(1) for k, n in numbers.items()}
    present = {name: array for name, array in optional.items() if array is not None}
    operands = _compat.vary_alike(rows, weight, *present.values())

    def largest_product_kernel(x: Any, weight: Any, *refs: Any, **scratch: Any) -> None:
        *others, value, index = refs
        _largest(x, weight, value, index, plan=plan, **dict(zip(present, others, strict=True)), **scratch)

    shape = (plan.tile.consumers, plan.tile.rows // plan.tile.consumers)
    scratch = products.ring(plan, x.dtype)
    scratch |= {"value_s": plgpu.SMEM(shape, jnp.float32), "index_s": plgpu.SMEM(shape, jnp.int32)}
    if scales is not None:
        scratch |= {"scales_s": plgpu.SMEM((2, plan.tile.columns), jnp.float32)}
        scratch |= {"scales_full": plgpu.Barrier(num_barriers=2)}
    outputs = [
        _compat.out_like((plan.pieces, plan.blocks * plan.tile.rows), d, operands[0]) for d in (jnp.float32, jnp.int32)
    ]
    results = products.launch(largest_product_kernel, plan, outputs, scratch, copies=1)(*operands)
    values, indices, *_ = _compat.vary_alike(*results, *operands)  # Mosaic does not mark its outputs as varying
    piece, value = largest(values[:, :tokens].T)
    index = jnp.take_along_axis(indices[:, :tokens], piece[None], axis=0)[0]
    return index.reshape(x.shape[:-1]), value.reshape(x.shape[:-1])


def _largest(
    x: Any,
    weight: Any,
    value: Any,
    index: Any,
    *,
    plan: Plan,
    scales: Any = None,
    length: Any = None,
    limit: Any = None,
    **s: Any,
) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    columns, (V, _) = plan.tile.columns, weight.shape

    def first_of(piece: Any) -> Any:
        """First row of a piece; the last piece overlaps the one before, since TMA brings zeros from beyond the end."""
        return jnp.minimum(piece * columns, V - columns)

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        """Copy the scales of a tile into one of two slots, and say how to copy the rest.

        The slot is free: when the producer starts tile i, the consumers have given back the first slots of the ring for
        tile i - 1, since a tile has more steps than the ring, and so are done with tile i - 2.
        """
        if scales is not None:
            slot = lax.rem(i, 2)
            source = scales.at[pl.ds(first_of(piece), columns)]
            plgpu.copy_gmem_to_smem(source, s["scales_s"].at[slot], s["scales_full"].at[slot])

        rows = products.block_rows(plan.tile, block)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], x_s, barrier)
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(first_of(piece), columns), inputs], weight_s, barrier)

        return copy

    def finish(values: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        """Write the largest product of each row, and the first column that has it.

        It searches ``PART`` columns at a time, so that the column numbers of one part serve all parts of all tiles, and
        stay in registers.
        """
        if scales is not None:
            plgpu.barrier_wait(s["scales_full"].at[lax.rem(i, 2)])
        column = plgpu.broadcasted_iota(jnp.int32, (len(values), PART), 1, layout=plgpu.Layout.WGMMA)
        parts = []
        for start in range(0, columns, PART):
            part = values[:, start : start + PART].astype(jnp.float32)
            if scales is not None:
                part_scales = s["scales_s"].at[lax.rem(i, 2), pl.ds(start, PART)]
                of_columns = _compat.smem_load(part_scales, plgpu.Layout.WGMMA.reduce(0))
                part = part * lax.broadcast_in_dim(of_columns, part.shape, [1])
            if limit is not None:
                part = jnp.where(column < limit[0] - first_of(piece) - start, part, -jnp.inf)
            parts.append(part)
        highest = functools.reduce(jnp.maximum, [part.max(axis=1) for part in parts])
        firsts = []
        for k, part in enumerate(parts):
            is_lower = part < lax.broadcast_in_dim(highest, part.shape, [0])
            firsts.append(jnp.where(is_lower, V, column).min(axis=1) + k * PART)
        first = functools.reduce(jnp.minimum, firsts) + first_of(piece)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the tile before has left
        s["value_s"].at[me][...] = highest
        s["index_s"].at[me][...] = first
        plgpu.commit_smem()
        mine = products.consumer_rows(plan.tile, me)
        rows = pl.ds(block * plan.tile.rows + mine.start, mine.size)
        for name, out in (("value_s", value), ("index_s", index)):
            plgpu.copy_smem_to_gmem(s[name].at[me], out.at[piece, rows])

    products.multiply(plan, fetch, finish, s, None if length is None else length[0])
