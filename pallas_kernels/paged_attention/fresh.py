"""Queries, keys and values of fresh heads inside the Triton kernel, which writes the keys and values to pages."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import _compat
from pallas_kernels.lib.halves import Halves, half_rows, positioned, quantised, scaled
from pallas_kernels.lib.rotary import num_gates
from pallas_kernels.paged_attention.arguments import Fresh

_Program = tuple[Any, Any]  # sequence and kv head


def queries(fresh: Fresh, program: _Program, token: jax.Array, n: jax.Array) -> Halves:
    """Rows of query heads after norm and RoPE.

    Args:
        fresh: of references.
        program: sequence and kv head.
        token: of each row.
        n: of each row, its query head within the group.
    """
    return _rotated(fresh, program, token, num_gates(fresh.heads, fresh.rotary) + n, fresh.rotary.q_norm)


def rows(tokens: int) -> int:
    """Rows of a product's operand that hold the keys of so many tokens."""
    return max(16, pl.next_power_of_2(tokens))


def stored(
    fresh: Fresh, program: _Program, token: jax.Array, pools: tuple[Any, Any], scales: tuple[Any, Any]
) -> tuple[Halves, Halves]:
    """Write keys and values of tokens into the pools, and return them as written; zeros behind the last token."""
    slot = pltriton.load(_of_tokens(fresh.slots, program[0], token), mask=token < fresh.slots.shape[1], other=-1)
    S, J = pools[0].shape[2], fresh.heads.shape[3]
    k = _rotated(fresh, program, token, jnp.full_like(token, J - 2), fresh.rotary.k_norm)
    v = _load(fresh, program, token, jnp.full_like(token, J - 1))
    k, v = (quantised(x, scale, pool.dtype) for x, scale, pool in zip((k, v), scales, pools, strict=True))
    for x, pool in zip((k, v), pools, strict=True):
        for half, target in zip(x, half_rows(pool, slot // S, program[1], slot % S), strict=True):
            pltriton.store(target, half, mask=(slot >= 0)[:, None])
    return k, v


def _rotated(fresh: Fresh, program: _Program, token: jax.Array, row: jax.Array, norm: Any) -> Halves:
    """Row ``row`` of the heads of each token, scaled, normed and rotated."""
    rotary, exists = fresh.rotary, (token < fresh.heads.shape[1])[:, None]
    index, tables = _compat.row_index(program[0], token, rotary.cos.shape[-1]), (rotary.cos, rotary.sin)
    cos, sin = (pltriton.load(cast(Any, ref).at[index], mask=exists, other=0.0) for ref in tables)
    return positioned(_load(fresh, program, token, row), norm, rotary.eps, (cos, sin))


def _load(fresh: Fresh, program: _Program, token: jax.Array, row: jax.Array) -> Halves:
    """Row ``row`` of the heads of each token, scaled."""
    (b, head), exists = program, token < fresh.heads.shape[1]

    def load(ref: Any, *index: Any) -> Halves:
        return [pltriton.load(x, mask=exists[:, None], other=0.0) for x in half_rows(ref, *index, head, row)]

    def of_tokens(scales: Any) -> jax.Array:
        return pltriton.load(_of_tokens(scales, b, token), mask=exists, other=0.0)[:, None]

    return scaled(load(fresh.heads, b, token), fresh.rotary, of_tokens, load)


def _of_tokens(ref: Any, b: Any, token: jax.Array) -> Any:
    """Reference to the numbers of a sequence's tokens in an array [B, T]."""
    return ref.at[jnp.full_like(token, b), token]
