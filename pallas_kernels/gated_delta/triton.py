"""Commit and verify of Gated DeltaNet on Pallas' Triton backend: one program some columns of one head's state.

A column of S needs no other, so a program holds dk rows of a few columns in registers, folds the accepted rows of the
tape into them, writes them back, and goes on over the block without writing: each state is read once and written once a
round.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.ungrouped import L2_EPS, Rows


class Config(NamedTuple):
    """How a kernel is cut."""

    columns: int  # of the state, a program
    num_warps: int


DEFAULT = Config(columns=32, num_warps=1)


def refusal(state: jax.Array) -> str | None:
    """Say why the Triton backend cannot do this call, or None."""
    for name, size in zip(("key", "value"), state.shape[-2:], strict=True):
        if size & (size - 1) or size < 16:
            return f"Triton needs {name} heads of a power of two from 16 on; this is {size}."
    return None


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def replay(
    state: Float[Array, "Q HV dk dv"],
    slots: Int[Array, " B"],
    tape: Rows,
    count: Int[Array, " B"],
    block: Rows,
    *,
    config: Config = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "Q HV dk dv"]]:
    """See ``pallas_kernels.gated_delta.ungrouped.replay``; the state is written in place."""
    if reason := refusal(state):
        raise NotImplementedError(reason)
    (_, heads, _, value_dim), (B, T, _) = state.shape, block.mixed.shape
    operands = _compat.vary_alike(state, slots, *tape, count, *block)
    columns = min(config.columns, value_dim)
    after, outputs = _compat.triton_call(
        functools.partial(_replay, columns=columns),
        grid=(B, heads, value_dim // columns),
        out_shape=[
            _compat.out_like(state.shape, state.dtype, operands[0]),
            _compat.out_like((B, T, heads, value_dim), jnp.float32, operands[0]),
        ],
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name="gated_delta_replay",
        aliases={0: 0},
    )(*operands)
    return outputs, after


def _replay(
    state: Any, slots: Any, tape: Any, tape_g: Any, tape_beta: Any, count: Any,
    block: Any, block_g: Any, block_beta: Any, after: Any, outputs: Any, *, columns: int,
) -> None:  # fmt: skip
    """Run one program."""
    b, head = pl.program_id(0), pl.program_id(1)
    Q, HV, dk, dv = state.shape
    key_heads = (tape.shape[2] - HV * dv) // (2 * dk)
    key = head // (HV // key_heads) * dk
    first = pl.program_id(2) * columns
    values = pl.ds(2 * key_heads * dk + head * dv + first, columns)
    slot = slots[b]
    is_sequence = (slot >= 0) & (slot < Q)
    slot = jnp.where(is_sequence, slot, 0)
    folded = jnp.where(is_sequence, count[b], 0)
    place = (slot, head, slice(None), pl.ds(first, columns))

    def normed(rows: Any, i: Any, start: Any) -> Array:
        x = rows[b, i, pl.ds(start, dk)].astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPS)

    def written(S: Array, i: Any, rows: Any, g: Any, beta: Any) -> Array:
        k, v = normed(rows, i, key_heads * dk + key), rows[b, i, values].astype(jnp.float32)
        S = S * jnp.exp(g[b, i, head])
        d = beta[b, i, head] * (v - jnp.sum(S * k[:, None], axis=0))
        return S + k[:, None] * d[None, :]

    def fold(i: Any, S: Array) -> Array:
        return written(S, i, tape, tape_g, tape_beta)

    def verify(i: Any, S: Array) -> Array:
        S = written(S, i, block, block_g, block_beta)
        q = normed(block, i, key) * dk**-0.5
        outputs[b, i, head, pl.ds(first, columns)] = jnp.sum(S * q[:, None], axis=0)
        return S

    S = jax.lax.fori_loop(0, folded, fold, state[place])

    @pl.when(folded > 0)
    def _() -> None:
        after[place] = S

    jax.lax.fori_loop(0, block.shape[1], verify, S)
