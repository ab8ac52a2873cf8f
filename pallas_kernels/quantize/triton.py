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

LEAST_PIECE = 64  # hidden units of a part; fewer that are left are padded
_MAX_WIDTH = 1 << 16  # numbers of a row: 128 registers of each of 512 threads


def refusal(width: int) -> str | None:
    """Why the Triton kernels cannot quantise rows of this width, or None."""
    if width > _MAX_WIDTH:
        return (
            f"The Triton kernel holds a row in registers, so its width must be at most {_MAX_WIDTH}; this is {width}."
        )
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def quantize_rows(x: Float[Array, "*T D"], *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.quantize_rows``."""
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    numbers, scales = _call(_quantize_rows, "quantize_rows", (len(rows), D), [rows], D // 512, interpret)
    return numbers.reshape(x.shape), scales.reshape(x.shape[:-1])


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
    numbers, scales = _call(kernel, "quantize_gated", (tokens, width), operands, width // 512, interpret)
    return numbers.reshape(*of_tokens.shape, width), scales.reshape(of_tokens.shape)


def _call(
    kernel: Callable[..., None],
    name: str,
    shape: tuple[int, int],
    operands: list[jax.Array],
    warps: int,
    interpret: bool,
) -> list[jax.Array]:
    """Run a kernel of one program a row, and return e4m3 numbers [tokens, width] and the scales of the rows.

    Args:
        kernel: to run.
        name: by which profilers show it.
        shape: tokens and width.
        operands: of the kernel.
        warps: of a program, rounded up to a power of two from 1 to 16.
        interpret: run in Pallas' interpreter.
    """
    tokens, width = shape
    if reason := refusal(width):
        raise NotImplementedError(reason)
    if 0 in shape:
        return [jnp.zeros(shape, E4M3), jnp.full(tokens, SMALLEST / LARGEST, jnp.float32)]
    operands = list(_compat.vary_alike(*operands))
    outputs: list[jax.Array] = _compat.triton_call(
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
    return outputs


def _quantize_rows(x: Any, numbers: Any, scales: Any) -> None:
    """One program: one row, padded with zeros to the next power of two."""
    column = jnp.arange(pl.next_power_of_2(x.shape[1]), dtype=jnp.int32)
    exists = None if len(column) == x.shape[1] else column < x.shape[1]
    _store([(_load(x, column, exists), column, exists)], numbers, scales)


def _quantize_gated(products: Any, of_tokens: Any, of_units: Any, numbers: Any, scales: Any, *, units: int) -> None:
    """One program: the hidden units of one token. Each part has its gates in front of its up projections.

    Parts and units are separate axes, so that the compiler sees which numbers are neighbours in memory. Units come in
    pieces of powers of two, so that little padding is computed: the 1,088 of 27B are 1,024 and 64. Padded to 2,048, 16
    tokens took 10.8 us (H200), and take 6.8 so (H100).
    """
    parts = numbers.shape[1] // units
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)[:, None]
    of_token, pieces, start = of_tokens[pl.program_id(0)], [], 0
    for size in _pieces(units):
        unit = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        exists = None if len(part) == parts and start + size <= units else (part < parts) & (unit < units)

        def load(column: jax.Array, exists: jax.Array | None = exists) -> jax.Array:
            factor = pltriton.load(of_units.at[column], mask=exists, other=None if exists is None else 0.0)
            return _load(products, column, exists) * (of_token * factor)

        gate, up = load(2 * units * part + unit), load(2 * units * part + units + unit)
        pieces.append((gate * up / (1 + jnp.exp(-gate)), units * part + unit, exists))
        start += size
    _store(pieces, numbers, scales)


def _pieces(units: int) -> list[int]:
    """Powers of two that units are the sum of, the largest first; the last may reach beyond them."""
    pieces, rest = [], units
    while rest > 0:
        size = 1 << (rest.bit_length() - 1)
        pieces.append(size if size >= LEAST_PIECE or size == rest else pl.next_power_of_2(rest))
        rest -= pieces[-1]
    return pieces


def _load(ref: Any, column: jax.Array, exists: jax.Array | None) -> jax.Array:
    """Load columns of this program's row in float32, zeros where they do not exist."""
    source = ref.at[jnp.full_like(column, pl.program_id(0)), column]
    return pltriton.load(source, mask=exists, other=None if exists is None else 0.0).astype(jnp.float32)


def _store(pieces: list[tuple[jax.Array, jax.Array, jax.Array | None]], numbers: Any, scales: Any) -> None:
    """Quantise this program's row, as pieces with their columns and masks, and store its numbers and its scale."""
    quantized_pieces, scales[pl.program_id(0)] = quantized([wide for wide, *_ in pieces])
    for values, (_, column, exists) in zip(quantized_pieces, pieces, strict=True):
        pltriton.store(numbers.at[jnp.full_like(column, pl.program_id(0)), column], values, mask=exists)


def quantized(pieces: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """The e4m3 numbers and the scale of a float32 row that is given in pieces.

    The row's largest number becomes the largest of e4m3.
    """
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(wide)) for wide in pieces])
    scale = jnp.maximum(largest, SMALLEST) / LARGEST
    return [jnp.clip(wide * (1 / scale), -LARGEST, LARGEST).astype(E4M3) for wide in pieces], scale
