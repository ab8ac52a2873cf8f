"""The page writes on Pallas' Triton backend: one program for each token and kv head, pools aliased in and out.

The two halves of a head are loaded, rotated and stored apart (see ``lib.halves``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.lib.halves import Halves, half_rows, positioned, quantised, scaled
from pallas_kernels.lib.rotary import Rotary, pairs_of

_GIB = 1 << 30


def refusal(k_pages: Any) -> str | None:
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
    operands = (k_pages, v_pages, heads, slots, rotary, k_scale, v_scale)
    queries = [(shape, heads.dtype)] * (J > 2)
    k_pages, v_pages, *outputs = _call(
        _write, operands, queries, grid=(T, K), num_warps=num_warps, interpret=interpret, name="write_kv"
    )
    return outputs[0] if outputs else heads[:, :, :0].reshape(shape), k_pages, v_pages


@functools.partial(jax.jit, static_argnames=("first_pages", "interpret"))
def write_context(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    heads: Sequence[Float[Array, "T K _ H"]],
    slots: Int[Array, " T"],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    k_scale: Float[Array, "L K"],
    v_scale: Float[Array, "L K"],
    *,
    first_pages: tuple[tuple[int, int], ...],
    interpret: bool = False,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """See ``pallas_kernels.write_kv.write_context``."""
    if reason := refusal(k_pages):
        raise NotImplementedError(reason)
    if slots.size == 0:
        return k_pages, v_pages
    operands = (k_pages, v_pages, heads, slots, rotary, k_norms, k_scale, v_scale)
    kernel, grid = functools.partial(_write_context, first_pages=first_pages), (slots.size, k_pages.shape[1])
    pools = _call(kernel, operands, [], grid=grid, num_warps=1, interpret=interpret, name="write_context")
    return pools[0], pools[1]


def _call(
    kernel: Callable[..., None], operands: Any, outputs: Sequence[tuple[tuple[int, ...], Any]], **how: Any
) -> list[jax.Array]:
    """Run a kernel on operands whose first two are the pools, which it writes in place.

    Returns:
        The two pools, and outputs of the given shapes and dtypes.
    """
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    pools = [(pool.shape, pool.dtype) for pool in leaves[:2]]
    out_shape = [_compat.out_like(shape, dtype, leaves[0]) for shape, dtype in (*pools, *outputs)]
    call = _compat.triton_call(kernel, out_shape=out_shape, aliases={0: 0, 1: 1}, num_stages=1, **how)
    results: list[jax.Array] = call(*jax.tree.unflatten(tree, leaves))
    return results


def _write(
    k_in: Any, v_in: Any, heads: Any, slots: Any, rotary: Any, k_scale: Any, v_scale: Any,
    k_pages: Any, v_pages: Any, *queries: Any,
) -> None:  # fmt: skip
    """One program: one token's heads of one kv head. ``rotary`` is a Rotary of references."""
    del k_in, v_in  # the outputs are aliases of them
    token, head = pl.program_id(0), pl.program_id(1)
    R, S, slot = heads.shape[2] - 2, k_pages.shape[2], slots[token]
    q_norm, k_norm = (None, None) if rotary is None else (rotary.q_norm, rotary.k_norm)

    def load_half_heads(load: Callable[..., Halves]) -> Halves:
        """Scaled halves of heads; ``load`` reads them from a reference, given the indices in front of the head."""
        return scaled(load(heads, token), rotary, lambda scales: scales[token], load)

    k, v = (load_half_heads(lambda ref, *index, row=row: _halves(ref, *index, head, row)) for row in (R, R + 1))
    rotate = functools.partial(_positioned, rotary=rotary, token=token)
    k = rotate(k, k_norm)

    if queries:
        row = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
        exists = (row < R)[:, None]

        def load(ref: Any, *index: Any) -> Halves:
            return [pltriton.load(x, mask=exists, other=0.0) for x in half_rows(ref, *index, head, row)]

        q = rotate(load_half_heads(load), q_norm)
        for x, target in zip(q, half_rows(queries[0], token, head * R + row), strict=True):
            pltriton.store(target, x, mask=exists)

    # All loads come before the branch, so that none of them waits for the load of the slot.
    k, v = quantised(k, k_scale[head], k_pages.dtype), quantised(v, v_scale[head], v_pages.dtype)

    @pl.when(slot >= 0)
    def _():
        _store(k_pages, v_pages, (slot // S, head, slot % S), k, v)


def _write_context(
    k_in: Any, v_in: Any, heads: Any, slots: Any, rotary: Any, k_norms: Any, k_scale: Any, v_scale: Any,
    k_pages: Any, v_pages: Any, *, first_pages: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """One program: one token's keys and values of one kv head, for all layers of the pool."""
    del k_in, v_in  # the outputs are aliases of them
    token, head = pl.program_id(0), pl.program_id(1)
    S, slot, pairs = k_pages.shape[2], slots[token], pairs_of(heads)

    def load(layer: int) -> list[Halves]:
        array, key = pairs[layer]
        return [_halves(array, token, head, row) for row in (key, key + 1)]

    # All heads are loaded before any is processed, so that the loads overlap.
    loaded = [load(layer) for layer, _ in first_pages]
    stored = []
    for (layer, first_page), (k, v) in zip(first_pages, loaded, strict=True):
        k = _positioned(k, k_norms[layer], rotary, token)
        k, v = quantised(k, k_scale[layer, head], k_pages.dtype), quantised(v, v_scale[layer, head], v_pages.dtype)
        stored.append((first_page, k, v))

    @pl.when(slot >= 0)
    def _():
        for first_page, k, v in stored:
            _store(k_pages, v_pages, (first_page + slot // S, head, slot % S), k, v)


def _halves(ref: Any, *index: Any) -> Halves:
    """Load the two halves of the head at an index."""
    half = ref.shape[-1] // 2
    return [ref[*index, pl.ds(start, half)] for start in (0, half)]


def _store(k_pages: Any, v_pages: Any, where: tuple[Any, ...], k: Halves, v: Halves) -> None:
    """Write the halves of a key and of its value to an index of the pools."""
    half = k_pages.shape[-1] // 2
    for start, k_half, v_half in zip((0, half), k, v, strict=True):
        h = pl.ds(start, half)
        k_pages[*where, h] = k_half
        v_pages[*where, h] = v_half


def _positioned(x: Halves, norm: Any, rotary: Rotary | None, token: Any) -> Halves:
    """A token's head after norm and RoPE, if there is a rotary."""
    if rotary is None:
        return x
    return positioned(x, norm, rotary.eps, (rotary.cos[token], rotary.sin[token]))
