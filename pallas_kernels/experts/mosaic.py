"""The routed experts on Hopper (see ``lib.products``): tiles of all experts' products, one after the other on each CTA.

Tokens are the rows of a tile, rows of one expert's weight its columns. Few tokens fill a part of the 64 rows of a
wgmma, and the rest is computed of what lies there, and dropped: the tensor cores have time, since weights come slowly.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.experts import mosaic_rows
from pallas_kernels.experts.mosaic_rows import MOST_FEW_PAIRS, Grouped
from pallas_kernels.experts.sort import MOST_ROWS, rows_of
from pallas_kernels.lib import products
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.products import STEP, Plan, Tile
from pallas_kernels.lib.shared_memory import tiled

WIDTH = STEP // 2  # inputs and outputs come in multiples of it: 16-bit numbers of one step
MOST_FEW = 32  # tokens of which each block has all; results that nobody needs are a few hundredths of the bytes
ROWS = 64  # of a consumer: those of a wgmma


class Config(NamedTuple):
    """How a call is cut up: tiles of both products."""

    gate_up: Tile
    down: Tile


def refusal(x: Any, gate_up: Any, down: Any, chosen: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    del down
    X, _, M, D = gate_up.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The Mosaic experts take bf16 and f16; these are {x.dtype}."
    if M % WIDTH or D % WIDTH:
        return f"The Mosaic experts need widths that {WIDTH} divides; these are {D} (of tokens) and {M} (of experts)."
    tokens = tokens_of(x)
    if not is_few(tokens, chosen.size) and rows_of(chosen.size, X, 1) < MOST_ROWS:
        return (
            f"The Mosaic experts take up to {MOST_FEW} tokens and {MOST_FEW_PAIRS} pairs, or more than "
            f"{MOST_ROWS // 2} pairs an expert; these are {tokens} tokens, {chosen.size} pairs and {X} experts."
        )
    return None


def slower(x: Any, gate_up: Any, down: Any, chosen: Any) -> str | None:
    """Why the Triton kernels are preferred."""
    del x, gate_up, down, chosen
    return "It was not measured yet."


def is_few(tokens: int, pairs: int) -> bool:
    """Whether all tokens are rows of each block."""
    return tokens <= MOST_FEW and pairs <= MOST_FEW_PAIRS


def default_config(tokens: int, k: int, width: int, inputs: int) -> Config:
    """The tiles of a call.

    Args:
      tokens: T.
      k: experts of each token.
      width: M, of an expert.
      inputs: D, of a token.
    """
    if is_few(tokens, tokens * k):
        steps = [2 * STEP if size % (2 * WIDTH) == 0 else STEP for size in (inputs, width)]
        return Config(gate_up_tile(ROWS, 32, steps[0]), down_tile(ROWS, 64, 4, steps[1]))
    units = next(n for n in (128, 64) if width % n == 0)
    columns = next(n for n in (256, 192, 128, 64) if inputs % n == 0)
    return Config(gate_up_tile(MOST_ROWS, units), down_tile(MOST_ROWS, columns, 2))


def gate_up_tile(rows: int, units: int, step: int = STEP) -> Tile:
    """A tile of the first product, with so many hidden units."""
    return Tile(rows, 2 * units, 2 * rows * units, consumers=rows // ROWS, step=step)


def down_tile(rows: int, columns: int, itemsize: int, step: int = STEP) -> Tile:
    """A tile of the second product; ``itemsize`` bytes are a result's."""
    return Tile(rows, columns, itemsize * rows * columns, consumers=rows // ROWS, step=step)


@functools.partial(jax.jit, static_argnames="config")
def experts(
    x: Float[Array, "*T D"],
    gate_up: Float[Array, "X 2 M D"],
    down: Float[Array, "X D M"],
    chosen: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    *,
    config: Config | None = None,
) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.experts``; it sums over a token's experts in the order in which they stand in ``chosen``."""
    if reason := refusal(x, gate_up, down, chosen):
        raise NotImplementedError(reason)
    (X, _, M, D), k, tokens = gate_up.shape, chosen.shape[-1], tokens_of(x)
    if tokens * k == 0:
        return jnp.zeros_like(x)
    config = config or default_config(tokens, k, M, D)
    operands = (x.reshape(-1, D), gate_up, down, chosen.reshape(-1, k), weights.reshape(-1, k))
    x_rows, gate_up, down, chosen, scales = _compat.vary_alike(*operands)
    few = is_few(tokens, tokens * k)
    grouped = (mosaic_rows.few if few else mosaic_rows.many)(x_rows, chosen, X)
    hidden = gate_up_product(grouped, gate_up, config.gate_up, is_shared=few)
    parts = down_product(hidden, grouped, down, config.down, jnp.float32 if few else x.dtype)
    return mosaic_rows.summed(parts, grouped.place, chosen, scales, X).astype(x.dtype).reshape(x.shape)


def gate_up_product(
    grouped: Grouped, weight: Float[Array, "X 2 M D"], tile: Tile, *, is_shared: bool
) -> Float[Array, "R M"]:
    """Hidden units of the rows of all blocks; ``is_shared`` says that all blocks have all rows of x."""
    _, _, M, D = weight.shape
    x, blocks = grouped.x, len(grouped.expert)
    rows, units = len(x) if is_shared else len(x) // blocks, tile.columns // 2
    plan = Plan(tile, blocks, pl.cdiv(M, units), D // tile.depth(x.dtype))

    def experts_gate_up_kernel(*refs: Any, **scratch: Any) -> None:
        _gate_up(*refs, plan=plan, rows=rows, is_shared=is_shared, **scratch)

    scratch = products.ring(plan, x.dtype) | {"out_s": tiled((tile.consumers, ROWS, units), x.dtype, row=M)}
    output = _compat.out_like((blocks * rows, M), x.dtype, x)
    operands = x, weight, grouped.expert, grouped.used
    (hidden,) = products.launch(experts_gate_up_kernel, plan, [output], scratch, copies=2)(*operands)
    (hidden, *_) = _compat.vary_alike(hidden, *operands)  # Mosaic does not mark its outputs as varying
    return hidden


def down_product(
    hidden: Float[Array, "R M"], grouped: Grouped, weight: Float[Array, "X D M"], tile: Tile, dtype: Any
) -> Float[Array, "R D"]:
    """Outputs of the rows of all blocks, not weighted yet."""
    _, D, M = weight.shape
    blocks = len(grouped.expert)
    plan = Plan(tile, blocks, pl.cdiv(D, tile.columns), M // tile.depth(hidden.dtype))

    def experts_down_kernel(*refs: Any, **scratch: Any) -> None:
        _down(*refs, plan=plan, rows=len(hidden) // blocks, **scratch)

    scratch = products.ring(plan, hidden.dtype) | {"out_s": tiled((tile.consumers, ROWS, tile.columns), dtype, row=D)}
    output = _compat.out_like((len(hidden), D), dtype, hidden)
    operands = hidden, weight, grouped.expert, grouped.used
    (parts,) = products.launch(experts_down_kernel, plan, [output], scratch, copies=1)(*operands)
    (parts, *_) = _compat.vary_alike(parts, *operands)
    return parts


def _gate_up(
    x: Any, weight: Any, expert_of: Any, count: Any, hidden: Any, *, plan: Plan, rows: int, is_shared: bool, **s: Any
) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    units = plan.tile.columns // 2

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        expert, tokens = _expert(expert_of, block, weight), pl.ds(0 if is_shared else block * rows, rows)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(x.at[tokens, inputs], x_s.at[pl.ds(0, rows)], barrier)
            for half in range(2):
                source = weight.at[expert, half, pl.ds(piece * units, units), inputs]
                plgpu.copy_gmem_to_smem(source, weight_s.at[pl.ds(half * units, units)], barrier)

        return copy

    def finish(gate_up: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        """Combine gate and up, each rounded to the result's dtype, and leave the result to TMA."""
        del i
        rounded = gate_up.astype(hidden.dtype)
        gate, up = (rounded[:, half * units :][:, :units].astype(jnp.float32) for half in range(2))
        _write((gate / (1 + jnp.exp(-gate)) * up).astype(hidden.dtype), hidden, (block, piece, me), rows, s)

    products.multiply(plan, fetch, finish, s, count[0] * plan.tile.rows)


def _down(hidden: Any, weight: Any, expert_of: Any, count: Any, parts: Any, *, plan: Plan, rows: int, **s: Any) -> None:
    """The body of one CTA; ``s`` is its scratch."""
    columns = plan.tile.columns

    def fetch(i: Any, block: Any, piece: Any) -> products.Copy:
        del i
        expert, tokens = _expert(expert_of, block, weight), pl.ds(block * rows, rows)

        def copy(inputs: Any, x_s: Any, weight_s: Any, barrier: Any) -> None:
            plgpu.copy_gmem_to_smem(hidden.at[tokens, inputs], x_s.at[pl.ds(0, rows)], barrier)
            plgpu.copy_gmem_to_smem(weight.at[expert, pl.ds(piece * columns, columns), inputs], weight_s, barrier)

        return copy

    def finish(values: jax.Array, i: Any, block: Any, piece: Any, me: Any) -> None:
        del i
        _write(values.astype(parts.dtype), parts, (block, piece, me), rows, s)

    products.multiply(plan, fetch, finish, s, count[0] * plan.tile.rows)


def _expert(expert_of: Any, block: Any, weight: Any) -> Any:
    """A block's expert; any if its number is out of range."""
    return jnp.clip(expert_of[block], 0, weight.shape[0] - 1)


def _write(values: jax.Array, out: Any, at: tuple[Any, Any, Any], rows: int, s: dict[str, Any]) -> None:
    """Leave a consumer's values of a tile to TMA; of few rows those that exist."""
    block, piece, me = at
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the tile before has left ``out_s``
    s["out_s"].at[me][...] = values
    plgpu.commit_smem()
    kept, columns = min(rows, ROWS), values.shape[1]
    target = out.at[pl.ds(block * rows + me * ROWS, kept), pl.ds(piece * columns, columns)]
    plgpu.copy_smem_to_gmem(s["out_s"].at[me, pl.ds(0, kept)], target)
