"""Writing keys and values into pages on Pallas' Triton backend: one program a token, pools aliased in and out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat

_GIB = 1 << 30


def refusal(k_pages: jax.Array) -> str | None:
    """Why the Triton backend cannot write this pool, or None."""
    H = k_pages.shape[-1]
    if H & (H - 1):
        return f"The Triton page write needs a head size that is a power of two; this is {H}."
    if k_pages.dtype.itemsize == 1 and 2 * _GIB < k_pages.size <= 4 * _GIB:
        return (
            f"Pallas' Triton backend addresses an 8-bit pool of {k_pages.size / _GIB:.2f} GiB with 32-bit offsets, "
            "which overflow between 2 and 4 GiB: use a pool of at most 2 GiB or of more than 4 GiB."
        )
    return None


def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, " T"],
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
    *,
    interpret: bool = False,
    num_warps: int = 4,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """See ``pallas_kernels.write_kv``."""
    if reason := refusal(k_pages):
        raise NotImplementedError(reason)
    if slots.shape[0] == 0:
        return k_pages, v_pages
    inputs = _compat.vary_alike(k_pages, v_pages, k, v, slots, k_scale, v_scale)
    return tuple(
        _compat.triton_call(
            functools.partial(_write, heads=k_pages.shape[1], page_size=k_pages.shape[2]),
            grid=(slots.shape[0],),
            out_shape=[_compat.out_like(k_pages.shape, k_pages.dtype, inputs[0])] * 2,
            aliases={0: 0, 1: 1},
            num_warps=num_warps,
            num_stages=1,
            interpret=interpret,
            name="write_kv",
        )(*inputs)
    )


def _write(
    k_in: Any, v_in: Any, k: Any, v: Any, slots: Any, k_scale: Any, v_scale: Any, k_pages: Any, v_pages: Any,
    *, heads: int, page_size: int,
) -> None:  # fmt: skip
    """One program: one token, all its kv heads."""
    del k_in, v_in  # the same memory as the outputs
    token = pl.program_id(0)
    slot = slots[token]
    head = jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32)
    real = head < heads

    @pl.when(slot >= 0)
    def _():
        for source, scale, target in ((k, k_scale, k_pages), (v, v_scale, v_pages)):
            limit = _compat.max_finite(target.dtype)
            x = pltriton.load(
                source.at[_compat.row_index(token, head, source.shape[-1])], mask=real[:, None], other=0.0
            ).astype(jnp.float32)
            x = x / pltriton.load(scale.at[head], mask=real, other=1.0)[:, None]
            where = target.at[_compat.row_index(slot // page_size, head, slot % page_size, target.shape[-1])]
            pltriton.store(where, jnp.clip(x, -limit, limit).astype(target.dtype), mask=real[:, None])
