"""Gate and up of an MLP in one product on Hopper (see ``products``), and their hidden units at its end.

Rows of gate and of up lie side by side in a tile, so that both products of a hidden unit end up in the same thread,
which multiplies them; nothing else is written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat, products, streams
from pallas_kernels.products import ALIGNED, STEP, Plan, Tile
from pallas_kernels.shared_memory import tiled

WIDTH = STEP // 2  # what inputs must be a multiple of
MOST_OF_FEW, LEAST_OF_MANY = 256, 512  # tokens: what is between them is XLA's
UNITS = 32  # hidden units, of which results are copied in multiples
TILES = tuple(
    Tile(tokens, 2 * units, 2 * tokens * units)
    for tokens, units in ((256, 96), (256, 64), (128, 128), (128, 96), (128, 64))
)
TILES_OF_64 = tuple(
    Tile(64, 2 * units, 2 * 64 * units, consumers=1, step=step)
    for step in (2 * STEP, STEP)
    for units in (128, 96, 64, 32)
)


def refusal(x: Any, weight: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Mosaic product of gate and up takes bf16 and f16; this is {x.dtype}."
    if weight.shape[3] % WIDTH or weight.shape[2] % UNITS:
        return (
            f"The Mosaic product of gate and up needs a width that {WIDTH} divides, and parts of the hidden units that "
            f"{UNITS} divides; these are {weight.shape[3]} and {weight.shape[2]}."
        )
    return None


def is_fastest(x: Any, weight: Any) -> bool:
    """Whether this call is faster here than XLA's product and activation, by the measurements in BENCH.md.

    Tiles of few tokens must be whole: copies of rows from beyond the end are slow.
    """
    tokens = streams.tokens_of(x)
    few = streams.MOST_TOKENS < tokens <= MOST_OF_FEW and streams.is_large(weight)
    if not few and tokens < LEAST_OF_MANY:
        return False
    plan = best_plan(x, weight)
    if few and tokens % plan.tile.rows:
        return False
    return plan.fill(tokens, 2 * weight.shape[0] * weight.shape[2]) >= 0.95


def best_plan(x: Any, weight: Any) -> Plan:
    """The best of all plans for a call.

    Of 256 tokens a CTA has two smaller tiles, and ends one while the weights of the next come.
    """
    tokens = streams.tokens_of(x)
    tiles = TILES_OF_64 if tokens <= 64 else [tile for tile in TILES if tile.rows <= 128 or tokens > MOST_OF_FEW]
    return products.best(plan_of(tile, x, weight) for tile in tiles if weight.shape[3] % tile.depth(x.dtype) == 0)


def plan_of(tile: Tile, x: Any, weight: Any) -> Plan:
    """The plan of a call with such tiles."""
    parts, _, units, width = weight.shape
    pieces = parts * pl.cdiv(units, tile.columns // 2)
    return Plan(tile, pl.cdiv(x.size // width, tile.rows), pieces, width // tile.depth(x.dtype))


@functools.partial(jax.jit, static_argnames="tile")
def swiglu(
    x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"], *, tile: Tile | None = None
) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    if reason := refusal(x, weight):
        raise NotImplementedError(reason)
    parts, _, units, width = weight.shape
    tokens = streams.tokens_of(x)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), x.dtype)
    plan = best_plan(x, weight) if tile is None else plan_of(tile, x, weight)
    rows = jnp.pad(x.reshape(-1, width), ((0, -tokens % ALIGNED), (0, 0)))
    operands = _compat.vary_alike(rows, weight)

    def swiglu_kernel(*refs: Any, **scratch: Any) -> None:
        _swiglu(*refs, plan=plan, **scratch)

    own = plan.tile.rows // plan.tile.consumers
    out_s = tiled((plan.tile.consumers, own, plan.tile.columns // 2), x.dtype, row=units)
    scratch = products.ring(plan, x.dtype) | {"out_s": out_s}
    output = _compat.out_like((len(rows), parts, units), x.dtype, operands[0])
    (out,) = products.launch(swiglu_kernel, plan, [output], scratch, copies=2)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic's outputs do not say so
    return out[:tokens].reshape(*x.shape[:-1], parts * units)


def _swiglu(x: Any, weight: Any, out: Any, *, plan: Plan, **s: Any) -> None:
    """One CTA; ``s`` is its scratch."""
    units = plan.tile.columns // 2
    pieces = plan.pieces // weight.shape[0]  # of a part

    def place(piece: Any) -> tuple[Any, Any]:
        return lax.div(piece, pieces), pl.ds(lax.rem(piece, pieces) * units, units)

    def fetch(piece: Any, inputs: Any, target: Any, barrier: Any) -> None:
        part, own = place(piece)
        for half in range(2):
            source = weight.at[part, half, own, inputs]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(half * units, units)], barrier)

    def finish(gate_up: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        """Multiplies gate and up, rounded as products are, and leaves the result to TMA."""
        del i
        rounded = gate_up.astype(out.dtype)
        gate, up = (rounded[:, half * units :][:, :units].astype(jnp.float32) for half in range(2))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        s["out_s"].at[me][...] = (gate / (1 + jnp.exp(-gate)) * up).astype(out.dtype)
        plgpu.commit_smem()
        part, own = place(piece)
        mine = products.own_rows(plan.tile, me)
        tokens = pl.ds(block * plan.tile.rows + mine.start, mine.size)
        plgpu.copy_smem_to_gmem(s["out_s"].at[me], out.at[tokens, part, own])

    products.multiply(x, plan, fetch, finish, s)
