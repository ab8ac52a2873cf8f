"""The product of 17 to 256 tokens on Hopper (see ``lib.products``), with tiles so narrow that each CTA gets one.

So the weight streams through once, and nothing has to be summed up in memory. Up to 64 tokens one consumer has all rows
of x, which are few bytes beside its rows of the weight. More rows are not few: there two CTAs share a tile of twice as
many columns, and each of them multiplies half of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat
from pallas_kernels.lib import products
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, tokens_of, too_small
from pallas_kernels.lib.products import STEP, Plan, Tile
from pallas_kernels.lib.shared_memory import ALIGNED, tiled

RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
FEW_INPUTS = 4096  # up to this width up to MAX_TOKENS measured faster than XLA, beyond it up to MAX_TOKENS_WIDE
MAX_TOKENS = 256
MAX_TOKENS_WIDE = 128
COLUMNS = 16  # a CTA finishes a multiple of them, so that it copies a multiple of 32 bytes of each row
MAX_COLUMNS = 256  # of a tile: the limit of TMA and wgmma
MIN_FILL = 0.9  # of the card, below which XLA's product measured as fast


def refusal(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call with results of that dtype, or None."""
    if x.dtype not in DTYPES:
        return f"The Mosaic product takes bf16, f16 and e4m3; this is {x.dtype}."
    if dtype not in RESULTS:
        return f"The Mosaic product gives bf16, f16 and f32; {jnp.dtype(dtype)} is asked for."
    depth = STEP // x.dtype.itemsize
    if weight.shape[1] % depth or len(weight) % COLUMNS:
        return (
            f"The Mosaic product of {x.dtype} needs a width that {depth} divides, and rows that {COLUMNS} divides; "
            f"these are {weight.shape[1]} and {len(weight)}."
        )
    return None


def slower(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why XLA's product is measured faster (BENCH.md), or None; `refusal` may object all the same.

    XLA splits the inputs and sums the parts in another kernel, which weighs more the fewer tokens there are. Tiles must
    be full, since copies of rows from beyond the end are slow.
    """
    tokens, limit = tokens_of(x), MAX_TOKENS_WIDE if weight.shape[1] > FEW_INPUTS else MAX_TOKENS
    if not MAX_STREAM_TOKENS < tokens <= limit:
        return f"It was measured faster for {MAX_STREAM_TOKENS + 1} to {limit} tokens; these are {tokens}."
    if sentence := too_small(weight):
        return sentence
    if refusal(x, weight, dtype) is not None:
        return None
    plan = best_plan(x, weight, dtype)
    if not plan.is_one_round:
        return f"Its {plan.count} tiles would take the {_compat.sm_count()} multiprocessors more than one round."
    if plan.tile.stages < 3:
        return f"Its ring would hold {plan.tile.stages} steps, and needs 3 to be faster."
    if tokens % plan.tile.rows:
        return f"Its tiles take {plan.tile.rows} tokens, of which {tokens} is no multiple."
    if (fill := plan.fill(tokens, len(weight))) < MIN_FILL:
        return f"Its tiles would use {fill:.0%} of the card, and need {MIN_FILL:.0%} to be faster."
    return None


def best_plan(x: Any, weight: Any, dtype: Any) -> Plan:
    """The plan of lowest cost for a call with results of that dtype."""
    return products.best(plan_of(tile, x, weight) for tile in tiles(x, weight, dtype))


def plan_of(tile: Tile, x: Any, weight: Any) -> Plan:
    """The plan of a call with tiles of this kind."""
    blocks, pieces = pl.cdiv(tokens_of(x), tile.rows), pl.cdiv(len(weight), tile.columns)
    return Plan(tile, blocks, pieces, weight.shape[1] // tile.splits // tile.depth(x.dtype))


def tiles(x: Any, weight: Any, dtype: Any) -> Iterator[Tile]:
    """Tiles that a call may have; of two with the same cost the better comes first."""
    tokens = tokens_of(x)
    if tokens <= 64:
        shapes = [(64, 1, 2 * STEP, 1), (64, 1, STEP, 1)]
    else:
        shapes = [(128, 2, STEP, 2)] * (tokens <= 128) + [(128, 2, STEP, 1)]
    for rows, consumers, step, splits in shapes:
        for width in range(COLUMNS, MAX_COLUMNS // splits + 1, COLUMNS):
            tile = Tile(rows, width * splits, jnp.dtype(dtype).itemsize * rows * width, consumers, step, splits)
            divides = weight.shape[1] % (splits * tile.depth(x.dtype)) == 0
            if divides and (splits == 1 or plan_of(tile, x, weight).is_one_round):
                yield tile


@functools.partial(jax.jit, static_argnames=("dtype", "tile"))
def product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None, *, tile: Tile | None = None
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``."""
    tokens, dtype = tokens_of(x), dtype or x.dtype
    if reason := refusal(x, weight, dtype):
        raise NotImplementedError(reason)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], len(weight)), dtype)
    plan = best_plan(x, weight, dtype) if tile is None else plan_of(tile, x, weight)
    rows = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % ALIGNED), (0, 0)))
    operands = _compat.vary_alike(rows, weight)

    def product_kernel(*refs: Any, **scratch: Any) -> None:
        _product(*refs, plan=plan, **scratch)

    shape = (plan.tile.consumers, plan.tile.rows // plan.tile.consumers, plan.tile.width)
    scratch = products.ring(plan, x.dtype) | {"out_s": tiled(shape, dtype)}
    output = _compat.out_like((len(rows), len(weight)), dtype, operands[0])
    (out,) = products.launch(product_kernel, plan, [output], scratch, copies=1)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    return out[:tokens].reshape(*x.shape[:-1], len(weight))


def _product(x: Any, weight: Any, out: Any, *, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    columns = plan.tile.columns

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        rows = products.block_rows(plan.tile, block)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], x_s, barrier)
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(piece * columns, columns), inputs], weight_s, barrier)

        return copy

    def finish(values: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        del i
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the tile before has left ``out_s``
        s["out_s"].at[me][...] = values.astype(out.dtype)
        plgpu.commit_smem()
        rows = products.consumer_rows(plan.tile, me)
        tokens = pl.ds(block * plan.tile.rows + rows.start, rows.size)
        plgpu.copy_smem_to_gmem(s["out_s"].at[me], out.at[tokens, products.finished_columns(plan, piece)])

    products.multiply(plan, fetch, finish, s)
