"""All-reduce over the memory of peers, on Pallas' Mosaic GPU backend: no NCCL, no barrier, one kernel.

One CTA takes one row. It stores the row, word by word, into mailboxes in the memory of the other devices, and polls its
own mailboxes until they hold no word ``EMPTY``. Empty mailboxes are full of that word, and nobody sends it: so the data
are their own flag, and a row takes one trip. A call of few rows, or of two devices, sends every row to every device
(one shot). In a call of more rows, each row has one device that sums it and sends the sum to the others (two shots):
each of W devices then sends 2 (W - 1) / W of the data instead of W - 1.

Each mailbox exists three times, for calls in turn. A call fills the mailboxes of its turn and empties those of the turn
before. The mailboxes that a call fills were emptied two calls earlier, by a device that has since sent data that this
device waited for; so they are empty by now. A word in memory counts the turns of each row. Row i of a call is row i on
all devices, since all run the same calls in the same order. Data dependencies must enforce that order: XLA may run two
calls at once that do not depend on each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.all_reduce.peers import EMPTY, MAX_ROWS, THREADS, TURNS, Peers, one_shot_rows
from pallas_kernels.all_reduce.words import integer, long, place, ptx, receive, send, store, thread
from pallas_kernels.lib.norm import weighted


def slower(y: Any, peers: Peers | None) -> str | None:
    """Why the library's all-reduce is the faster one, or None."""
    del peers
    if y.size == 0:
        return "There are no rows to sum."
    if (rows := y.size // y.shape[-1]) > MAX_ROWS:
        return f"It is for up to {MAX_ROWS} rows; these are {rows}."
    return None


def refusal(y: Any, peers: Peers | None) -> str | None:
    """Why this kernel cannot sum these rows, or None."""
    if peers is None:
        return "The Mosaic all-reduce needs mailboxes (Peers.of), which GPUs have that reach each other's memory."
    rows, width, size = y.size // y.shape[-1], y.shape[-1], y.dtype.itemsize
    if size not in (2, 4):
        return f"The Mosaic all-reduce takes 16-bit and 32-bit numbers; these are {y.dtype}."
    if width * size % (4 * THREADS):
        return f"The Mosaic all-reduce needs rows of a multiple of {4 * THREADS} bytes; these have {width * size}."
    if width * size > peers.row_bytes:
        return f"The mailboxes hold rows of {peers.row_bytes} bytes; these have {width * size}."
    if rows > MAX_ROWS:
        return f"The Mosaic all-reduce takes up to {MAX_ROWS} rows; these are {rows}."
    return None


@functools.partial(jax.jit, static_argnames="eps")
def all_reduce_add_norm(
    x: Float[Array, "*T D"], y: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float, peers: Peers
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """See ``pallas_kernels.all_reduce_add_norm``."""
    if reason := refusal(y, peers):
        raise NotImplementedError(reason)
    shape, D = x.shape, x.shape[-1]
    dtype = jnp.result_type(x, y)
    layout = _layout(D, y.dtype)

    def all_reduce_add_norm_kernel(table: Any, x: Any, y: Any, weight: Any, total: Any, normed: Any) -> None:
        row = jax.lax.axis_index("row")
        before, scale = (_compat.smem_load(ref, layout) for ref in (x.at[row], weight))
        summed = _exchanged(row, y, table, peers, layout)
        rounded = (before.astype(jnp.float32) + summed.astype(jnp.float32)).astype(dtype)
        total[row] = rounded
        wide = rounded.astype(jnp.float32)
        normed[row] = weighted(wide * jax.lax.rsqrt(jnp.sum(wide * wide) / D + eps), scale, dtype)

    operands = (peers.table.reshape(-1), x.reshape(-1, D), y.reshape(-1, D), weight)
    outputs = _call(all_reduce_add_norm_kernel, operands, (dtype, dtype))
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


@jax.jit
def all_reduce(y: Float[Array, "*T D"], peers: Peers) -> Float[Array, "*T D"]:
    """See ``pallas_kernels.all_reduce``."""
    if reason := refusal(y, peers):
        raise NotImplementedError(reason)
    D = y.shape[-1]
    layout = _layout(D, y.dtype)

    def all_reduce_kernel(table: Any, y: Any, total: Any) -> None:
        row = jax.lax.axis_index("row")
        total[row] = _exchanged(row, y, table, peers, layout)

    (total,) = _call(all_reduce_kernel, (peers.table.reshape(-1), y.reshape(-1, D)), (y.dtype,))
    return total.reshape(y.shape)


def _call(kernel: Callable[..., None], operands: tuple[jax.Array, ...], dtypes: tuple[Any, ...]) -> Any:
    """Run a kernel of one warpgroup a row, whose outputs have the shape of its first operand of rows."""
    operands = _compat.vary_alike(*operands)
    rows = next(operand for operand in operands[1:] if operand.ndim == 2)
    return plgpu.kernel(
        kernel,
        out_type=[_compat.out_like(rows.shape, dtype, rows) for dtype in dtypes],
        grid=(len(rows),),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)


def _layout(width: int, dtype: Any) -> Any:
    """The layout of a row over the threads of a warpgroup, in vectors of up to 16 bytes."""
    size = jnp.dtype(dtype).itemsize
    words = next(n for n in (4, 2, 1) if width * size % (4 * n * THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=4 * words // size)


def _exchanged(row: jax.Array, y: Any, table: Any, peers: Peers, layout: Any) -> jax.Array:
    """A row of ``y`` summed over all devices in the order of their ranks, in float32, and then rounded."""
    W, D = (table.shape[0] - 1) // 2, y.shape[1]
    is_one_shot = y.shape[0] <= one_shot_rows(W)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((D,), y.dtype, layout=layout),
    )
    def exchange(ctx: Any, row: FragmentedArray, ours: FragmentedArray, table: Any) -> FragmentedArray:
        del ctx
        boxes = _Mailboxes(table, W, peers, row.registers.item(), is_one_shot)
        if is_one_shot:
            for peer in range(W):
                send(ours, boxes.of(integer(peer), boxes.rank))
            boxes.empty([*range(W)])
            total = boxes.sum(ours)
        else:
            owner = arith.remui(boxes.row, integer(W))
            send(ours, boxes.of(owner, boxes.rank))
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, owner, boxes.rank)):
                boxes.empty([*range(W)])
                summed = boxes.sum(ours)
                for peer in range(W):
                    send(summed, boxes.of(integer(peer), integer(W)))
            boxes.empty([W])
            (total,) = receive([boxes.of(boxes.rank, integer(W))], ours)
        boxes.next_turn()
        return total

    return exchange(row, _compat.smem_load(y.at[row], layout), table)


class _Mailboxes:
    """Addresses of a row's mailboxes on each device, in this turn and the one before."""

    def __init__(self, table: Any, devices: int, peers: Peers, row: Any, is_one_shot: bool) -> None:
        def word(index: Any) -> Any:
            return memref.load(table, [arith.index_cast(ir.IndexType.get(), index)])

        self._word, self._devices, self._peers, self.row = word, devices, peers, row
        self._senders = devices if is_one_shot else devices + 1
        self._is_one_shot = is_one_shot
        self.rank = word(integer(0))
        first = 0 if is_one_shot else MAX_ROWS
        state = arith.muli(long(arith.addi(row, integer(first))), long(4))
        self._state = arith.addi(self._base(self.rank), state)
        (self._turn,) = ptx("ld.relaxed.gpu.global.b32 $0, [$1];", ["r"], [("l", self._state)])

    def _base(self, device: Any) -> Any:
        low = long(self._word(arith.addi(device, integer(1))))
        high = long(self._word(arith.addi(device, integer(1 + self._devices))))
        return arith.ori(arith.shli(high, long(32)), low)

    def of(self, device: Any, sender: Any, turn: Any = None) -> Any:
        """Address of a sender's mailbox for the row on a device; ``turn`` None is this turn."""
        turn = self._turn if turn is None else turn
        of_one_shot = one_shot_rows(self._devices)
        rows = of_one_shot if self._is_one_shot else MAX_ROWS
        entry = arith.addi(arith.muli(turn, integer(rows)), self.row)
        entry = arith.addi(arith.muli(entry, integer(self._senders)), sender)
        first = 0 if self._is_one_shot else TURNS * of_one_shot * self._devices
        entry = long(arith.addi(entry, integer(first)))
        offset = arith.addi(arith.muli(entry, long(self._peers.row_bytes)), long(self._peers.header_bytes))
        return arith.addi(self._base(device), offset)

    def empty(self, senders: list[int]) -> None:
        """Empty this device's mailboxes of the turn before, in full, since that call's rows may have been longer."""
        before = arith.remui(arith.addi(self._turn, integer(TURNS - 1)), integer(TURNS))
        for sender in senders:
            address = self.of(self.rank, integer(sender), before)
            for i in range(self._peers.row_bytes // (16 * THREADS)):
                store([integer(EMPTY)] * 4, place(address, i, 4))

    def sum(self, like: FragmentedArray) -> FragmentedArray:
        """The sum of the rows that all devices sent, in like's dtype."""
        received = receive([self.of(self.rank, integer(sender)) for sender in range(self._devices)], like)
        wide = [x.astype(ir.F32Type.get()) for x in received]
        return functools.reduce(lambda a, b: a + b, wide).astype(like.mlir_dtype)

    def next_turn(self) -> None:
        """Count up the turn for the next call, once all threads have read the turn of this one."""
        utils.warpgroup_barrier()
        new = arith.remui(arith.addi(self._turn, integer(1)), integer(TURNS))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread(), integer(0))):
            ptx("st.relaxed.gpu.global.b32 [$0], $1;", [], [("l", self._state), ("r", new)])
