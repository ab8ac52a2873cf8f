"""Pages of keys and values in 4 bits, ``int4_had``: numbers 0 to 15, with a scale and a middle a token and kv head.

A stored number n stands for ``(n - 7.5) * scale + middle``. Keys are rotated by a Hadamard transform over the head
before they are rounded, which spreads the few large elements that a key tends to have over all of them; queries get the
same rotation, which is orthogonal, so that q.k stays as it is. Values are rounded as they are.

How keys are rounded is free, and `KeyRounding` says how to do it for little error of their products with queries.

Source: rotation as in QuaRot (arXiv 2404.00456), asymmetric rounding a token as in KIVI (arXiv 2402.02750), feedback of
errors as in GPTQ (arXiv 2210.17323), which is Babai's nearest plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int16, UInt8

from pallas_kernels import _compat

DTYPE = jnp.dtype(jnp.int4)  # what `Int4Pages` calls its dtype, and options call `int4_had`
HIGHEST = 15  # the largest number
CENTRE = HIGHEST / 2  # the number, between two, that stands for the middle; half-integers are exact in 16 bits
# The scale is a fifteenth of the range, so that it bounds the error of all numbers of a head; bfloat16's 8 bits would
# shift the ends of the range by up to a thirty-second of a step, and a middle far from 0 by whole steps. float16 has 11
# bits, but ends at 65504, where bfloat16 and float32 heads need not: scale and middle are clipped, never infinite.
SCALE_DTYPE = jnp.dtype(jnp.float16)
LEAST_HEAD, MOST_HEAD = 16, 256  # head sizes, which must be powers of two
# Errors and fits are computed in integers, whose sums have no order: a token must be stored alike by a prefill and a
# round.
STEP_BITS = 8
STEP_UNITS, HALF_STEP = 1 << STEP_BITS, 1 << (STEP_BITS - 1)  # parts of a scale in which elements are counted
MOST_UNITS = STEP_UNITS * 8  # of an element from the middle; more than 7.5 steps come of rounding the scale alone
BLOCK = 4  # elements that are rounded at once; one at a time gave products 3 % less error, and takes four times as long
ONE_BITS = 10  # a weight of the feedback is a multiple of 2 ** -10
MOST_FEEDBACK, MOST_ERROR = 4.0, 2 * STEP_UNITS  # clips, so that 256 products of both stay below 2 ** 31


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4Pages:
    """A pool of keys or of values in 4 bits, which shows the shape of its elements as an array would.

    Scales lie in arrays of their own, since TMA copies rows of multiples of 16 bytes.

    Attributes:
        numbers: two a byte; the low four bits are those of the head's first half, the high ones of its second half, so
            that a kernel has two halves of a head without moving numbers between lanes.
        scale: float16, the difference between neighbouring numbers; 0 where all elements of the head are alike.
        middle: float16, the middle of the head's range.
    """

    numbers: UInt8[Array, "P K S H2"]
    scale: Float[Array, "P K S"]
    middle: Float[Array, "P K S"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, K, S, H], of the elements."""
        *rows, half = self.numbers.shape
        return (*rows, 2 * half)

    @property
    def ndim(self) -> int:
        """Axes of the elements."""
        return self.numbers.ndim

    @property
    def dtype(self) -> Any:
        """int4."""
        return DTYPE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyRounding:
    """How the keys of each kv head are rounded to 4 bits, which attention takes no notice of.

    Attributes:
        offset: float32, subtracted from each key after RoPE: a query's products with all keys change by one number,
            which the softmax takes out.
        feedback: int16, in units of ``2 ** -10``: row j says what is added to each element i < j of a rotated key
            before it is rounded, for each unit by which element j was rounded down. So errors cancel in products with
            queries.
    """

    offset: Float[Array, "*L K H"]
    feedback: Int16[Array, "*L K H H"]

    def of_layer(self, layer: int) -> KeyRounding:
        """That of one layer."""
        return KeyRounding(self.offset[layer], self.feedback[layer])


Pages = Float[Array, "P K S H"] | Int4Pages


def is_int4(pages: Any) -> bool:
    """Whether a pool holds 4-bit numbers."""
    return isinstance(pages, Int4Pages)


def narrow_bytes(pages: Pages) -> int:
    """Bytes of a pool's 8-bit numbers; 0 for wider ones."""
    return max((array.size for array in jax.tree.leaves(pages) if array.dtype.itemsize == 1), default=0)


def size_refusal(head_size: int) -> str | None:
    """Why heads of this size cannot be kept in 4 bits, or None."""
    if head_size & (head_size - 1) or not LEAST_HEAD <= head_size <= MOST_HEAD:
        allowed = f"a power of two from {LEAST_HEAD} to {MOST_HEAD}"
        return f"int4_had needs a head size that is {allowed}; this is {head_size}"
    return None


def shapes(shape: tuple[int, ...]) -> Int4Pages:
    """The shapes and dtypes of the arrays of a pool, given the shape [P, K, S, H] of its elements."""
    *rows, size = shape
    numbers: Any = jax.ShapeDtypeStruct((*rows, size // 2), jnp.uint8)  # shapes stand where the arrays will
    of_heads: Any = jax.ShapeDtypeStruct(tuple(rows), SCALE_DTYPE)
    return Int4Pages(numbers, of_heads, of_heads)


def head_bytes(head_size: int) -> int:
    """Bytes of one stored head: its numbers, its scale and its middle."""
    return head_size // 2 + 2 * SCALE_DTYPE.itemsize


def rotated(x: Float[Array, "*T H"]) -> Float[Array, "*T H"]:
    """The Hadamard transform over the last axis, H a power of two, times ``H ** -0.5``; in float32.

    A butterfly: log2(H) passes, each of sums and differences of two halves. It is its own inverse.
    """
    *rows, size = x.shape
    y = x.astype(jnp.float32).reshape(*rows, 1, size)
    while y.shape[-1] > 1:  # [.., blocks, width]: block i of Sylvester's matrix becomes blocks 2i and 2i + 1
        left, right = jnp.split(y, 2, axis=-1)
        y = jnp.stack([left + right, left - right], axis=-2).reshape(*rows, -1, y.shape[-1] // 2)
    return y.reshape(x.shape) * size**-0.5


def signs(size: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Sylvester's Hadamard matrix [size, size] of 1 and -1, whose product with a head is its unscaled transform."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def quantised(x: Float[Array, "*T H"], feedback: Int16[Array, "K H H"] | None = None) -> Int4Pages:
    """Heads in 4 bits, each over the range of its elements; keys must be rotated first.

    Scale and middle are rounded before the numbers are, so that the numbers make up for that rounding: an element is
    off by at most half a scale and ``2 ** -10`` of the largest, unless the largest is beyond float16's range. Then they
    are fitted to the numbers (`refitted`), which makes the sum of squared errors less, and single errors at times more.

    Args:
        x: heads; with feedback, [.., K, H].
        feedback: as of `KeyRounding`, by which elements are off by more, and products with queries by less.
    """
    x = x.astype(jnp.float32)
    scale, middle = scale_and_middle(jnp.min(x, axis=-1), jnp.max(x, axis=-1))
    units = units_of(x, scale[..., None], middle[..., None])
    numbers = numbers_of(units) if feedback is None else _fed_back(units, feedback)
    scale, middle = refitted(scale, middle, [part.sum(-1) for part in sums_of(units, numbers)], x.shape[-1])
    low, high = jnp.split(numbers.astype(jnp.uint8), 2, axis=-1)
    return Int4Pages(low | (high << 4), scale, middle)


def scale_and_middle(least: jax.Array, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale and middle, float16, of heads whose least and largest elements are given in float32."""
    limit = _compat.max_finite(SCALE_DTYPE)
    # Halves first: the range of a head may be twice what float32 holds. They are exact, so that no compiler's fused
    # multiply-add changes a bit: a token must be stored alike by a prefill and by a round.
    most, least = most * 0.5, least * 0.5
    scale, middle = (most - least) * (2 / HIGHEST), most + least
    return jnp.minimum(scale, limit).astype(SCALE_DTYPE), jnp.clip(middle, -limit, limit).astype(SCALE_DTYPE)


def units_of(x: jax.Array, scale: jax.Array, middle: jax.Array) -> jax.Array:
    """Elements in float32 as multiples of a scale / `STEP_UNITS` from their middle, int32."""
    step = scale.astype(jnp.float32)
    steps = (x - middle.astype(jnp.float32)) / jnp.where(step > 0, step, 1)
    return jnp.floor(jnp.clip(steps * STEP_UNITS, -MOST_UNITS, MOST_UNITS) + 0.5).astype(jnp.int32)


def numbers_of(units: jax.Array) -> jax.Array:
    """The numbers 0 to 15, int32, nearest to elements as of `units_of`."""
    return jnp.clip((units + (HIGHEST + 1) * HALF_STEP) >> STEP_BITS, 0, HIGHEST)


def sums_of(units: jax.Array, numbers: jax.Array) -> list[jax.Array]:
    """What `refitted` takes the sums of over a head, int32: o, o * o, u and o * u, for o = 2 n - 15 and units u."""
    odd = 2 * numbers - HIGHEST
    return [odd, odd * odd, units, odd * units]


def refitted(scale: jax.Array, middle: jax.Array, sums: list[jax.Array], size: int) -> tuple[jax.Array, jax.Array]:
    """The float16 scale and middle by which the numbers of heads come nearest to their elements, by least squares.

    The error that is left is orthogonal to what the head is read as. Queries that attend to a key lie along it, and
    only an error along the key changes such a score: this lowers what rounding costs by half (docs/kv_formats.md).

    Sums come as integers and each product below is exact in float32, so that neither the order of a sum nor a fused
    multiply-add changes a bit: a token must be stored alike by a prefill and by a round.

    Args:
        scale: by which the numbers were chosen.
        middle: likewise.
        sums: over a head of what `sums_of` gives.
        size: elements of a head.
    """
    odd, squares, units, products = sums
    spread = size * squares - odd * odd  # of the odd integers, times size ** 2; at most 2 ** 24
    common = size * products - odd * units  # at most 2 ** 31 - 2 ** 27
    ratio = common.astype(jnp.float32) / jnp.where(spread > 0, spread, 1).astype(jnp.float32)
    old, limit = scale.astype(jnp.float32), _compat.max_finite(SCALE_DTYPE)
    fitted = jnp.minimum(old * ratio * (2 / STEP_UNITS), limit).astype(SCALE_DTYPE)
    fitted = jnp.where((spread > 0) & (common > 0), fitted, scale)
    mean = jnp.floor(units.astype(jnp.float32) / size + 0.5)  # of units: 12 bits, as of the sum of the odd integers
    shift = old * (mean / STEP_UNITS) - fitted.astype(jnp.float32) * (odd.astype(jnp.float32) / (2 * size))
    return fitted, jnp.clip(middle.astype(jnp.float32) + shift, -limit, limit).astype(SCALE_DTYPE)


def nearest(units: jax.Array, fed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers 0 to 15, int32, of elements to which errors were fed back, and the elements' errors, in units.

    Args:
        units: as of `units_of`.
        fed: sums of errors times weights.
    """
    wanted = units + ((fed + (1 << (ONE_BITS - 1))) >> ONE_BITS)
    numbers = numbers_of(wanted)
    return numbers, jnp.clip(units - (2 * numbers - HIGHEST) * HALF_STEP, -MOST_ERROR, MOST_ERROR)


def _fed_back(units: Int[Array, "*T K H"], feedback: Int16[Array, "K H H"]) -> Int[Array, "*T K H"]:
    """The numbers of heads, whose elements are rounded from the last to the first, a block at a time."""
    blocks = units.shape[-1] // BLOCK

    def step(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        fed, numbers = state
        start = (blocks - 1 - i) * BLOCK
        of_block = (lax.dynamic_slice_in_dim(x, start, BLOCK, axis=-1) for x in (units, fed))
        rounded, errors = nearest(*of_block)
        weights = lax.dynamic_slice_in_dim(feedback, start, BLOCK, axis=1).astype(jnp.int32)
        # A sum of products of BLOCK arrays: a dot of integers would be slow on CPUs.
        fed += sum(errors[..., j, None] * weights[:, j] for j in range(BLOCK))
        return fed, lax.dynamic_update_slice_in_dim(numbers, rounded, start, axis=-1)

    _, numbers = lax.fori_loop(0, blocks, step, (jnp.zeros_like(units), jnp.zeros_like(units)))
    return numbers


def feedback_of(moments: np.ndarray[Any, Any], damping: float) -> np.ndarray[Any, np.dtype[np.int16]]:
    """The feedback [.., H, H] of `KeyRounding` for queries of these second moments [.., H, H], not rotated.

    A key's error e costs ``e.M.e`` for the moments M = R^T R of the rotated queries, R upper triangular. Element j adds
    ``R_ij e_j`` to what element i < j can still make good.

    Args:
        moments: means of the outer product of a query with itself.
        damping: share of their mean that is added to the moments of each element, since queries to come may differ.
    """
    size = moments.shape[-1]
    turn = signs(size) * size**-0.5
    rotated_moments = turn @ moments @ turn
    mean = np.maximum(np.trace(rotated_moments, axis1=-2, axis2=-1)[..., None, None] / size, 1e-30)
    lower = np.linalg.cholesky(rotated_moments / mean + damping * np.eye(size))  # R^T: row j has R_ij
    weights = np.tril(lower / np.diagonal(lower, axis1=-2, axis2=-1)[..., None, :], -1)
    within = np.arange(size) // BLOCK
    weights = np.where(within[:, None] == within, 0, weights)  # elements of a block are rounded at once
    return np.rint(np.clip(weights, -MOST_FEEDBACK, MOST_FEEDBACK) * (1 << ONE_BITS)).astype(np.int16)


def unpacked(numbers: UInt8[Array, "*T H2"]) -> UInt8[Array, "*T H"]:
    """The numbers 0 to 15 of heads, one a byte."""
    return jnp.concatenate([numbers & HIGHEST, numbers >> 4], axis=-1)


def dequantised(heads: Int4Pages) -> Float[Array, "*T H"]:
    """The elements that stored heads stand for, in float32; keys come back rotated."""
    scale, middle = (x.astype(jnp.float32)[..., None] for x in (heads.scale, heads.middle))
    return (unpacked(heads.numbers).astype(jnp.float32) - CENTRE) * scale + middle
