"""Merging the splits of a call: the softmax over all keys from the softmaxes over parts of them."""

from __future__ import annotations

import functools
from typing import Any

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
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Merge the partial sums of all splits; a split with a total of 0 is empty, and its sums are not used.

    Args:
      acc: sums of values weighted with ``2 ** (logit - highest)``, unnormalised. Rows r are token * group + head.
      highest: largest base-2 logit of each row in the split.
      total: sums of the weights.
      args: the call.
      interpret: run in Pallas' interpreter.
    """
    B, T, N, H = args.q.shape
    inputs = _compat.vary_alike(acc, highest, total, args.v_scale)
    [out] = _compat.triton_call(
        functools.partial(_merge, group=args.group, splits=acc.shape[2]),
        grid=(T * args.group, args.kv_heads, B),
        out_shape=[_compat.out_like((B, T, N, H), args.q.dtype, inputs[0])],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="paged_attention_combine",
    )(*inputs)
    return out


def _merge(acc: Any, highest: Any, total: Any, v_scale: Any, out: Any, *, group: int, splits: int) -> None:
    """One program: one row of one kv head of one sequence, all its splits at once."""
    row, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    exists = split < splits
    totals = pltriton.load(total.at[b, head, split, row], mask=exists, other=0.0)
    peaks = pltriton.load(highest.at[b, head, split, row], mask=exists, other=_LOWEST)
    # Sums of empty splits are loaded too, though they may be NaN, so that this load need not wait for the totals.
    rows = acc.at[_compat.row_index(b, head, split, row, acc.shape[-1])]
    parts = pltriton.load(rows, mask=exists[:, None], other=0.0)
    used = exists & (totals > 0)
    weights = jnp.where(used, jnp.exp2(peaks - peaks.max(0)), 0.0)
    denominator = (weights * totals).sum(0)
    merged = jnp.where(used[:, None], parts * weights[:, None], 0.0).sum(0)
    merged *= v_scale[head] / jnp.where(denominator > 0, denominator, 1.0)
    out[b, row // group, head * group + row % group, :] = merged.astype(out.dtype)


def combine_jnp(
    acc: Float[Array, "B K splits group R H"],
    highest: Float[Array, "B K splits group R"],
    total: Float[Array, "B K splits group R"],
    *,
    args: Arguments,
) -> Float[Array, "B T N H"]:
    """``combine`` in plain jnp, for sums by query head.

    Rows past ``q_length`` may hold anything, and become zeros.
    """
    B, T, N, H = args.q.shape
    acc, highest, total = acc[..., :T, :], highest[..., :T], total[..., :T]
    exists = jnp.arange(T, dtype=jnp.int32)[None] < args.q_length[:, None]
    used = (total > 0) & exists[:, None, None, None]
    weights = jnp.where(used, jnp.exp2(highest - highest.max(2, keepdims=True)), 0.0)
    denominator = (weights * total).sum(2)
    factor = args.v_scale[None, :, None, None] / jnp.where(denominator > 0, denominator, 1.0)
    merged = (jnp.where(used[..., None], acc, 0.0) * weights[..., None]).sum(2) * factor[..., None]
    return jnp.moveaxis(merged, 3, 1).reshape(B, T, N, H).astype(args.q.dtype)
