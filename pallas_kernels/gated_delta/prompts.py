"""Prefill of Gated DeltaNet on Pallas' Triton backend, in three kernels a layer.

The first two (`chunks`) free the tokens of a chunk of each other, all chunks at once. In the third, a program carries
some columns of one head's state over the chunks of a sequence: a column needs no other. It holds them in registers, in
float32, reads them once and writes them once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.chunks import Chunks, Config, Form, Product, prepare_chunks, product_of
from pallas_kernels.gated_delta.prepare import Block, rows_of
from pallas_kernels.gated_delta.reference import CHUNK, Kept, Weights
from pallas_kernels.gated_delta.tokens import at, load, move_share

LEAST_HEAD, MOST_HEAD = 16, 128  # sizes: of an operand of a product, and of what shared memory of sm_89 holds


def refusal(kept: Kept, weights: Weights) -> str | None:
    """Say why the Triton backend cannot do this call, or None."""
    del weights
    for name, size in zip(("key", "value"), kept.state.shape[-2:], strict=True):
        if size & (size - 1) or not LEAST_HEAD <= size <= MOST_HEAD:
            return (
                f"The Triton kernels of prompts need {name} heads of a power of two from {LEAST_HEAD} to {MOST_HEAD}; "
                f"this is {size}."
            )
    return None


def default_config(dtype: Any) -> Config:
    """The configuration for inputs of a dtype; float16 has too small a range for terms of a state."""
    forms: dict[Any, Form] = {jnp.dtype(jnp.float32): "bf16x6", jnp.dtype(jnp.bfloat16): "bf16x2"}
    return Config(forms.get(jnp.dtype(dtype), "tf32x3"))


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def prefill(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    is_first: Bool[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """See ``pallas_kernels.gated_delta.prefill``; outputs of padding are zeros."""
    if reason := refusal(kept, weights):
        raise NotImplementedError(reason)
    config = config or default_config(kept.inputs.dtype)
    block = Block(inputs.astype(kept.inputs.dtype), gates.astype(kept.gates.dtype), length)
    chunks = prepare_chunks(kept, weights, rows, is_first, block, config=config, interpret=interpret)
    return carry_state(kept, rows, is_first, block, chunks, inputs.dtype, config=config, interpret=interpret)


def carry_state(
    kept: Kept,
    rows: Int[Array, " B"],
    is_first: Bool[Array, " B"],
    block: Block,
    chunks: Chunks,
    dtype: Any,
    *,
    config: Config,
    interpret: bool,
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """Run the third kernel.

    Args:
        kept: what the layers keep of sequences; it is written in place.
        rows: of the sequences.
        is_first: whether the tokens begin the sequence.
        block: the tokens.
        chunks: made of them by the first kernels.
        dtype: of the outputs.
        config: how the kernel is cut.
        interpret: run in Pallas' interpreter.
    """
    (B, T, *_), (_, HV, _, dv) = block.inputs.shape, kept.state.shape
    columns, before = min(config.columns, dv), kept.inputs.shape[1] - kept.gates.shape[1]
    first = is_first.astype(jnp.int32)
    operands = (kept.state, kept.inputs, rows, first, block.inputs, block.length, chunks)
    leaves, tree = jax.tree.flatten(operands)
    leaves = list(_compat.vary_alike(*leaves))
    written = [(x.shape, x.dtype) for x in (kept.state, kept.inputs)]
    state, kept_inputs, outputs = _compat.triton_call(
        functools.partial(_carry, columns=columns, before=before, product=product_of(config.form, interpret)),
        grid=(dv // columns, HV, B),
        out_shape=[_compat.out_like(*one, leaves[0]) for one in (*written, ((B, T, HV, dv), dtype))],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="gated_delta_prefill",
        aliases={0: 0, 1: 1},
    )(*jax.tree.unflatten(tree, leaves))
    return outputs, Kept(state, kept_inputs, kept.gates)


class _Part(NamedTuple):
    """What a program has: some columns of one head of one sequence."""

    b: Any
    key: Any
    head: Any
    columns: Any  # a pl.ds


def _carry(
    state_in: Any, inputs_in: Any, rows: Any, is_first: Any, new: Any, length: Any, chunks: Any,
    state: Any, inputs: Any, outputs: Any, *, columns: int, before: int, product: Product,
) -> None:  # fmt: skip
    """One program."""
    del state_in, inputs_in  # the outputs are aliases of them
    column, head, b = (pl.program_id(axis) for axis in range(3))
    (HV, dk, dv), (T, HK) = state.shape[1:], new.shape[1:3]
    part = _Part(b, head // (HV // HK), head, pl.ds(column * columns, columns))
    row, tokens = rows_of(rows, length, b, state, T)[1:]
    begins = is_first[b] != 0
    S = jnp.where(begins, 0.0, state[row, head, :, part.columns])
    last = (tokens + CHUNK - 1) // CHUNK
    S = jax.lax.fori_loop(0, last, functools.partial(_run_chunk, chunks, part, outputs, tokens, product), S)
    nothing = jnp.zeros((CHUNK, columns), outputs.dtype)

    def clear(n: Any, carry: Any) -> Any:
        _store(outputs, part, n, nothing)
        return carry

    # Padding is written too: what memory held before may be NaN, which later layers might spread.
    jax.lax.fori_loop(last, -(-T // CHUNK), clear, 0)

    @pl.when(tokens > 0)
    def _() -> None:
        state[row, head, :, part.columns] = S
        move = functools.partial(_write_tail, inputs, new, part, (row, tokens, begins), before)
        move_share(move, head, column, columns, (HV // HK, dk, dv))


def _run_chunk(
    chunks: Any, part: _Part, outputs: Any, tokens: Any, product: Product, n: Any, S: Array
) -> Array:  # fmt: skip
    """Write the outputs of a chunk, and return the state after it."""
    b, key, head, columns = part
    place = pl.ds(n * CHUNK, CHUNK)
    k, since_start = chunks.keys[b, key, place, :], chunks.since_start[b, head, place][:, None]
    wanted = chunks.values[b, head, place, columns].astype(jnp.float32) - since_start * product(k, S)
    d = product(chunks.solution[b, head, place, :], wanted)
    output = since_start * product(chunks.queries[b, key, place, :], S)
    output += product(chunks.scores[b, head, place, :], d)
    t = n * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    _store(outputs, part, n, jnp.where(t[:, None] < tokens, output, 0.0).astype(outputs.dtype))
    until_end = chunks.until_end[b, head, place][:, None]
    return chunks.since_start[b, head, n * CHUNK + CHUNK - 1] * S + product(k.T, until_end * d)


def _store(outputs: Any, part: _Part, n: Any, tile: Array) -> None:
    """Write the outputs of a chunk, as far as there are tokens."""
    token = n * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[:, None]
    channels = part.columns.start + jnp.arange(part.columns.size, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(token < outputs.shape[1], tile.shape)
    pltriton.store(at(outputs, part.b, token, part.head, channels), tile, mask=mask)


def _write_tail(
    inputs: Any, new: Any, part: _Part, place: tuple[Any, Any, Any], before: int, channels: Array
) -> None:  # fmt: skip
    """Write the last J inputs: those before the tokens are among them where there are fewer than J tokens."""
    row, tokens, begins = place
    moved = []
    for j in range(before):
        t = tokens - before + j
        fresh = load(new, part.b, t, part.key, channels, where=t >= 0)
        old = load(inputs, row, tokens + j, part.key, channels, where=(t < 0) & ~begins)
        moved.append(jnp.where(t < 0, old, fresh))
    for j, raw in enumerate(moved):
        pltriton.store(at(inputs, row, j, part.key, channels), raw)
