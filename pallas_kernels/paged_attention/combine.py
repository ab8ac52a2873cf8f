"""Merging the splits of a call: the softmax over all keys from the softmaxes over parts of them, and output gates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments

_LOWEST = -1e30  # maximum of a split that does not exist: finite, so that no difference of two maxima is inf - inf


def combine(
    acc: Float[Array, "B K splits R H"],
    highest: Float[Array, "B K splits R"],
    total: Float[Array, "B K splits R"],
    *,
    args: Arguments,
    head_rows: int = 0,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Merge the partial sums of all splits; a split with a total of 0 is empty, and its sums are not used.

    Args:
      acc: sums of values weighted with ``2 ** (logit - highest)``, unnormalised.
      highest: largest base-2 logit of each row in the split; it may have more rows than ``acc``.
      total: sums of the weights.
      args: the call. Gates are read where a projection has left them; XLA takes two kernels of 1.7 us to apply them.
      head_rows: rows of a head, if those of a head lie together: row is head * head_rows + token. Those past
        ``q_length`` may hold anything then, and become zeros. 0 says that heads of a token lie together: row is
        token * group + head.
      interpret: run in Pallas' interpreter.
    """
    B, T, N, H = args.q.shape
    gates = () if args.gates is None else (args.gates,)
    inputs = _compat.vary_alike(acc, highest, total, args.v_scale, args.q_length, *gates)
    [out] = _compat.triton_call(
        functools.partial(_merge, group=args.group, splits=acc.shape[2], head_rows=head_rows),
        grid=(T * args.group, args.kv_heads, B),
        out_shape=[_compat.out_like((B, T, N, H), args.q.dtype, inputs[0])],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="paged_attention_combine",
    )(*inputs)
    return out


def _merge(
    acc: Any, highest: Any, total: Any, v_scale: Any, q_length: Any, *gates_and_out: Any, group: int, splits: int,
    head_rows: int,
) -> None:  # fmt: skip
    """One program: one row of one kv head of one sequence, all its splits at once."""
    *gates, out = gates_and_out  # the call may have no gates
    number, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    token, of_group = number // group, number % group
    row = of_group * head_rows + token if head_rows else number
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    exists = split < splits
    totals = pltriton.load(total.at[b, head, split, row], mask=exists, other=0.0)
    peaks = pltriton.load(highest.at[b, head, split, row], mask=exists, other=_LOWEST)
    # Sums of empty splits are loaded too, though they may be NaN, so that this load need not wait for the totals.
    rows = acc.at[_compat.row_index(b, head, split, row, acc.shape[-1])]
    parts = pltriton.load(rows, mask=exists[:, None], other=0.0)
    used = exists & (totals > 0)
    if head_rows:
        used &= token < q_length[b]
    weights = jnp.where(used, jnp.exp2(peaks - peaks.max(0)), 0.0)
    denominator = (weights * totals).sum(0)
    merged = jnp.where(used[:, None], parts * weights[:, None], 0.0).sum(0)
    merged *= v_scale[head] / jnp.where(denominator > 0, denominator, 1.0)
    merged = merged.astype(out.dtype)
    if gates:
        opened = jax.nn.sigmoid(gates[0][b, token, head, of_group, :].astype(jnp.float32))
        merged = (merged.astype(jnp.float32) * opened).astype(out.dtype)
    out[b, token, head * group + of_group, :] = merged
