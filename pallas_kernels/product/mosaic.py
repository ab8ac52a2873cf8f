"""The product of some tokens on Hopper (see ``products``): tiles as narrow as it takes to give each CTA one.

So the weight streams through once, and nothing has to be summed up in memory. Up to 64 tokens are a consumer's, and few
bytes beside its rows of the weight. More are not: there two CTAs share twice as many rows, and each half of the inputs.
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

from pallas_kernels import _compat, products, streams
from pallas_kernels.products import ALIGNED, STEP, Plan, Tile
from pallas_kernels.shared_memory import tiled

RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)
FEW_INPUTS = 4096
MOST_TOKENS = 256  # of few inputs
MOST_OF_MANY_INPUTS = 128  # tokens
COLUMNS = 16  # a CTA finishes multiples of them: what is copied of a row is a multiple of 32 bytes
MOST_COLUMNS = 256  # of a tile, as TMA and wgmma take them


def refusal(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, with results of that dtype, or None."""
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


def is_fastest(x: Any, weight: Any, dtype: Any) -> bool:
    """Whether this call is faster here than XLA's product, by the measurements in BENCH.md.

    XLA's splits the inputs and sums the parts in a kernel of its own, which weighs the more the fewer there are. Tiles
    must be whole: copies of rows from beyond the end are slow.
    """
    tokens, most = streams.tokens_of(x), MOST_OF_MANY_INPUTS if weight.shape[1] > FEW_INPUTS else MOST_TOKENS
    if not streams.MOST_TOKENS < tokens <= most or not streams.is_large(weight):
        return False
    plan = best_plan(x, weight, dtype)
    is_measured = plan.is_one_round and plan.tile.stages > 2
    return is_measured and tokens % plan.tile.rows == 0 and plan.fill(tokens, len(weight)) >= 0.9


def best_plan(x: Any, weight: Any, dtype: Any) -> Plan:
    """The best of all plans for a call with results of that dtype."""
    return products.best(plan_of(tile, x, weight) for tile in tiles(x, weight, dtype))


def plan_of(tile: Tile, x: Any, weight: Any) -> Plan:
    """The plan of a call with such tiles."""
    blocks, pieces = pl.cdiv(streams.tokens_of(x), tile.rows), pl.cdiv(len(weight), tile.columns)
    return Plan(tile, blocks, pieces, weight.shape[1] // tile.splits // tile.depth(x.dtype))


def tiles(x: Any, weight: Any, dtype: Any) -> Iterator[Tile]:
    """Tiles that a call may have, the better of two that are alike first."""
    tokens = streams.tokens_of(x)
    if tokens <= 64:
        shapes = [(64, 1, 2 * STEP, 1), (64, 1, STEP, 1)]
    else:
        shapes = [(128, 2, STEP, 2)] * (tokens <= 128) + [(128, 2, STEP, 1)]
    for rows, consumers, step, splits in shapes:
        for width in range(COLUMNS, MOST_COLUMNS // splits + 1, COLUMNS):
            tile = Tile(rows, width * splits, jnp.dtype(dtype).itemsize * rows * width, consumers, step, splits)
            is_whole = weight.shape[1] % (splits * tile.depth(x.dtype)) == 0
            if is_whole and (splits == 1 or plan_of(tile, x, weight).is_one_round):
                yield tile


@functools.partial(jax.jit, static_argnames=("dtype", "tile"))
def product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None, *, tile: Tile | None = None
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``."""
    tokens, dtype = streams.tokens_of(x), dtype or x.dtype
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
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic's outputs do not say so
    return out[:tokens].reshape(*x.shape[:-1], len(weight))


def _product(x: Any, weight: Any, out: Any, *, plan: Plan, **s: Any) -> None:
    """One CTA; ``s`` is its scratch."""
    columns = plan.tile.columns

    def fetch(piece: Any, inputs: Any, target: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(weight.at[pl.ds(piece * columns, columns), inputs], target, barrier)

    def finish(found: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        del i
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        s["out_s"].at[me][...] = found.astype(out.dtype)
        plgpu.commit_smem()
        mine = products.own_rows(plan.tile, me)
        tokens = pl.ds(block * plan.tile.rows + mine.start, mine.size)
        plgpu.copy_smem_to_gmem(s["out_s"].at[me], out.at[tokens, products.own_columns(plan, piece)])

    products.multiply(x, plan, fetch, finish, s)
