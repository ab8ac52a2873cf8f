"""Verify and fold of Gated DeltaNet on Pallas' Triton backend, in two kernels a layer.

The first (`prepare`) makes of raw projections what the recurrence takes. In the second, a program has some columns of
one head's state: a column of S needs no other. It holds them in registers, folds the accepted tokens of the tape into
them one by one, writes them back, and goes on over the block without writing: each state is read once and written once
a round. A state comes from these folds alone, so its bits are the same whether a token was decoded, verified or folded.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.prepare import Block, Mixed, Rows, prepare, rows_of
from pallas_kernels.gated_delta.reference import Kept, Weights
from pallas_kernels.gated_delta.tokens import at, load, move_share

Form = Literal["recurrence", "rows", "tf32x3", "bf16x3", "bf16x6"]
_Product = jax.lax.DotAlgorithmPreset | jax.lax.Precision | None
_PRODUCTS: dict[str, _Product] = {
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x3": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16x6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}


class Config(NamedTuple):
    """How the second kernel is cut. States have the same bits only under one number of columns and warps.

    Attributes:
        columns: of the state, a program.
        num_warps: of a program.
        form: of the block: "recurrence" runs token by token, "rows" is a product with S in float32, and the others are
            that product on tensor cores in several terms.
    """

    columns: int = 32
    num_warps: int = 2
    form: Form = "recurrence"


DEFAULT = Config()
MOST_TOKENS = 64  # of a tape, which the first kernel holds in registers


def refusal(kept: Kept, weights: Weights) -> str | None:
    """Say why the Triton backend cannot do this call, or None."""
    del weights
    if (tokens := kept.gates.shape[1]) > MOST_TOKENS:
        return f"The Triton kernels need tapes of at most {MOST_TOKENS} tokens; this has {tokens}."
    for name, size in zip(("key", "value"), kept.state.shape[-2:], strict=True):
        if size & (size - 1) or size < 16:
            return f"The Triton kernels need {name} heads of a power of two from 16 on; this is {size}."
    return None


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def verify(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
    *,
    config: Config = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """See ``pallas_kernels.gated_delta.verify``."""
    if reason := refusal(kept, weights):
        raise NotImplementedError(reason)
    block = Block(inputs.astype(kept.inputs.dtype), gates.astype(kept.gates.dtype), length)
    mixes = config.form != "recurrence" and inputs.shape[1] > 1
    tape, prepared = prepare(kept, weights, rows, count, block, mixes=mixes, interpret=interpret)
    B, T, _, _ = inputs.shape
    HV, _, dv = kept.state.shape[1:]
    [*after, outputs] = _call(
        (*kept, rows, count, rows, tape, prepared, block),
        [((B, T, HV, dv), inputs.dtype)],
        config=config,
        interpret=interpret,
    )
    return outputs, Kept(*after)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def fold(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    targets: Int[Array, " B"],
    *,
    config: Config = DEFAULT,
    interpret: bool = False,
) -> Kept:
    """See ``pallas_kernels.gated_delta.fold``."""
    if reason := refusal(kept, weights):
        raise NotImplementedError(reason)
    tape, _ = prepare(kept, weights, rows, count, None, mixes=False, interpret=interpret)
    operands = (*kept, rows, count, targets, tape, None, None)
    return Kept(*_call(operands, [], config=config, interpret=interpret))


def _call(operands: Any, outputs: list[tuple[tuple[int, ...], Any]], *, config: Config, interpret: bool) -> list[Any]:
    """Run the second kernel; `operands` begin with what is kept, which it writes in place.

    Returns:
        What is kept, and outputs of the given shapes and dtypes.
    """
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    _, heads, _, value_dim = operands[0].shape
    columns = min(config.columns, value_dim)
    kept = [(array.shape, array.dtype) for array in operands[:3]]
    product = _PRODUCTS.get(config.form)
    if interpret and product is not None:
        product = jax.lax.Precision.HIGHEST  # a CPU has no product in several terms
    results: list[Any] = _compat.triton_call(
        functools.partial(_advance, columns=columns, product=product, is_plain=interpret),
        grid=(len(operands[3]), heads, value_dim // columns),
        out_shape=[_compat.out_like(shape, dtype, leaves[0]) for shape, dtype in (*kept, *outputs)],
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name="gated_delta_verify" if outputs else "gated_delta_fold",
        aliases={0: 0, 1: 1, 2: 2},
    )(*jax.tree.unflatten(tree, leaves))
    return results


class _Part(NamedTuple):
    """What a program has: some columns of one head of one sequence."""

    b: Any
    key: Any
    head: Any
    column: Any  # number of the group of columns
    columns: Any  # a pl.ds


def _advance(
    state_in: Any, inputs_in: Any, gates_in: Any, rows: Any, count: Any, targets: Any,
    tape: Any, prepared: Any, block: Any, state: Any, inputs: Any, gates: Any, *outputs: Any,
    columns: int, product: _Product, is_plain: bool,
) -> None:  # fmt: skip
    """One program; without a block, it only folds."""
    del state_in, inputs_in, gates_in  # the outputs are aliases of them
    b, head, column = (pl.program_id(axis) for axis in range(3))
    part = _Part(b, head // (state.shape[1] // inputs.shape[2]), head, column, pl.ds(column * columns, columns))
    is_sequence, row, folded = rows_of(rows, count, b, state, gates.shape[1])
    target = targets[b]
    is_written = is_sequence & (target >= 0) & (target < state.shape[0])
    target = jnp.where(is_written, target, 0)
    S = state[row, head, :, part.columns]

    @pl.when(is_written)
    def _() -> None:
        _write_tape(inputs, gates, block, (row, folded, target), part, state.shape[1:], is_plain)

    S = _folded(S, tape, part, folded)

    @pl.when(is_written if block is None else is_written & (folded > 0))
    def _() -> None:
        state[target, head, :, part.columns] = S

    if isinstance(prepared, Rows):
        _run_rows(S, prepared, part, outputs[0])
    if isinstance(prepared, Mixed):
        _run_mixed(S, prepared, part, outputs[0], product)


def _write_tape(
    inputs: Any, gates: Any, block: Any, places: tuple[Any, Any, Any], part: _Part, sizes: tuple[int, ...],
    is_plain: bool,
) -> None:  # fmt: skip
    """Write a program's share of the inputs before the new tape, and of the block, which becomes the tape."""
    (row, folded, target), (HV, *head_sizes) = places, sizes
    group, before = HV // inputs.shape[2], inputs.shape[1] - gates.shape[1]
    b, key, head, column, columns = part

    def move(channels: Array) -> None:
        moved = [at(inputs, row, folded + j, key, channels)[...] for j in range(before)]
        if not is_plain:
            pltriton.debug_barrier()  # one warp may write what another one reads
        for j, raw in enumerate(moved):
            pltriton.store(at(inputs, target, j, key, channels), raw)
        if block is not None:
            t, exists = _rows(block)
            raw = load(block.inputs, b, t[:, None], key, channels[None, :], where=exists[:, None])
            mask = jnp.broadcast_to(exists[:, None], raw.shape)
            pltriton.store(at(inputs, target, before + t[:, None], key, channels[None, :]), raw, mask=mask)

    move_share(move, head, column, columns.size, (group, *head_sizes))

    if block is not None:

        @pl.when(column == 0)
        def _() -> None:
            t, exists = _rows(block)
            i = jnp.arange(2, dtype=jnp.int32)[None, :]
            raw = load(block.gates, b, t[:, None], head, i, where=exists[:, None])
            mask = jnp.broadcast_to(exists[:, None], raw.shape)
            pltriton.store(at(gates, target, t[:, None], head, i), raw, mask=mask)


def _rows(block: Any) -> tuple[Array, Array]:
    T = block.inputs.shape[1]
    t = jnp.arange(pl.next_power_of_2(T), dtype=jnp.int32)
    return t, t < T


def _token(rows: Any, part: _Part, t: Any) -> tuple[Array, ...]:
    """Load key, value, decay and strength of a token."""
    b, key, head, _, columns = part
    value = rows.values[b, head, t, columns].astype(jnp.float32)
    return rows.keys[b, key, t, :], value, rows.decay[b, head, t], rows.strength[b, head, t]


def _written(S: Array, k: Array, v: Array, decay: Array, strength: Array) -> Array:
    """Write a token to the state: the one place that does so."""
    S = S * decay
    d = strength * (v - jnp.sum(S * k[:, None], axis=0))
    return S + k[:, None] * d[None, :]


def _folded(S: Array, tape: Any, part: _Part, count: Any) -> Array:
    """Fold the first tokens of the tape; the next one is loaded while one is written."""
    last = tape.values.shape[2] - 1

    def step(t: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        S, *token = carry
        following = _token(tape, part, jnp.minimum(t + 1, last))
        return _written(S, *token), *following

    S, *_ = jax.lax.fori_loop(0, count, step, (S, *_token(tape, part, 0)))
    return S


def _run_rows(S: Array, rows: Any, part: _Part, outputs: Any) -> None:
    """Run a block token by token."""
    b, key, head, _, columns = part
    last = outputs.shape[1] - 1

    def step(t: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        S, q, *token = carry
        after = jnp.minimum(t + 1, last)
        following = rows.queries[b, key, after, :], *_token(rows, part, after)
        S = _written(S, *token)
        outputs[b, t, head, columns] = jnp.sum(S * q[:, None], axis=0).astype(outputs.dtype)
        return S, *following

    first = rows.queries[b, key, 0, :], *_token(rows, part, 0)
    jax.lax.fori_loop(0, outputs.shape[1], step, (S, *first))


def _run_mixed(S: Array, block: Any, part: _Part, outputs: Any, product: _Product) -> None:
    """Run a block whose tokens are freed of each other."""
    b, _, head, _, columns = part
    if product is None:
        for t in range(outputs.shape[1]):
            output = jnp.sum(S * block.queries[b, head, t, :][:, None], axis=0) + block.fixed[b, head, t, columns]
            outputs[b, t, head, columns] = output.astype(outputs.dtype)
        return
    output = jnp.dot(block.queries[b, head], S, precision=product) + block.fixed[b, head, :, columns]
    token = jnp.arange(len(output), dtype=jnp.int32)[:, None]
    channels = columns.start + jnp.arange(columns.size, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(token < outputs.shape[1], output.shape)
    pltriton.store(at(outputs, b, token, head, channels), output.astype(outputs.dtype), mask=mask)
