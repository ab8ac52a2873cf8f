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
from pallas_kernels.lib.int4_halves import packed
from pallas_kernels.lib.int4_kv import KeyRounding, Pages, is_int4, narrow_bytes
from pallas_kernels.lib.rotary import Rotary, num_gates, num_queries, pairs_of

_GIB = 1 << 30


def refusal(k_pages: Any) -> str | None:
    """Why the Triton backend cannot write this pool, or None."""
    H = k_pages.shape[-1]
    if H & (H - 1):
        return f"The Triton page write needs a head size that is a power of two; this is {H}."
    if 2 * _GIB < (size := narrow_bytes(k_pages)) <= 4 * _GIB:
        return (
            f"Pallas' Triton backend addresses an 8-bit pool of {size / _GIB:.2f} GiB with 32-bit offsets, "
            "which overflow between 2 and 4 GiB: use a pool of at most 2 GiB or of more than 4 GiB."
        )
    return None


@functools.partial(jax.jit, static_argnames=("interpret", "num_warps"))
def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    heads: Float[Array, "T K J H"],
    slots: Int[Array, " T"],
    rotary: Rotary | None,
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
    k_rounding: KeyRounding | None,
    *,
    interpret: bool = False,
    num_warps: int = 1,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """See ``pallas_kernels.write_kv``."""
    if reason := refusal(k_pages):
        raise NotImplementedError(reason)
    T, K, _, H = heads.shape
    shape = (T, K * num_queries(heads, rotary), H)
    if T == 0:
        return jnp.zeros(shape, heads.dtype), k_pages, v_pages
    operands = (k_pages, v_pages, heads, slots, rotary, k_scale, v_scale, k_rounding)
    queries = [(shape, heads.dtype)] * (shape[1] > 0)
    k_pages, v_pages, *outputs = _call(
        _write, operands, queries, grid=(T, K), num_warps=num_warps, interpret=interpret, name="write_kv"
    )
    return outputs[0] if outputs else heads[:, :, :0].reshape(shape), k_pages, v_pages


@functools.partial(jax.jit, static_argnames=("first_pages", "interpret"))
def write_context(
    k_pages: Pages,
    v_pages: Pages,
    heads: Sequence[Float[Array, "T K _ H"]],
    slots: Int[Array, " T"],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    k_scale: Float[Array, "L K"],
    v_scale: Float[Array, "L K"],
    k_rounding: KeyRounding | None,
    *,
    first_pages: tuple[tuple[int, int], ...],
    interpret: bool = False,
) -> tuple[Pages, Pages]:
    """See ``pallas_kernels.write_kv.write_context``."""
    if reason := refusal(k_pages):
        raise NotImplementedError(reason)
    if slots.size == 0:
        return k_pages, v_pages
    operands = (k_pages, v_pages, heads, slots, rotary, k_norms, k_scale, v_scale, k_rounding)
    kernel, grid = functools.partial(_write_context, first_pages=first_pages), (slots.size, k_pages.shape[1])
    pools = _call(kernel, operands, [], grid=grid, num_warps=1, interpret=interpret, name="write_context")
    return pools[0], pools[1]


def _call(
    kernel: Callable[..., None], operands: Any, outputs: Sequence[tuple[tuple[int, ...], Any]], **how: Any
) -> list[Any]:
    """Run a kernel on operands whose first two are the pools, which it writes in place.

    Returns:
        The two pools, and outputs of the given shapes and dtypes.
    """
    leaves, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, _compat.vary_alike(*leaves))
    first = jax.tree.leaves(operands)[0]
    pools = jax.tree.map(lambda array: _compat.out_like(array.shape, array.dtype, first), operands[:2])
    out_shape = [*pools, *(_compat.out_like(shape, dtype, first) for shape, dtype in outputs)]
    aliases = {i: i for i in range(len(jax.tree.leaves(pools)))}
    call = _compat.triton_call(kernel, out_shape=out_shape, aliases=aliases, num_stages=1, **how)
    results: list[Any] = call(*operands)
    return results


def _write(
    k_in: Any, v_in: Any, heads: Any, slots: Any, rotary: Any, k_scale: Any, v_scale: Any, k_rounding: Any,
    k_pages: Any, v_pages: Any, *queries: Any,
) -> None:  # fmt: skip
    """One program: one token's heads of one kv head. ``rotary`` is a Rotary of references."""
    del k_in, v_in  # the outputs are aliases of them
    token, head = pl.program_id(0), pl.program_id(1)
    R, S, slot = num_queries(heads, rotary), k_pages.shape[2], slots[token]
    first, key = num_gates(heads, rotary), heads.shape[2] - 2
    q_norm, k_norm = (None, None) if rotary is None else (rotary.q_norm, rotary.k_norm)

    def load_half_heads(load: Callable[..., Halves]) -> Halves:
        """Scaled halves of heads; ``load`` reads them from a reference, given the indices in front of the head."""
        return scaled(load(heads, token), rotary, lambda scales: scales[token], load)

    k, v = (load_half_heads(lambda ref, *index, row=row: _halves(ref, *index, head, row)) for row in (key, key + 1))
    rotate = functools.partial(_positioned, rotary=rotary, token=token)
    k = rotate(k, k_norm)

    if queries:
        row = jnp.arange(pl.next_power_of_2(R), dtype=jnp.int32)
        exists = (row < R)[:, None]

        def load(ref: Any, *index: Any) -> Halves:
            return [pltriton.load(x, mask=exists, other=0.0) for x in half_rows(ref, *index, head, first + row)]

        q = rotate(load_half_heads(load), q_norm)
        for x, target in zip(q, half_rows(queries[0], token, head * R + row), strict=True):
            pltriton.store(target, x, mask=exists)

    # All loads come before the branch, so that none of them waits for the load of the slot.
    k = _encoded(k, k_scale[head], k_pages, is_key=True, rounding=k_rounding, head=(head,))
    v = _encoded(v, v_scale[head], v_pages, is_key=False)

    @pl.when(slot >= 0)
    def _():
        _store((k_pages, v_pages), (slot // S, head, slot % S), (k, v))


def _write_context(
    k_in: Any, v_in: Any, heads: Any, slots: Any, rotary: Any, k_norms: Any, k_scale: Any, v_scale: Any,
    k_rounding: Any, k_pages: Any, v_pages: Any, *, first_pages: Sequence[tuple[int, int]],
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
        key = _encoded(k, k_scale[layer, head], k_pages, is_key=True, rounding=k_rounding, head=(layer, head))
        stored.append((first_page, key, _encoded(v, v_scale[layer, head], v_pages, is_key=False)))

    @pl.when(slot >= 0)
    def _():
        for first_page, k, v in stored:
            _store((k_pages, v_pages), (first_page + slot // S, head, slot % S), (k, v))


def _halves(ref: Any, *index: Any) -> Halves:
    """Load the two halves of the head at an index."""
    half = ref.shape[-1] // 2
    return [ref[*index, pl.ds(start, half)] for start in (0, half)]


def _encoded(
    x: Halves, scale: Any, pages: Any, *, is_key: bool, rounding: KeyRounding | None = None, head: tuple[Any, ...] = ()
) -> Any:
    """A key or a value as the pages keep it: halves of floating numbers, or 4-bit numbers with scale and middle."""
    if is_int4(pages):
        return packed(x, scale, is_key=is_key, rounding=rounding, head=head)
    return quantised(x, scale, pages.dtype)


def _store(pools: tuple[Any, Any], where: tuple[Any, ...], encoded: tuple[Any, Any]) -> None:
    """Write a key and its value, as of ``_encoded``, to an index of the pools."""
    for pages, x in zip(pools, encoded, strict=True):
        if is_int4(pages):
            pages.numbers[*where, :] = x.numbers
            pages.scale[*where] = x.scale
            pages.middle[*where] = x.middle
            continue
        half = pages.shape[-1] // 2
        for start, part in zip((0, half), x, strict=True):
            pages[*where, pl.ds(start, half)] = part


def _positioned(x: Halves, norm: Any, rotary: Rotary | None, token: Any) -> Halves:
    """A token's head after norm and RoPE, if there is a rotary."""
    if rotary is None:
        return x
    return positioned(x, norm, rotary.eps, (rotary.cos[token], rotary.sin[token]))
