"""The routed experts on Hopper (see ``lib.products``): tiles of all experts' products, one after the other on each CTA.

Tokens are the rows of a tile, rows of one expert's weight its columns. It is for many tokens: for few, tiles with all
tokens as rows of each touched expert took 2 to 17 % longer than the Triton kernels (BENCH.md), and are gone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts import mosaic_rows
from pallas_kernels.experts.mosaic_rows import Grouped
from pallas_kernels.experts.shared import Shared, output
from pallas_kernels.experts.sort import MOST_ROWS
from pallas_kernels.lib import gather, products
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.products import STEP, Plan, Tile
from pallas_kernels.lib.shared_memory import tiled

WIDTH = STEP // 2  # inputs and outputs come in multiples of it: 16-bit numbers of one step
ROWS = 64  # of a consumer: those of a wgmma
PAIRS_AN_EXPERT = 64  # from so many on it was measured: 1 to 2 % faster than Triton (H100), from 128 on 12 to 16 %


class Config(NamedTuple):
    """How a call is cut up: tiles of both products."""

    gate_up: Tile
    down: Tile


def refusal(x: Any, gate_up: Any, down: Any, chosen: Any, shared: Any = None) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    del down, shared
    _, _, M, D = gate_up.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Mosaic experts take bf16 and f16; these are {x.dtype}."
    if M % WIDTH or D % WIDTH:
        return f"The Mosaic experts need widths that {WIDTH} divides; these are {D} (of tokens) and {M} (of experts)."
    return None


def slower(x: Any, gate_up: Any, down: Any, chosen: Any, shared: Any = None) -> str | None:
    """Why the Triton kernels are measured faster (BENCH.md), or None; `refusal` may object all the same."""
    del x, down, shared
    mean = chosen.size // gate_up.shape[0]
    if mean < PAIRS_AN_EXPERT:
        return f"It was measured faster from {PAIRS_AN_EXPERT} pairs an expert on; these are {mean}."
    return None


def default_config(width: int, inputs: int) -> Config:
    """The tiles of a call.

    Args:
      width: M, of an expert.
      inputs: D, of a token.
    """
    units = next(n for n in (128, 64) if width % n == 0)
    columns = next(n for n in (256, 192, 128, 64) if inputs % n == 0)
    return Config(gate_up_tile(units), down_tile(columns))


def gate_up_tile(units: int) -> Tile:
    """A tile of the first product, with so many hidden units."""
    return Tile(MOST_ROWS, 2 * units, 2 * MOST_ROWS * units, consumers=MOST_ROWS // ROWS)


def down_tile(columns: int) -> Tile:
    """A tile of the second product."""
    return Tile(MOST_ROWS, columns, 2 * MOST_ROWS * columns, consumers=MOST_ROWS // ROWS)


@functools.partial(jax.jit, static_argnames="config")
def experts(
    x: Float[Array, "*T D"],
    gate_up: Float[Array, "X 2 M D"],
    down: Float[Array, "X D M"],
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    shared: Shared | None = None,
    *,
    config: Config | None = None,
) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.experts``; it sums over a token's experts in the order in which they stand in ``chosen``."""
    if reason := refusal(x, gate_up, down, chosen):
        raise NotImplementedError(reason)
    (X, _, M, D), k, tokens = gate_up.shape, chosen.shape[-1], tokens_of(x)
    if tokens * k == 0:
        return jnp.zeros_like(x)
    config = config or default_config(M, D)
    operands = (x.reshape(-1, D), gate_up, down, chosen.reshape(-1, k), weights.reshape(-1, k))
    x_rows, gate_up, down, chosen, scales = _compat.vary_alike(*operands)
    grouped = mosaic_rows.group(chosen, X)
    hidden = gate_up_product(x_rows, grouped, gate_up, config.gate_up)
    parts = down_product(hidden, grouped, down, config.down)
    total = mosaic_rows.summed(parts, grouped.place, chosen, scales, X).reshape(x.shape)
    return (total if shared is None else total + output(x, shared, kernels=True)).astype(x.dtype)


def gate_up_product(
    x: Float[Array, "T D"], grouped: Grouped, weight: Float[Array, "X 2 M D"], tile: Tile
) -> Float[Array, "R M"]:
    """Hidden units of the rows of all blocks."""
    _, _, M, D = weight.shape
    units = tile.columns // 2
    plan = Plan(tile, len(grouped.expert), pl.cdiv(M, units), D // tile.depth(x.dtype))

    def experts_gate_up_kernel(*refs: Any, **scratch: Any) -> None:
        _gate_up(*refs, plan=plan, **scratch)

    scratch = products.ring(plan, x.dtype) | {"out_s": tiled((tile.consumers, ROWS, units), x.dtype, row=M)}
    output = _compat.out_like((len(grouped.token), M), x.dtype, x)
    operands = x, weight, grouped.token, grouped.expert, grouped.rows, grouped.band, grouped.length, grouped.used
    (hidden,) = products.launch(experts_gate_up_kernel, plan, [output], scratch, copies=2)(*operands)
    (hidden, *_) = _compat.vary_alike(hidden, *operands)  # Mosaic does not mark its outputs as varying
    return hidden


def down_product(
    hidden: Float[Array, "R M"], grouped: Grouped, weight: Float[Array, "X D M"], tile: Tile
) -> Float[Array, "R D"]:
    """Outputs of the rows of all blocks, not weighted yet."""
    _, D, M = weight.shape
    dtype = hidden.dtype
    plan = Plan(tile, len(grouped.expert), pl.cdiv(D, tile.columns), M // tile.depth(dtype))

    def experts_down_kernel(*refs: Any, **scratch: Any) -> None:
        _down(*refs, plan=plan, **scratch)

    scratch = products.ring(plan, dtype) | {"out_s": tiled((tile.consumers, ROWS, tile.columns), dtype, row=D)}
    output = _compat.out_like((len(hidden), D), dtype, hidden)
    operands = hidden, weight, grouped.expert, grouped.rows, grouped.band, grouped.length, grouped.used
    (parts,) = products.launch(experts_down_kernel, plan, [output], scratch, copies=1)(*operands)
    (parts, *_) = _compat.vary_alike(parts, *operands)
    return parts


def _gate_up(
    x: Any,
    weight: Any,
    token_of: Any,
    expert_of: Any,
    rows_of: Any,
    band: Any,
    length: Any,
    count: Any,
    hidden: Any,
    *,
    plan: Plan,
    **s: Any,
) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    units = plan.tile.columns // 2

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        expert = expert_of[block]

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            del x_s
            for half in range(2):
                source = weight.at[expert, half, pl.ds(piece * units, units), inputs]
                plgpu.copy_gmem_to_smem(source, weight_s.at[pl.ds(half * units, units)], barrier)

        return copy

    def gather_of(block: Any) -> products.Gather:
        rows = gather.rows(token_of, block * MOST_ROWS, rows_of[block], MOST_ROWS)
        return lambda column, x_s: gather.start(x, rows, x_s, column)

    def finish(gate_up: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        """Combine gate and up, each rounded to the result's dtype, and leave the result to TMA."""
        del i
        rounded = gate_up.astype(hidden.dtype)
        gate, up = (rounded[:, half * units :][:, :units].astype(jnp.float32) for half in range(2))
        _write((gate / (1 + jnp.exp(-gate)) * up).astype(hidden.dtype), hidden, (block, piece, me), s)

    place = functools.partial(_place, plan, band, length)
    products.multiply(plan, fetch, finish, s, count[0] * plan.tile.rows, place=place, gather_of=gather_of)


def _down(
    hidden: Any,
    weight: Any,
    expert_of: Any,
    rows_of: Any,
    band: Any,
    length: Any,
    count: Any,
    parts: Any,
    *,
    plan: Plan,
    **s: Any,
) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    columns = plan.tile.columns

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        expert, tokens = expert_of[block], pl.ds(block * MOST_ROWS, MOST_ROWS)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(hidden.at[tokens, inputs], x_s, barrier)
            plgpu.copy_gmem_to_smem(weight.at[expert, pl.ds(piece * columns, columns), inputs], weight_s, barrier)

        return copy

    def finish(values: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        del i
        _write(values.astype(parts.dtype), parts, (block, piece, me), s)

    place = functools.partial(_place, plan, band, length)
    products.multiply(plan, fetch, finish, s, count[0] * plan.tile.rows, lambda block: rows_of[block], place)


def _place(plan: Plan, band_of: Any, length_of: Any, i: Any, blocks: Any) -> tuple[Any, Any]:
    """Block and piece of tile i: all pieces with one band of an expert's blocks, then all pieces with the next band.

    Tiles that read the same weights come right after each other: gate_up takes 2 % less time than with bands across
    experts (35B and 122B, H200), down up to 3 %. Tile i is of the band of block i // pieces.
    """
    near = lax.div(i, jnp.int32(plan.pieces))
    begin, length = band_of[near], length_of[near]
    rest = i - begin * plan.pieces
    return begin + lax.rem(rest, length), lax.div(rest, length)


def _write(values: jax.Array, out: Any, at: tuple[Any, Any, Any], s: dict[str, Any]) -> None:
    """Leave a consumer's values of a tile to TMA."""
    block, piece, me = at
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the tile before has left ``out_s``
    s["out_s"].at[me][...] = values
    plgpu.commit_smem()
    columns = values.shape[1]
    target = out.at[pl.ds(block * MOST_ROWS + me * ROWS, ROWS), pl.ds(piece * columns, columns)]
    plgpu.copy_smem_to_gmem(s["out_s"].at[me], target)
