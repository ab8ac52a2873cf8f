"""Addition and norm on Pallas' Triton backend: one program a token, which holds the whole row in registers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import _compat

_WIDEST = 1 << 16  # elements of a row: 128 registers of each of 512 threads


def refusal(x: jax.Array) -> str | None:
    """Why the Triton kernel cannot add to and norm such rows, or None."""
    width = x.shape[-1]
    if width > _WIDEST:
        return f"The Triton norm holds a row in registers, so its width must be at most {_WIDEST}; this is {width}."
    return None


def default_warps(width: int) -> int:
    """Warps of the program of a row: 16 elements a thread, as far as 1 to 16 warps go."""
    return min(max(pl.next_power_of_2(width) // 512, 1), 16)


@functools.partial(jax.jit, static_argnames=("eps", "interpret", "num_warps"))
def add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    eps: float,
    y_scales: tuple[Float[Array, "*T"], Float[Array, " D"]] | None = None,
    *,
    interpret: bool = False,
    num_warps: int | None = None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """See ``pallas_kernels.add_norm``."""
    if reason := refusal(x):
        raise NotImplementedError(reason)
    total = jnp.promote_types(x.dtype, y.dtype)
    normed = jnp.promote_types(total, weight.dtype)
    if x.size == 0:
        return x.astype(total), x.astype(normed)
    D = x.shape[-1]
    scales = () if y_scales is None else (y_scales[0].reshape(-1), y_scales[1])
    operands = _compat.vary_alike(x.reshape(-1, D), y.reshape(-1, D), weight, *scales)
    rows = operands[0]
    outputs = _compat.triton_call(
        functools.partial(_add_norm, eps=eps),
        grid=(len(rows),),
        out_shape=[_compat.out_like(rows.shape, dtype, rows) for dtype in (total, normed)],
        num_warps=num_warps or default_warps(D),
        num_stages=1,
        interpret=interpret,
        name="add_norm",
    )(*operands)
    return outputs[0].reshape(x.shape), outputs[1].reshape(x.shape)


def _add_norm(x: Any, y: Any, weight: Any, *others: Any, eps: float) -> None:
    """One program: one row, as wide as the next power of two; what stands beyond the row's end counts as zero."""
    *y_scales, total, normed = others
    row, D = pl.program_id(0), x.shape[1]
    column = jnp.arange(pl.next_power_of_2(D), dtype=jnp.int32)
    token = jnp.full_like(column, row)
    real = None if len(column) == D else column < D

    def load(ref: Any) -> jax.Array:
        other = None if real is None else 0.0
        return pltriton.load(ref, mask=real, other=other).astype(jnp.float32)

    scale = load(weight.at[column])
    added = load(y.at[token, column])
    if y_scales:
        of_tokens, of_columns = y_scales
        added = (added * of_tokens[row] * load(of_columns.at[column])).astype(y.dtype).astype(jnp.float32)
    rounded = (load(x.at[token, column]) + added).astype(total.dtype)
    pltriton.store(total.at[token, column], rounded, mask=real)
    wide = rounded.astype(jnp.float32)
    unit = (wide * jax.lax.rsqrt(jnp.sum(wide * wide) / D + eps)).astype(total.dtype)
    pltriton.store(normed.at[token, column], (scale * unit.astype(jnp.float32)).astype(normed.dtype), mask=real)
