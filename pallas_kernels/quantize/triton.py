"""Activations in fp8 on Pallas' Triton backend: one program a token, which holds the whole row in registers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.quantize.reference import E4M3, LARGEST, SMALLEST

_WIDEST = 1 << 16  # elements of a row: 128 registers of each of 512 threads


def refusal(width: int) -> str | None:
    """Why the Triton kernels cannot quantise rows of this width, or None."""
    if width > _WIDEST:
        return f"The Triton kernel holds a row in registers, so its width must be at most {_WIDEST}; this is {width}."
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_rows(x: Float[Array, "*T D"], *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.quantize_rows``."""
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    found = _call(_quantize_rows, "quantize_rows", (len(rows), D), [rows], D // 512, interpret)
    return found[0].reshape(x.shape), found[1].reshape(x.shape[:-1])


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_gated(
    products: Float[Array, "*T E 2 I"],
    of_tokens: Float[Array, "*T"],
    of_units: Float[Array, "E 2 I"],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.quantize_gated``."""
    parts, _, units = of_units.shape
    tokens, width = math.prod(of_tokens.shape), parts * units
    operands = [products.reshape(tokens, 2 * width), of_tokens.reshape(tokens), of_units.reshape(2 * width)]
    kernel = functools.partial(_quantize_gated, units=units)
    found = _call(kernel, "quantize_gated", (tokens, width), operands, width // 512, interpret)
    return found[0].reshape(*of_tokens.shape, width), found[1].reshape(of_tokens.shape)


def _call(
    kernel: Callable[..., None],
    name: str,
    shape: tuple[int, int],
    operands: list[jax.Array],
    warps: int,
    interpret: bool,
) -> list[jax.Array]:
    """Numbers of that shape, and the scales of its rows, by about so many warps."""
    tokens, width = shape
    if reason := refusal(width):
        raise NotImplementedError(reason)
    if 0 in shape:
        return [jnp.zeros(shape, E4M3), jnp.full(tokens, SMALLEST / LARGEST, jnp.float32)]
    operands = list(_compat.vary_alike(*operands))
    found: list[jax.Array] = _compat.triton_call(
        kernel,
        grid=(tokens,),
        out_shape=[
            _compat.out_like(shape, E4M3, operands[0]),
            _compat.out_like((tokens,), jnp.float32, operands[0]),
        ],
        num_warps=min(pl.next_power_of_2(max(warps, 1)), 16),
        num_stages=1,
        interpret=interpret,
        name=name,
    )(*operands)
    return found


def _quantize_rows(x: Any, numbers: Any, scales: Any) -> None:
    """One program: one row, as wide as the next power of two; what stands beyond the row's end counts as zero."""
    column = jnp.arange(pl.next_power_of_2(x.shape[1]), dtype=jnp.int32)
    real = None if len(column) == x.shape[1] else column < x.shape[1]
    _store([(_load(x, column, real), column)], real, numbers, scales)


def _quantize_gated(products: Any, of_tokens: Any, of_units: Any, numbers: Any, scales: Any, *, units: int) -> None:
    """The same of hidden units: of each part the gates stand before its other projections.

    Parts and units are axes of their own, so that the compiler sees that neighbours stand side by side; units come in
    pieces of a power of two if they can, so that nothing is computed beside them.
    """
    parts = numbers.shape[1] // units
    size = math.gcd(units, 1 << 10) if units % 128 == 0 else pl.next_power_of_2(units)
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)[:, None]
    unit = jnp.arange(size, dtype=jnp.int32)[None, :]
    real = None if len(part) == parts and size <= units else (part < parts) & (unit < units)
    of_token = of_tokens[pl.program_id(0)]

    def load(place: jax.Array) -> jax.Array:
        factor = pltriton.load(of_units.at[place], mask=real, other=None if real is None else 0.0)
        return _load(products, place, real) * (of_token * factor)

    pieces = []
    for start in range(0, units, size):
        place = 2 * units * part + start + unit
        gate, up = load(place), load(place + units)
        pieces.append((gate * up / (1 + jnp.exp(-gate)), units * part + start + unit))
    _store(pieces, real, numbers, scales)


def _load(ref: Any, column: jax.Array, real: jax.Array | None) -> jax.Array:
    """Of this program's row; zeros where there is nothing."""
    place = ref.at[jnp.full_like(column, pl.program_id(0)), column]
    return pltriton.load(place, mask=real, other=None if real is None else 0.0).astype(jnp.float32)


def _store(pieces: list[tuple[jax.Array, jax.Array]], real: jax.Array | None, numbers: Any, scales: Any) -> None:
    """A row in pieces, each with its columns, and its scale."""
    found, scales[pl.program_id(0)] = quantized([wide for wide, _ in pieces])
    for values, (_, column) in zip(found, pieces, strict=True):
        pltriton.store(numbers.at[jnp.full_like(column, pl.program_id(0)), column], values, mask=real)


def quantized(pieces: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """A float32 row in pieces, all of one shape, as e4m3 numbers, the largest being that of e4m3; and their scale."""
    largest = functools.reduce(jnp.maximum, [jnp.abs(wide) for wide in pieces])
    scale = jnp.maximum(jnp.max(largest), SMALLEST) / LARGEST
    return [jnp.clip(wide * (1 / scale), -LARGEST, LARGEST).astype(E4M3) for wide in pieces], scale
