"""Mosaic kernels on CPUs, in JAX's interpreter of GPU kernels: a warpgroup is a thread, barriers and TMA are simulated.

``NPROC=16 python -m tests.kernels.simulated CASE`` runs one case and compares it with plain arithmetic (warpgroups that
wait keep one of so many threads of XLA each). What the interpreter lacks, or what is written in MLIR (`inline_mgpu`),
is put in as plain arithmetic: register layouts, transposed operands of wgmma, widened numbers, stores. So this tests
what a kernel waits for, copies and multiplies, and no layout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.pallas.mosaic.interpret.utils import GPULoggingInfo
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, params, shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, paged_attention, product, quantized_product_beside, quantized_swiglu, swiglu
from pallas_kernels.experts import Shared, few_tiles, mosaic_few
from pallas_kernels.largest_product import screened
from pallas_kernels.largest_product.screen import approximate, screen_of
from pallas_kernels.largest_product.terms import terms_of
from pallas_kernels.lib import int4_kv, prefetch, warp_product
from pallas_kernels.paged_attention import mosaic as attention
from pallas_kernels.paged_attention import mosaic_kernel
from pallas_kernels.quantized_product import mosaic as quantized
from pallas_kernels.quantized_product import registers, swiglu_pieces
from tests.kernels.cases import BF16, E4M3, error
from tests.kernels.test_experts import expected
from tests.kernels.test_experts_few_bits import narrow
from tests.kernels.test_quantized_product import operands
from tests.kernels.test_quantized_swiglu import gate_up

WEIGHT_FIRST = [importlib.import_module(f"pallas_kernels.{name}.weight_first") for name in ("product", "swiglu")]
swiglu_weight_first = WEIGHT_FIRST[1]


class Transposed:
    """A transposed reference to shared memory."""

    def __init__(self, ref: Any, permutation: tuple[int, int] = (1, 0)) -> None:
        assert permutation == (1, 0)
        self.ref, self.shape = ref, ref.shape[::-1]

    def __getitem__(self, index: Any) -> Any:
        return self.ref[index].T


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """Add a product to sums; the interpreter's own takes neither arrays nor transposed references."""
    dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    product = jnp.dot(a[...].astype(dtype), b[...].astype(dtype))
    trees = dict.fromkeys(("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree"))
    primitives.wgmma_ref_p.bind(acc, product, acc, **trees)


def interpret_wgmma(self: Any, equation: Any, token: Any, get_operands: Any) -> Any:
    """What the interpreter does with the primitive that `wgmma` binds."""
    acc, product, *_ = get_operands()

    def add(token: Any, place: tuple[Any, ...], key: Any, product: Any) -> Any:
        device, *grid, thread = (int(number) for number in place)
        memory = gpu_callbacks._get_shared_memory()
        thread_of_all = memory.get_global_thread_id(device, thread)
        logged = GPULoggingInfo(
            device_id=device, grid_point_coords=tuple(grid), thread_id=thread, source_info=equation.source_info
        )
        of = gpu_callbacks.HostAllocationKey.from_array(key)
        sums, _, _ = memory.get_buffer_content(of, (), thread_of_all, logging_info=logged)
        memory.store_buffer_content(of, (), sums + np.asarray(product), thread_of_all, logging_info=logged)
        return token

    place = (self.device_info.device_id, *self.grid_point_coords, self.thread_id)
    shape = gpu_callbacks.TOKEN_SHAPE_DTYPE
    return callback.io_callback(add, shape, token=token, place=place, key=acc, product=product, ordered=True), []


class Start:
    """Sums that start from an array."""

    def __init__(self, value: Any) -> None:
        self.value = value


def run_state(body: Any) -> Any:
    """As Pallas' own, for sums alone."""

    def run(starts: Any) -> Any:
        leaves, tree = jax.tree.flatten(starts)

        def added(*refs: Any) -> Any:
            body(tree.unflatten(refs))
            return tree.unflatten([start.value + ref[...] for start, ref in zip(leaves, refs, strict=True)])

        return pl.run_scoped(added, *(plgpu.ACC(start.value.shape, jnp.float32) for start in leaves))

    return run


def copy_smem_to_gmem(source: Any, target: Any, predicate: Any = None, *, copy: Any = plgpu.copy_smem_to_gmem) -> None:
    """With a predicate, which the interpreter's own does not take."""
    pl.when(True if predicate is None else predicate)(lambda: copy(source, target))


def store_transposed(array: Any, out: Any, part: Any, row: Any, kept: tuple[int, int] | None = None) -> None:
    """As `lib.stores` says."""
    first, end = kept or (0, array.shape[0])
    values = array[first:end, : out.shape[1]].T.astype(out.dtype)
    out.at[part, :, pl.ds(row + first, end - first)][...] = values


def numbers(words: Any, first: int, places: tuple[int, int]) -> Any:
    """As `quantized_product.registers` says."""
    run = words[:, first : first + registers.RUN]
    return jnp.concatenate([(run >> 4 * place & 15).astype(BF16) + registers.EXACT for place in places], axis=1)


def e4m3_numbers(words: Any, first: int, place: int) -> Any:
    """As `quantized_product.registers` says."""
    run = lax.bitcast_convert_type(words[:, first : first + registers.HALF], jnp.uint16)
    bits = (run >> 4 & 0x80) | (run >> 8 & 0x70) | (run & 0x0F) if place else (run >> 8 & 0x80) | (run >> 4 & 0x7F)
    return lax.bitcast_convert_type(bits.astype(jnp.uint8), E4M3).astype(BF16)


def split(x: Any, tokens: int) -> Any:
    """As `quantized_product.pieces` says."""
    rows = jnp.pad(x.astype(jnp.float32), ((0, tokens - len(x)), (0, 0))).reshape(tokens, -1, 128)
    factor = jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(jnp.abs(rows).max(-1), 1e-30))) - 7)
    scaled = rows / factor[..., None]
    first = scaled.astype(E4M3)
    second = (scaled - first.astype(jnp.float32)).astype(E4M3)
    return first.reshape(tokens, -1), second.reshape(tokens, -1), factor.T


def list_touched(chosen: Any, experts: int, touched: Any, copy: Any, flags: Any) -> None:
    """As `experts.pairs` says."""
    copy[...], flags[...] = chosen[...], jnp.zeros(flags.shape, jnp.int32)
    is_touched = (chosen[...][None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None]).any(1)
    number, place = (jnp.arange(size, dtype=jnp.int32) for size in (experts, chosen.shape[0]))
    rank = (is_touched[None, :] & (number[None, :] < number[:, None])).sum(1)
    listed = jnp.where(is_touched[None, :] & (rank[None, :] == place[:, None]), number[None, :], 0).sum(1)
    touched[...] = jnp.concatenate([listed, is_touched.sum()[None]]).astype(jnp.int32)


def store_chosen(sums: Any, parts: Any, rows: Any, expert: Any, chosen: Any, weights: Any, tokens: int) -> None:
    """As `experts.pairs` says."""
    k = chosen.shape[0] // tokens
    for t, j in itertools.product(range(tokens), range(k)):
        for array, row in zip(sums, rows, strict=True):

            @pl.when(chosen[t * k + j] == expert)
            def _(array: Any = array, row: Any = row, t: int = t, j: int = j) -> None:
                parts.at[j * tokens + t, pl.ds(row, array.shape[0])][...] = array[:, t] * weights[t * k + j]


def store_weighted(sums: Any, parts: Any, rows: Any, first: int, weights: Any, tokens: int) -> None:
    """As `experts.pairs` says."""
    for t in range(tokens):
        for array, row in zip(sums, rows, strict=True):
            parts.at[first + t, pl.ds(row, array.shape[0])][...] = array[:, t] * weights[t]


def multiply_beside(
    x: Any, weight: Any, out: Any, first: Any, rows: int, warpgroups: int, staged: Any, met: Any
) -> None:
    """As `lib.warp_product` says; the first consumer does it all."""
    del warpgroups, staged
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _() -> None:
        tokens, of_tile = x[...].astype(jnp.float32), weight[pl.ds(first, rows), :].astype(jnp.float32)
        out.at[0, :, pl.ds(first, rows)][...] = (tokens @ of_tile.T)[: out.shape[1]].astype(out.dtype)


def widened(numbers: Any, affine: Any) -> tuple[Any, Any]:
    """As `paged_attention.mosaic_int4` says."""
    scale, middle = (affine.at[i][...].astype(jnp.float32)[:, None] for i in range(2))
    both = numbers[...].astype(jnp.int32)
    low, high = (((part - int4_kv.CENTRE) * scale + middle).astype(jnp.float16) for part in (both & 15, both >> 4))
    return low, high


def combine(acc: Any, highest: Any, total: Any, *, args: Any, head_rows: int, interpret: bool) -> Any:
    """As `paged_attention.combine` says, for rows whose heads lie apart."""
    del interpret
    (B, T, N, H), rows = args.q.shape, args.group * head_rows
    acc, highest, total = acc[:, :, :, :rows], highest[:, :, :, :rows], total[:, :, :, :rows]
    peak = jnp.where(total > 0, highest, -jnp.inf).max(2, keepdims=True)
    weights = jnp.where(total > 0, jnp.exp2(highest - jnp.where(jnp.isfinite(peak), peak, 0)), 0)
    merged = jnp.where((total > 0)[..., None], acc * weights[..., None], 0).sum(2)
    merged /= jnp.maximum((weights * total).sum(2), 1e-30)[..., None]
    merged = merged.reshape(B, args.kv_heads, args.group, head_rows, H)[:, :, :, :T].transpose(0, 3, 1, 2, 4)
    return (merged.reshape(B, T, N, H) * jnp.repeat(args.v_scale, args.group)[:, None]).astype(args.q.dtype)


@contextlib.contextmanager
def simulated(multiprocessors: int = 6) -> Iterator[None]:
    """Kernels of Mosaic within are interpreted, on a Hopper of few multiprocessors."""
    patches = [
        (_compat, "sm_count", lambda: multiprocessors),
        (_compat, "smem_load", lambda ref, layout, optimized=True: ref[...]),
        (_compat, "smem_transpose", Transposed),
        (plgpu, "wgmma", wgmma),
        (plgpu, "layout_cast", lambda x, layout: x),
        (plgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis)),
        (plgpu, "copy_smem_to_gmem", copy_smem_to_gmem),
        (plgpu.ACC, "init", staticmethod(Start)),
        (pl, "run_state", run_state),
        (jaxpr_interpret.JaxprInterpreter, "_interpret_wgmma_ref_p", interpret_wgmma),
        # Nobody waits for the last time that a slot is given back, to which the interpreter objects.
        (shared_memory.Barrier, "deallocate", lambda self: setattr(self, "ref_count", self.ref_count - 1)),
        *((module, "store_transposed", store_transposed) for module in (*WEIGHT_FIRST, quantized, swiglu_pieces)),
        (swiglu_pieces, "split", split),
        (prefetch, "into_l2", lambda array, first, count: None),
        (registers, "numbers", numbers),
        (registers, "e4m3_numbers", e4m3_numbers),
        (mosaic_few, "store_transposed", store_transposed),
        (few_tiles, "list_touched", list_touched),
        *((mosaic_few, stand_in.__name__, stand_in) for stand_in in (store_chosen, store_weighted)),
        (warp_product, "multiply", multiply_beside),
        (attention, "combine", combine),
        (mosaic_kernel, "widened", widened),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(params.force_gpu_interpret_mode(params.InterpretGPUParams()))
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def random(*shape: int, dtype: Any = BF16, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(*arrays: Any) -> list[Any]:
    return [np.asarray(array).astype(np.float64) for array in arrays]


def weight_first() -> float:
    """Four tiles of 40 rows, of which wgmma reads more."""
    x, weight = random(12, 640), random(160, 640, seed=1)
    with simulated():
        out = jax.jit(functools.partial(product, implementation="weight_first"))(x, weight)
    exact, of_rows = wide(x, weight)
    return error(out, exact @ of_rows.T)


def weight_first_swiglu() -> float:
    """Tiles of 24 units of two parts of the weight."""
    x, weight = random(12, 256), random(2, 2, 72, 256, seed=1)
    with simulated():
        out = jax.jit(functools.partial(swiglu, implementation="weight_first"))(x, weight)
    exact, of_both = wide(x, weight)
    gate, up = np.einsum("td,ehid->htei", exact, of_both)
    return error(out, (gate / (1 + np.exp(-gate)) * up).reshape(12, -1)) / 2


def weight_first_fp8() -> float:
    """Tiles of 64 units, with scales of tokens and units."""
    x, weight = random(12, 256, dtype=E4M3), random(2, 2, 192, 256, dtype=E4M3, seed=1)
    of_tokens, of_units = (jnp.abs(random(*size, dtype=jnp.float32, seed=2)) / 16 for size in ((12,), (2, 2, 192)))
    with simulated():
        run = functools.partial(swiglu_weight_first._hidden_units, scales=(of_tokens, of_units), dtype=jnp.float32)
        out = jax.jit(run)(x, weight)
    exact, of_both = wide(x.astype(jnp.float32) * of_tokens[:, None], weight.astype(jnp.float32) * of_units[..., None])
    gate, up = np.einsum("td,ehid->htei", exact, of_both)
    return error(out, (gate / (1 + np.exp(-gate)) * up).reshape(12, -1))


def swiglu_of_pieces() -> float:
    """Two tiles of 136 units, of which three consumers have the last 64 twice; slots are used again."""
    sizes = (12,), 2, 136, 1024
    x, weight, _ = gate_up("fp8", *sizes)
    x *= jnp.exp2(jnp.arange(1024) // 128).astype(BF16)  # each group has another factor
    *_, hidden = gate_up("fp8", *sizes, x=x)
    with simulated():
        out = jax.jit(functools.partial(quantized_swiglu, implementation="mosaic_pieces"))(x, *weight)
    return error(out, hidden) / 2


def in_few_bits(kind: str) -> float:
    """Three tiles of 13 steps for 8 CTAs, which use slots again; a part of each is zero. Another weight is beside."""
    (x, *weight), exact = operands(kind, 128, (12,), 384, 13 * 256)
    other = random(16, 13 * 256)
    with simulated(9):
        run = jax.jit(functools.partial(quantized_product_beside, implementation="mosaic"))
        outs = run(x, *weight, other)
    return max(error(out, wide(x)[0] @ by.T) for out, by in zip(outs, (exact, *wide(other)), strict=True))


def experts_in_few_bits(kind: str) -> float:
    """Nine tokens of which one has no second expert, and a shared expert of two parts, for 6 CTAs."""
    (x, *weights, chosen, scales), wide_ones = narrow((9,), 2, 3, 128, 256, kinds=(kind, kind), groups=(128, 128))
    (_, *of_shared, _, _), wide_shared = narrow((9,), 1, 1, 128, 256, kinds=(kind, kind), groups=(128, 128))
    gate_up, down = (jax.tree.map(lambda part: part[0], weight) for weight in of_shared)
    gate_up = jax.tree.map(lambda part: part.reshape(2, 2, 64, -1).swapaxes(0, 1), gate_up)
    chosen, opened = chosen.at[2, 1].set(-1), jnp.linspace(0.5, 1, 9)
    with simulated():
        out = jax.jit(mosaic_few.experts)(x, *weights, chosen, scales, Shared(gate_up, down, opened))
    exact = expected(*wide_ones[:3], np.asarray(chosen), *wide_ones[4:])
    by_all = expected(wide_ones[0], *wide_shared[1:3], np.zeros((9, 1), np.int32), np.asarray(opened)[:, None])
    return error(out, exact + by_all)


def attend(dtype: Any, H: int, group: int) -> float:
    """Two sequences, the second shorter than a block, over splits of keys; a CTA has several items."""
    q, (k, v) = random(2, 16, 2 * group, H), (random(9, 2, 64, H, seed=seed) for seed in (1, 2))
    k, v = (int4_kv.quantised(pool) if dtype == int4_kv.DTYPE else pool.astype(dtype) for pool in (k, v))
    table = jnp.asarray(np.random.default_rng(3).permutation(9)[:8].reshape(2, 4), jnp.int32)
    call = (q, k, v, table, jnp.asarray([250, 9], jnp.int32), jnp.asarray([16, 9], jnp.int32))
    with simulated():
        out = jax.jit(functools.partial(paged_attention, implementation="mosaic"))(*call)
    exact = paged_attention(*call, implementation="reference")
    return max(error(out[b, :length], wide(exact[b, :length])[0]) for b, length in enumerate((16, 9)))


def screened_head(tokens: int) -> float:
    """Tiles of a head for two CTAs, the last of which overlap; rows behind a limit are the loudest."""
    x, weight, limit = random(tokens, 1152), random(5 * 256 + 96, 1152, seed=1), 1300
    copy, terms = screen_of(weight.at[limit:].multiply(9)), terms_of(x, interpret=True)
    with simulated(2):
        values, indices, upper = screened.bounded(terms, copy, jnp.int32(limit), bounds=True)
    products, exact = wide(approximate(x, copy))[0], np.einsum("td,vd->tv", *wide(x, weight))
    assert (wide(upper)[0][:tokens, :limit] >= exact[:, :limit]).all()
    assert (wide(upper)[0][:tokens, :limit] < products[:, :limit] + exact.std()).all()
    piece = np.asarray(values)[:, :tokens].argmax(0)
    np.testing.assert_array_equal(np.asarray(indices)[piece, np.arange(tokens)], products[:, :limit].argmax(1))
    return error(np.asarray(values)[:, :tokens].max(0), products[:, :limit].max(1))


CASES = {
    **{f"screened_{tokens}": functools.partial(screened_head, tokens) for tokens in (11, 64)},
    "weight_first": weight_first,
    "weight_first_swiglu": weight_first_swiglu,
    "weight_first_fp8": weight_first_fp8,
    "swiglu_of_pieces": swiglu_of_pieces,
    **{f"few_bits_{kind}": functools.partial(in_few_bits, kind) for kind in ("int4", "zeros", "fp8")},
    **{f"experts_{kind}": functools.partial(experts_in_few_bits, kind) for kind in ("int4", "zeros", "fp8")},
    **{
        f"attention_{jnp.dtype(dtype).name}_{name}": functools.partial(attend, dtype, *shape)
        for dtype, (name, shape) in itertools.product(
            (BF16, E4M3, int4_kv.DTYPE), {"in_turn": (128, 4), "shared": (128, 6), "shared_256": (256, 6)}.items()
        )
    },
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Run a Mosaic kernel on CPUs; prints its error, beside plain arithmetic."
    )
    parser.add_argument("case", choices=CASES)
    print(CASES[parser.parse_args().case]())
