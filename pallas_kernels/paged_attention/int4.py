"""What 4-bit pages (``lib.int4_kv``) change in the Triton kernel: numbers are multiplied, sums get scales and middles.

A stored number n is ``(n - 7.5) * scale + middle``, so for one key and one row

    q.k = scale * (q.n - 7.5 * sum(q)) + middle * sum(q),

and likewise for values, whose scales join the weights of the softmax. Products thus see numbers 0 to 15, which 16 bits
hold exactly, and no element is scaled. What is subtracted is computed from the operands as they were rounded: the
numbers' offset cancels without an error of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.lib.halves import Halves, half_rows
from pallas_kernels.lib.int4_kv import CENTRE, HIGHEST, signs
from pallas_kernels.paged_attention.arguments import Arguments, operand

# Of weights times scales of values, which float16's range would cut off, and bfloat16 holds down to 1e-38.
_WEIGHTS = jnp.bfloat16


def rotation(args: Arguments) -> Float[Array, "H2 H2"]:
    """The signs that rotate a half of the queries, in the dtype of the product with them."""
    dtype = args.q.dtype if args.q.dtype.itemsize == 2 else jnp.float16
    return jnp.asarray(signs(args.q.shape[-1] // 2), dtype)


def rotated_queries(q: tuple[Any, Any], rows: tuple[Any, ...], valid: jax.Array) -> Halves:
    """Rows of the queries, rotated as keys are, in float16; zeros for rows that are not valid.

    Each program rotates its own: two products with a matrix of signs, which 16 bits hold, so that sums are as exact as
    float32. They are less work than one page.

    Args:
        q: references to queries and to the signs of ``rotation``.
        rows: sequence, tokens and heads of the rows.
        valid: [rows, 1].
    """
    queries, matrix = q[0], q[1][...]
    halves = [pltriton.load(x, mask=valid, other=0.0) for x in half_rows(queries, *rows)]
    left, right = (pltriton.dot(operand(half, matrix.dtype), matrix) for half in halves)
    factor = queries.shape[-1] ** -0.5
    return [operand(half * factor, jnp.float16) for half in (left + right, left - right)]


def int4_products(queries: Halves, pages: Any, place: tuple[Any, Any], is_plain: bool) -> jax.Array:
    """Products of rotated queries and the keys of a page of 4-bit ``pages``, references, [rows, S]."""
    halves = _unpacked(pages.numbers[*place, :, pl.ds(0, pages.shape[-1] // 2)], queries[0].dtype, is_plain)
    left, right = (pltriton.dot(q, k.T) for q, k in zip(queries, halves, strict=True))
    sums = [q.astype(jnp.float32).sum(1)[:, None] for q in queries]
    total = sums[0] + sums[1]
    scale, middle = (x[*place, :].astype(jnp.float32)[None, :] for x in (pages.scale, pages.middle))
    return (left + right - CENTRE * total) * scale + middle * total


def int4_weighted(weights: jax.Array, pages: Any, place: tuple[Any, Any], inside: jax.Array, is_plain: bool) -> Halves:
    """Halves of the sums of a page's values, weighted; scales of positions that are not inside may be NaN."""
    scale, middle = (
        pltriton.load(x.at[place], mask=inside, other=0.0).astype(jnp.float32)[None, :]
        for x in (pages.scale, pages.middle)
    )
    scaled = (weights * scale).astype(_WEIGHTS)
    rest = (weights * middle - CENTRE * scaled.astype(jnp.float32)).sum(1)[:, None]
    halves = _unpacked(pages.numbers[*place, :, pl.ds(0, pages.shape[-1] // 2)], _WEIGHTS, is_plain)
    return [pltriton.dot(scaled, half) + rest for half in halves]


def _unpacked(numbers: jax.Array, dtype: Any, is_plain: bool) -> Halves:
    """The numbers of the first and of the second half of heads, exactly, in a dtype of 16 bits.

    A GPU converts integers at an eighth of the rate of other instructions, and Triton converted each number by itself:
    16 tokens over 4-bit pages took 536 us where e4m3 took 327. So a number is put into the last bits of a power of two
    that is its dtype's integer there, of two numbers at once, and the power is subtracted.
    """
    if is_plain:
        wide = numbers.astype(jnp.int32)
        return [(wide & HIGHEST).astype(dtype), (wide >> 4).astype(dtype)]
    halves = []
    for half in range(2):
        [out] = pltriton.elementwise_inline_asm(
            _ASSEMBLY[jnp.dtype(dtype).name][half],
            args=[numbers],
            constraints="=r,=r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(numbers.shape, dtype)],
        )
        halves.append(out)
    return halves


def _assembly(shift: int, bits: int, base: int, factor: int, offset: int, kind: str) -> str:
    """PTX that makes four 16-bit numbers of four bytes: ``(bytes >> shift) & bits``, as 16-bit floats.

    Args:
        shift: to the right.
        bits: mask of a number within its 16 bits.
        base: the power of two whose last bits the number becomes.
        factor: what the sum of the two is multiplied by.
        offset: what is added then.
        kind: of the fused multiply-add.
    """
    mask, power, times, plus = (f"{value << 16 | value:#010x}" for value in (bits, base, factor, offset))
    lines = ["{ .reg .b32 x, lo, hi, times, plus;", f"shr.b32 x, $2, {shift};" if shift else "mov.b32 x, $2;"]
    lines += [f"mov.b32 times, {times};", f"mov.b32 plus, {plus};"]
    for half, selector, out in (("lo", "0x4140", "$0"), ("hi", "0x4342", "$1")):  # bytes 0 and 1, bytes 2 and 3
        lines.append(f"prmt.b32 {half}, x, 0, {selector};")
        lines.append(f"lop3.b32 {half}, {half}, {mask}, {power}, 0xea;")  # (a & b) | c
        lines.append(f"fma.rn.{kind}x2 {out}, {half}, times, plus;")
    return "\n".join([*lines, "}"])


# float16 has room for a number four bits further left, 1024 + 16 n, so its high numbers are not shifted but multiplied.
_ASSEMBLY = {
    "float16": (
        _assembly(0, 0x000F, 0x6400, 0x3C00, 0xE400, "f16"),  # 1024 + n, times 1, less 1024
        _assembly(0, 0x00F0, 0x6400, 0x2C00, 0xD400, "f16"),  # 1024 + 16 n, times 1 / 16, less 64
    ),
    "bfloat16": (
        _assembly(0, 0x000F, 0x4300, 0x3F80, 0xC300, "bf16"),  # 128 + n, times 1, less 128
        _assembly(4, 0x000F, 0x4300, 0x3F80, 0xC300, "bf16"),
    ),
}
