"""Gate and up of an MLP in one product on Hopper (see ``lib.products``), which ends with the hidden units.

Rows of gate and of up lie side by side in a tile, so that both products of a hidden unit end up in the same thread,
which combines them; the products are never written to memory.
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

from pallas_kernels import _compat
from pallas_kernels.lib import products
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, is_large, tokens_of, too_small
from pallas_kernels.lib.products import STEP, Plan, Tile
from pallas_kernels.lib.shared_memory import ALIGNED, tiled

WIDTH = STEP // 2  # inputs come in multiples of it: 16-bit numbers of one step
FEW_TOKENS, MANY_TOKENS = 256, 512  # up to the first and from the second on it measured faster than XLA
UNITS = 32  # results are copied in multiples of so many hidden units
MIN_FILL = 0.95  # of the card, below which XLA's product measured as fast
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


def slower(x: Any, weight: Any) -> str | None:
    """Why XLA's product and activation are measured faster (BENCH.md), or None; `refusal` may object all the same.

    Tiles of few tokens must be full, since copies of rows from beyond the end are slow.
    """
    tokens = tokens_of(x)
    few = MAX_STREAM_TOKENS < tokens <= FEW_TOKENS
    if not few and tokens < MANY_TOKENS:
        return (
            f"It was measured faster for {MAX_STREAM_TOKENS + 1} to {FEW_TOKENS} tokens and from {MANY_TOKENS} on; "
            f"these are {tokens}."
        )
    if few and not is_large(weight):
        return too_small(weight)
    if refusal(x, weight) is not None:
        return None
    plan = best_plan(x, weight)
    if few and tokens % plan.tile.rows:
        return f"Its tiles take {plan.tile.rows} tokens, of which {tokens} is no multiple."
    if (fill := plan.fill(tokens, 2 * weight.shape[0] * weight.shape[2])) < MIN_FILL:
        return f"Its tiles would use {fill:.0%} of the card, and need {MIN_FILL:.0%} to be faster."
    return None


def best_plan(x: Any, weight: Any) -> Plan:
    """The plan of lowest cost for a call.

    Up to 256 tokens a CTA gets two smaller tiles rather than one of 256 rows, and finishes one while the weights of the
    next arrive.
    """
    tokens = tokens_of(x)
    tiles = TILES_OF_64 if tokens <= 64 else [tile for tile in TILES if tile.rows <= 128 or tokens > FEW_TOKENS]
    return products.best(plan_of(tile, x, weight) for tile in tiles if weight.shape[3] % tile.depth(x.dtype) == 0)


def plan_of(tile: Tile, x: Any, weight: Any) -> Plan:
    """The plan of a call with tiles of this kind."""
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
    tokens = tokens_of(x)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), x.dtype)
    plan = best_plan(x, weight) if tile is None else plan_of(tile, x, weight)
    rows = jnp.pad(x.reshape(-1, width), ((0, -tokens % ALIGNED), (0, 0)))
    operands = _compat.vary_alike(rows, weight)

    def swiglu_kernel(*refs: Any, **scratch: Any) -> None:
        _swiglu(*refs, plan=plan, **scratch)

    consumer_rows = plan.tile.rows // plan.tile.consumers
    out_s = tiled((plan.tile.consumers, consumer_rows, plan.tile.columns // 2), x.dtype, row=units)
    scratch = products.ring(plan, x.dtype) | {"out_s": out_s}
    output = _compat.out_like((len(rows), parts, units), x.dtype, operands[0])
    (out,) = products.launch(swiglu_kernel, plan, [output], scratch, copies=2)(*operands)
    (out, *_) = _compat.vary_alike(out, *operands)  # Mosaic does not mark its outputs as varying
    return out[:tokens].reshape(*x.shape[:-1], parts * units)


def _swiglu(x: Any, weight: Any, out: Any, *, plan: Plan, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    units = plan.tile.columns // 2
    pieces = plan.pieces // weight.shape[0]  # of a part

    def place(piece: Any) -> tuple[Any, Any]:
        return lax.div(piece, pieces), pl.ds(lax.rem(piece, pieces) * units, units)

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        tokens = products.block_rows(plan.tile, block)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(x.at[tokens, inputs], x_s, barrier)
            part, rows = place(piece)
            for half in range(2):
                source = weight.at[part, half, rows, inputs]
                plgpu.copy_gmem_to_smem(source, weight_s.at[pl.ds(half * units, units)], barrier)

        return copy

    def finish(gate_up: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        """Combine gate and up, each rounded to the result's dtype, and leave the result to TMA."""
        del i
        rounded = gate_up.astype(out.dtype)
        gate, up = (rounded[:, half * units :][:, :units].astype(jnp.float32) for half in range(2))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the tile before has left ``out_s``
        s["out_s"].at[me][...] = (gate / (1 + jnp.exp(-gate)) * up).astype(out.dtype)
        plgpu.commit_smem()
        part, columns = place(piece)
        rows = products.consumer_rows(plan.tile, me)
        tokens = pl.ds(block * plan.tile.rows + rows.start, rows.size)
        plgpu.copy_smem_to_gmem(s["out_s"].at[me], out.at[tokens, part, columns])

    products.multiply(plan, fetch, finish, s)
