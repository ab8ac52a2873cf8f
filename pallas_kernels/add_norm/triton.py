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
from pallas_kernels.lib.norm import weighted
from pallas_kernels.quantize.reference import E4M3
from pallas_kernels.quantize.triton import quantized

_MAX_WIDTH = 1 << 16  # numbers of a row: 128 registers of each of 512 threads


def refusal(x: Any) -> str | None:
    """Why the Triton kernel cannot add to and norm rows of this width, or None."""
    width = x.shape[-1]
    if width > _MAX_WIDTH:
        return f"The Triton norm holds a row in registers, so its width must be at most {_MAX_WIDTH}; this is {width}."
    return None


def default_warps(width: int) -> int:
    """Warps of the program of a row: 16 numbers a thread, but from 1 to 16 warps."""
    return min(max(pl.next_power_of_2(width) // 512, 1), 16)


@functools.partial(jax.jit, static_argnames=("eps", "quantize", "interpret", "num_warps"))
def add_norm(
    x: Float[Array, "*T D"],
    y: Float[Array, "*T D"] | Float[Array, "S *T D"],
    weight: Float[Array, " D"],
    eps: float,
    y_scales: tuple[Float[Array, "*T"], Float[Array, " D"]] | None = None,
    quantize: bool = False,
    *,
    interpret: bool = False,
    num_warps: int | None = None,
) -> tuple[Float[Array, "*T D"], Any]:
    """See ``pallas_kernels.add_norm``."""
    if reason := refusal(x):
        raise NotImplementedError(reason)
    D, is_plain = x.shape[-1], y.ndim == x.ndim and y_scales is None
    total = jnp.promote_types(x.dtype, y.dtype) if is_plain else x.dtype
    if x.size == 0:
        empty = x.astype(E4M3 if quantize else total)
        return x.astype(total), (empty, jnp.zeros(x.shape[:-1], jnp.float32)) if quantize else empty
    scales = () if y_scales is None else (y_scales[0].reshape(-1), y_scales[1])
    parts = y.reshape(1 if y.ndim == x.ndim else len(y), -1, D)
    operands = _compat.vary_alike(x.reshape(-1, D), parts, weight, *scales)
    rows = operands[0]
    shapes = [(rows.shape, total), (rows.shape, E4M3 if quantize else total)]
    shapes += [((len(rows),), jnp.float32)] * quantize
    outputs = _compat.triton_call(
        functools.partial(_add_norm, eps=eps),
        grid=(len(rows),),
        out_shape=[_compat.out_like(shape, dtype, rows) for shape, dtype in shapes],
        num_warps=num_warps or default_warps(D),
        num_stages=1,
        interpret=interpret,
        name="add_norm",
    )(*operands)
    added, norm, *norm_scales = (array.reshape(*x.shape[:-1], *array.shape[1:]) for array in outputs)
    return added, (norm, *norm_scales) if quantize else norm


def _add_norm(x: Any, y: Any, weight: Any, *others: Any, eps: float) -> None:
    """One program: one row, padded with zeros to the next power of two."""
    y_scales, (total, normed, *norm_scales) = (others[:2], others[2:]) if len(others) > 3 else ((), others)
    row, D = pl.program_id(0), x.shape[1]
    column = jnp.arange(pl.next_power_of_2(D), dtype=jnp.int32)
    token = jnp.full_like(column, row)
    exists = None if len(column) == D else column < D

    def load(ref: Any) -> jax.Array:
        other = None if exists is None else 0.0
        return pltriton.load(ref, mask=exists, other=other).astype(jnp.float32)

    scale = load(weight.at[column]).astype(weight.dtype)
    first, *parts = (load(y.at[jnp.full_like(column, part), token, column]) for part in range(len(y)))
    added = sum(parts, first)
    if y_scales:
        of_tokens, of_columns = y_scales
        added = added * of_tokens[row] * load(of_columns.at[column])
    added = added.astype(total.dtype).astype(jnp.float32)  # rounds sums and scaled numbers; others are exact
    rounded = (load(x.at[token, column]) + added).astype(total.dtype)
    pltriton.store(total.at[token, column], rounded, mask=exists)
    wide = rounded.astype(jnp.float32)
    norm = weighted(wide * jax.lax.rsqrt(jnp.sum(wide * wide) / D + eps), scale, total.dtype)
    if norm_scales:
        (norm,), norm_scales[0][row] = quantized([norm.astype(jnp.float32)])
    pltriton.store(normed.at[token, column], norm, mask=exists)
