"""What the Triton kernel makes of fresh heads: queries, and keys and values in pages."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import _compat
from pallas_kernels.halves import Halves, half_rows, positioned, quantised, scaled
from pallas_kernels.paged_attention.arguments import Fresh

_Place = tuple[Any, Any]  # sequence and kv head of a program


def queries(fresh: Fresh, place: _Place, token: jax.Array, n: jax.Array) -> Halves:
    """Rows of query heads after norm and RoPE, given their tokens and the heads of the group; ``fresh`` is of refs."""
    return _turned(fresh, place, token, n, fresh.rotary.q_norm)


def rows(tokens: int) -> int:
    """So many rows a product takes for keys of so many tokens."""
    return max(16, pl.next_power_of_2(tokens))


def stored(
    fresh: Fresh, place: _Place, token: jax.Array, pools: tuple[Any, Any], scales: tuple[Any, Any]
) -> tuple[Halves, Halves]:
    """Writes keys and values of tokens into the pools, and returns what was written; zeros behind the last token."""
    slot = pltriton.load(_each(fresh.slots, place[0], token), mask=token < fresh.slots.shape[1], other=-1)
    S, J = pools[0].shape[2], fresh.heads.shape[3]
    k = _turned(fresh, place, token, jnp.full_like(token, J - 2), fresh.rotary.k_norm)
    v = _load(fresh, place, token, jnp.full_like(token, J - 1))
    k, v = (quantised(x, scale, pool.dtype) for x, scale, pool in zip((k, v), scales, pools, strict=True))
    for x, pool in zip((k, v), pools, strict=True):
        for half, target in zip(x, half_rows(pool, slot // S, place[1], slot % S), strict=True):
            pltriton.store(target, half, mask=(slot >= 0)[:, None])
    return k, v


def _turned(fresh: Fresh, place: _Place, token: jax.Array, row: jax.Array, norm: Any) -> Halves:
    rotary, real = fresh.rotary, (token < fresh.heads.shape[1])[:, None]
    at, tables = _compat.row_index(place[0], token, rotary.cos.shape[-1]), (rotary.cos, rotary.sin)  # of references
    cos, sin = (pltriton.load(cast(Any, x).at[at], mask=real, other=0.0) for x in tables)
    return positioned(_load(fresh, place, token, row), norm, rotary.eps, (cos, sin))


def _load(fresh: Fresh, place: _Place, token: jax.Array, row: jax.Array) -> Halves:
    """Row ``row`` of the heads of each token, scaled."""
    (b, head), real = place, token < fresh.heads.shape[1]

    def load(ref: Any, *index: Any) -> Halves:
        return [pltriton.load(x, mask=real[:, None], other=0.0) for x in half_rows(ref, *index, head, row)]

    def of_tokens(scales: Any) -> jax.Array:
        return pltriton.load(_each(scales, b, token), mask=real, other=0.0)[:, None]

    return scaled(load(fresh.heads, b, token), fresh.rotary, of_tokens, load)


def _each(ref: Any, b: Any, token: jax.Array) -> Any:
    """Where a number of each token of a sequence stands."""
    return ref.at[jnp.full_like(token, b), token]
