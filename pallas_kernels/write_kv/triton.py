"""The page write on Pallas' Triton backend: one program a token and kv head, pools aliased in and out.

The two halves of a head are loaded, turned and stored apart (see ``halves``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.halves import Halves, half_rows, halves_of, positioned, quantised, scaled
from pallas_kernels.rotary import Rotary

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


@functools.partial(jax.jit, static_argnames=("interpret", "num_warps"))
def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    heads: Float[Array, "T K J H"],
    slots: Int[Array, " T"],
    rotary: Rotary | None,
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
    *,
    interpret: bool = False,
    num_warps: int = 1,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """See ``pallas_kernels.write_kv``."""
    if reason := refusal(k_pages):
        raise NotImplementedError(reason)
    T, K, J, H = heads.shape
    shape = (T, K * (J - 2), H)
    if T == 0:
        return heads.reshape(shape), k_pages, v_pages
    leaves, tree = jax.tree.flatten((k_pages, v_pages, heads, slots, rotary, k_scale, v_scale))
    operands = _compat.vary_alike(*leaves)
    pool = _compat.out_like(k_pages.shape, k_pages.dtype, operands[0])
    queries = _compat.out_like(shape, heads.dtype, operands[0])
    k_pages, v_pages, *found = _compat.triton_call(
        _write,
        grid=(T, K),
        out_shape=[pool, pool] + [queries] * (J > 2),
        aliases={0: 0, 1: 1},
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="write_kv",
    )(*jax.tree.unflatten(tree, operands))
    return found[0] if found else heads[:, :, :0].reshape(shape), k_pages, v_pages


def _write(
    k_in: Any, v_in: Any, heads: Any, slots: Any, rotary: Any, k_scale: Any, v_scale: Any,
    k_pages: Any, v_pages: Any, *queries: Any,
) -> None:  # fmt: skip
    """One program: one token's heads of one kv head. ``rotary`` is a Rotary of references."""
    del k_in, v_in  # the same memory as the outputs
    token, head = pl.program_id(0), pl.program_id(1)
    R, S, half = heads.shape[2] - 2, k_pages.shape[2], heads.shape[3] // 2
    halves = pl.ds(0, half), pl.ds(half, half)
    slot = slots[token]
    q_norm, k_norm = (None, None) if rotary is None else (rotary.q_norm, rotary.k_norm)

    def load_half_heads(load: Callable[..., Halves]) -> Halves:
        """``load`` reads halves of heads of a reference, given its indices before the head."""
        return scaled(load(heads, token), rotary, lambda scales: scales[token], load)

    k, v = (load_half_heads(lambda ref, *i, row=row: [ref[*i, head, row, h] for h in halves]) for row in (R, R + 1))
    turn = functools.partial(_positioned, rotary=rotary, token=token)
    k = turn(k, k_norm)

    if queries:
        row = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
        real = (row < R)[:, None]

        def load(ref: Any, *index: Any) -> Halves:
            return [pltriton.load(x, mask=real, other=0.0) for x in half_rows(ref, *index, head, row)]

        q = turn(load_half_heads(load), q_norm)
        for x, target in zip(q, half_rows(queries[0], token, head * R + row), strict=True):
            pltriton.store(target, x, mask=real)

    # All loads stand before the branch: none of them waits for the slot's.
    k, v = quantised(k, k_scale[head], k_pages.dtype), quantised(v, v_scale[head], v_pages.dtype)

    @pl.when(slot >= 0)
    def _():
        for h, k_half, v_half in zip(halves, k, v, strict=True):
            k_pages[slot // S, head, slot % S, h] = k_half
            v_pages[slot // S, head, slot % S, h] = v_half


def _positioned(x: Halves, norm: Any, rotary: Rotary | None, token: Any) -> Halves:
    if rotary is None:
        return x
    return positioned(x, halves_of(norm), rotary.eps, (rotary.cos[token], rotary.sin[token]))
