"""Sums of a consumer's rows over groups of inputs, counted in the scale of the group that it is at (Mosaic GPU).

A group's products could have float32 sums of their own, multiplied by the group's scale and added to others; with many
tokens there are no registers for both. So there are sums once, which are multiplied by the ratio of two scales when
the next group begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat
from pallas_kernels.quantized_product import registers

ROWS = 64  # of the weight that a consumer has: those of a wgmma
LEAST_SCALE = 1e-30  # what scales nearer to 0 count as, since sums are divided by them


class Rows(NamedTuple):
    """The rows of the weight that a consumer has: 64 neighbours, or in turns 8 of gate and 8 of up.

    Attributes:
        first: of all, or of gate.
        up: the first of up; None where the rows are neighbours.
    """

    first: Any
    up: Any = None

    def load(self, factors: Any, k: Any) -> jax.Array:
        """The rows' factors [O, G] of a group; rows beyond the last, of which nothing is stored, get any."""
        most = len(factors) - ROWS
        if self.up is not None:
            gate, up = (jnp.minimum(row, most + ROWS // 2) for row in self)
            return registers.load_in_turns(factors, gate, up, k)
        return registers.load(factors.at[pl.ds(jnp.minimum(self.first, most), ROWS), k], plgpu.Layout.WGMMA.reduce(1))


def sums(factors: tuple[Any, ...], rows: Rows, me: Any, steps: tuple[Any, Any, Any], s: dict[str, Any]) -> jax.Array:
    """Products [64, tokens] of a consumer's rows with all tokens of the ring, over some steps of a group each.

    Args:
        factors: scales [O, G], and zero points if there are any, in global memory.
        rows: of the consumer.
        me: the number of the consumer, who has as many rows of each slot of the ring.
        steps: how many went through the ring before, the first group, and the one behind the last.
        s: the ring: ``x_s``, ``weight_s``, and barriers ``full`` and ``empty``.
    """
    count, start, end = steps
    stages, tokens, _ = s["x_s"].shape

    def load(k: Any) -> list[jax.Array]:
        """Scales and zero points of a step; loaded one step ahead, and used there, or it would wait for memory."""
        return [rows.load(ref, k) for ref in factors]

    def step(k: Any, carried: Any) -> Any:
        total, last, (loaded, *zeros) = carried
        ahead, scale = load(jnp.minimum(k + 1, end - 1)), _divisor(loaded)
        slot = lax.rem(count + k - start, stages)
        total *= lax.broadcast_in_dim(last / scale, total.shape, (0,))
        plgpu.barrier_wait(s["full"].at[slot])
        total = _added(total, s["weight_s"].at[slot, pl.ds(me * ROWS, ROWS)], s["x_s"].at[slot], zeros)
        plgpu.barrier_arrive(s["empty"].at[slot])
        return total, scale, ahead

    total = plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)
    first = load(start)
    total, last, _ = lax.fori_loop(start, end, step, (total, _divisor(first[0]), first))
    return total * lax.broadcast_in_dim(last, total.shape, (0,))


def _divisor(scale: jax.Array) -> jax.Array:
    """A scale in float32, or what counts as one where sums could not be divided by it."""
    wide = scale.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < LEAST_SCALE, LEAST_SCALE, wide)


def _added(total: jax.Array, weight: Any, x: Any, zeros: list[jax.Array]) -> jax.Array:
    """Sums plus the products of a step, without scales."""

    def run(products: Any) -> None:
        for _, inputs, numbers in registers.widened(registers.loaded(weight), zeros, 1):
            plgpu.wgmma(products, numbers, _compat.smem_transpose(x.at[:, inputs]))

    added: jax.Array = pl.run_state(run)(plgpu.ACC.init(total))
    return added
