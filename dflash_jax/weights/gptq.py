"""Rounding of a matrix to 4 bits so that its products change least on given inputs: GPTQ.

The error of a product over inputs X is tr((W - Q) H (W - Q)^T) with H = X^T X. Columns are rounded one after the other,
and what rounding a column costs is made up for by those that are not rounded yet: with H^-1 = U^T U, U upper
triangular, column j moves column k > j by -error_j U_jk / U_jj. Columns with the largest H_jj come first, while most
others can still make up for them; every input keeps the scale of its own group, so that files hold no order.

Source: arXiv 2210.17323, algorithm 1.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from dflash_jax.base.errors import CheckpointError
from dflash_jax.weights import packing
from dflash_jax.weights.layouts import MIDDLE, Matrix

LARGEST = 15  # of 4-bit numbers
DAMPING = 0.01  # of the mean of H's diagonal, added to the diagonal: H of few inputs has no inverse
BLOCK = 128  # columns whose errors move the columns behind the block in one product
SHRUNK = tuple(1 - step / 40 for step in range(17))  # shares of a group's range that are tried: 1 to 0.6
SCALE = np.dtype(ml_dtypes.bfloat16)  # other engines hold scales in the dtype of the model, and round others to it


def nearest(weight: Float[np.ndarray, "O I"], group: int, *, symmetric: bool) -> Matrix:
    """A matrix rounded to the nearest 4-bit numbers; the range of each group of inputs is divided evenly.

    Args:
        weight: any float dtype.
        group: inputs that share a scale, a divisor of I.
        symmetric: whether all zero points are 8.
    """
    wide = jnp.asarray(weight, jnp.float32)
    scales, zeros = _grid(_groups(wide, group), symmetric=symmetric)
    return _matrix(_rounded(wide, *_spread(scales, zeros, group)), scales, zeros)


def gptq(
    weight: Float[np.ndarray, "O I"], moment: Float[Array, "I I"], group: int, *, symmetric: bool, name: str
) -> Matrix:
    """A matrix rounded to 4-bit numbers so that its products with certain inputs change least.

    Args:
        weight: any float dtype.
        moment: sum or mean of x x^T over the inputs x, float32.
        group: inputs that share a scale, a divisor of I.
        symmetric: whether all zero points are 8.
        name: of the matrix, for the error.

    Raises:
        CheckpointError: `moment` has no Cholesky factor: some input is not finite.
    """
    with jax.default_matmul_precision("highest"):  # TF32 has too few digits to invert with
        wide, importance = jnp.asarray(weight, jnp.float32), jnp.diagonal(moment)
        scales, zeros = _fitted_grid(wide, importance, group, symmetric=symmetric)
        order = jnp.argsort(-importance)
        factor = _inverse_factor(moment[order][:, order])
        if not bool(jnp.isfinite(factor).all()):
            raise CheckpointError(
                f"{name}: the inputs from the calibration text are not all finite; check the checkpoint's weights."
            )
        spread = [array[:, order] for array in _spread(scales, zeros, group)]
        numbers = _rounded_in_turn(wide[:, order], factor, *spread, block=math.gcd(wide.shape[1], BLOCK))
    return _matrix(numbers[:, jnp.argsort(order)], scales, zeros)


def _groups(weight: Float[Array, "O I"], group: int) -> Float[Array, "O G group"]:
    return weight.reshape(len(weight), -1, group)


def _spread(scales: Array, zeros: Array, group: int) -> tuple[Float[Array, "O I"], Float[Array, "O I"]]:
    """Scales and zero points [O, G] of every input."""
    return jnp.repeat(scales, group, axis=1), jnp.repeat(zeros, group, axis=1)


def _grid(
    groups: Float[Array, "O G group"], share: Float[Array, ""] | float = 1.0, *, symmetric: bool
) -> tuple[Float[Array, "O G"], Float[Array, "O G"]]:
    """Scales, as the file rounds them, and zero points that divide a share of each group's range, 0 included."""
    low, high = jnp.minimum(groups.min(axis=2), 0) * share, jnp.maximum(groups.max(axis=2), 0) * share
    steps = 2 * jnp.maximum(-low, high) / LARGEST if symmetric else (high - low) / LARGEST
    scales = jnp.maximum(steps, jnp.finfo(SCALE).tiny).astype(SCALE).astype(jnp.float32)  # for groups of zeros
    zeros = jnp.full(scales.shape, float(MIDDLE)) if symmetric else jnp.clip(jnp.rint(-low / scales), 0, LARGEST)
    return scales, zeros


@partial(jax.jit, static_argnames=("group", "symmetric"))
def _fitted_grid(
    weight: Float[Array, "O I"], importance: Float[Array, " I"], group: int, *, symmetric: bool
) -> tuple[Float[Array, "O G"], Float[Array, "O G"]]:
    """The grid of the share of each group's range that rounds it best, errors weighed by the inputs' squares."""
    groups, weights = _groups(weight, group), importance.reshape(-1, group)

    def better(best: tuple[Array, Array, Array], share: Array) -> tuple[tuple[Array, Array, Array], None]:
        scales, zeros = _grid(groups, share, symmetric=symmetric)
        wide = scales[..., None], zeros[..., None]
        errors = jnp.square((_rounded(groups, *wide) - wide[1]) * wide[0] - groups)
        loss = (errors * weights).sum(axis=2)
        least, best_scales, best_zeros = best
        is_better = loss < least
        scales, zeros = jnp.where(is_better, scales, best_scales), jnp.where(is_better, zeros, best_zeros)
        return (jnp.minimum(loss, least), scales, zeros), None

    first = (jnp.full(groups.shape[:2], jnp.inf), *_grid(groups, symmetric=symmetric))
    (_, scales, zeros), _ = lax.scan(better, first, jnp.asarray(SHRUNK, jnp.float32))
    return scales, zeros


@jax.jit
def _inverse_factor(moment: Float[Array, "I I"]) -> Float[Array, "I I"]:
    """U, upper triangular, with H^-1 = U^T U for the damped H.

    H with rows and columns reversed has a lower Cholesky factor, which reversed again is R, upper, with H = R R^T; U is
    the inverse of R. So H itself is never inverted, which float32 could not do.
    """
    diagonal = jnp.diagonal(moment)
    mean = diagonal.mean()
    damped = moment + jnp.eye(len(moment)) * jnp.where(mean == 0, 1, DAMPING * mean)
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return lax.linalg.triangular_solve(upper, jnp.eye(len(moment)), left_side=True)


def _rounded(weight: Array, scales: Array, zeros: Array) -> Array:
    """The nearest numbers from 0 to 15, as floats."""
    return jnp.clip(jnp.rint(weight / scales) + zeros, 0, LARGEST)


@partial(jax.jit, static_argnames="block")
def _rounded_in_turn(
    weight: Float[Array, "O I"],
    factor: Float[Array, "I I"],
    scales: Float[Array, "O I"],
    zeros: Float[Array, "O I"],
    *,
    block: int,
) -> Float[Array, "O I"]:
    """The numbers of columns that are rounded from the first to the last, each error passed on to those behind it."""
    outputs, inputs = weight.shape

    def round_column(j: Array, carry: tuple[Array, Array, Array], inner: Array, scale: Array, zero: Array):
        part, numbers, errors = carry
        rounded = _rounded(part[:, j], scale[:, j], zero[:, j])
        error = (part[:, j] - (rounded - zero[:, j]) * scale[:, j]) / inner[j, j]
        # Row j of U is 0 left of column j: columns that are rounded already stay.
        return part - error[:, None] * inner[j], numbers.at[:, j].set(rounded), errors.at[:, j].set(error)

    def round_block(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        weight, numbers = carry
        start = index * block
        part, scale, zero = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (weight, scales, zeros))
        rows = lax.dynamic_slice_in_dim(factor, start, block, axis=0)
        inner = lax.dynamic_slice_in_dim(rows, start, block, axis=1)
        column = partial(round_column, inner=inner, scale=scale, zero=zero)
        _, rounded, errors = lax.fori_loop(0, block, column, (part, jnp.zeros_like(part), jnp.zeros_like(part)))
        behind = jnp.where(jnp.arange(inputs) >= start + block, rows, 0)
        return weight - errors @ behind, lax.dynamic_update_slice_in_dim(numbers, rounded, start, axis=1)

    return lax.fori_loop(0, inputs // block, round_block, (weight, jnp.zeros((outputs, inputs))))[1]


def _matrix(numbers: Float[Array, "O I"], scales: Float[Array, "O G"], zeros: Float[Array, "O G"]) -> Matrix:
    def small(array: Array) -> UInt8[np.ndarray, "rows columns"]:
        return np.asarray(array).astype(np.uint8)

    return Matrix(packing.to_pairs(small(numbers)), np.asarray(scales).astype(SCALE), small(zeros), None)
