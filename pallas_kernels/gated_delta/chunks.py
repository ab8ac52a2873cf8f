"""The first two kernels of prompts on Pallas' Triton backend: what the third needs of each chunk of 64 tokens.

One convolves and norms, the other frees the tokens of a chunk of each other; neither needs a state. In one kernel they
would spill registers. With K, Q, V the rows of a chunk, D[i, j] = exp(g_(j+1) + ... + g_i) for i >= j and
e[i] = exp(g_1 + ... + g_i), the written rows d and the outputs O are, S being the state before the chunk,

    d = X (V - e K S),   X = (I + strict(beta K K^T D))^-1 diag(beta)
    O = e Q S + (Q K^T D) d

X[i, j] is how much of token j's value d_i takes back; the tokens between only shrink it, so |X| <= 1: nothing grows,
whatever the keys. Decays enter as sums over the tokens between, all <= 0, before exp: exp(-G) would overflow, and
differences of sums from the first token on would cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import _compat
from pallas_kernels.gated_delta.prepare import Block, rows_of
from pallas_kernels.gated_delta.reference import CHUNK, Kept, Weights
from pallas_kernels.gated_delta.tokens import behind, convolved, decay_and_strength, head_of, normed

TOKENS, WARPS = 32, 4  # of a program of the first kernel

Form = Literal["bf16x6", "tf32x3", "bf16x2", "bf16"]
Product = Callable[[Array, Array], Array]
_TERMS = {
    "bf16x6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
}


class Config(NamedTuple):
    """How the kernels of prompts are cut.

    Attributes:
        form: of products, all on tensor cores. "bf16x6" has the precision of float32 and "tf32x3" nearly so, in as many
            terms; Triton's products without tensor cores hold whole operands in registers and spill 25 KiB a thread.
            "bf16x2" holds queries, keys and scores in bfloat16, and multiplies them with two bfloat16 terms of what is
            float32; "bf16" multiplies with one, and holds the solution in bfloat16 as well.
        columns: of the state, a program of the third kernel.
        num_warps: of a program of the third kernel.
        num_stages: chunks that the third kernel loads ahead, and one.
        chunk_warps: of a program of the second kernel.
        solved: rows of the triangular system that are eliminated one by one; larger blocks are put together of them.
    """

    form: Form
    columns: int = 32
    num_warps: int = 4
    num_stages: int = 1
    chunk_warps: int = 4
    solved: int = 16


class Chunks(NamedTuple):
    """What the third kernel reads; N are the tokens of a call, padded to whole chunks. Chunks of padding are unset."""

    queries: Float[Array, "B HK N dk"]
    keys: Float[Array, "B HK N dk"]
    values: Float[Array, "B HV N dv"]
    solution: Float[Array, "B HV N 64"]  # X
    scores: Float[Array, "B HV N 64"]  # Q K^T D
    since_start: Float[Array, "B HV N"]  # e: decay from before the chunk to the token
    until_end: Float[Array, "B HV N"]  # decay from the token to the chunk's end


def product_of(form: Form, interpret: bool) -> Product:
    """The product of what is held of chunks with what is float32; its result is float32."""

    def in_terms(held: Array, other: Array) -> Array:
        if held.dtype != jnp.bfloat16:
            return exact_product(form, interpret)(held, other)
        high = other.astype(jnp.bfloat16)
        product = jnp.dot(held, high, preferred_element_type=jnp.float32)
        if form == "bf16" or other.dtype == held.dtype:
            return product
        low = (other - high.astype(jnp.float32)).astype(jnp.bfloat16)
        return product + jnp.dot(held, low, preferred_element_type=jnp.float32)

    return in_terms


def exact_product(form: Form, interpret: bool) -> Product:
    """The product of float32 matrices in float32, or nearly so, in every form."""
    # A CPU has no product in several terms.
    precision = jax.lax.Precision.HIGHEST if interpret else _TERMS.get(form, _TERMS["tf32x3"])
    return lambda a, b: jnp.dot(*(x.astype(jnp.float32) for x in (a, b)), precision=precision)


def shapes_of(kept: Kept, weights: Weights, B: int, T: int, form: Form) -> Chunks:
    """Shapes and dtypes of the chunks of a call: they depend on its tokens, not on what came before them."""
    (_, HV, dk, dv), HK, N = kept.state.shape, len(weights.conv), -(-T // CHUNK) * CHUNK
    held, full = jnp.bfloat16 if form in ("bf16x2", "bf16") else jnp.float32, jnp.float32
    solution = jnp.bfloat16 if form == "bf16" else full
    parts = (
        ((HK, N, dk), held), ((HK, N, dk), held), ((HV, N, dv), kept.inputs.dtype),
        ((HV, N, CHUNK), solution), ((HV, N, CHUNK), held), ((HV, N), full), ((HV, N), full),
    )  # fmt: skip
    return Chunks._make(jax.ShapeDtypeStruct((B, *shape), dtype) for shape, dtype in parts)


def prepare_chunks(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    is_first: Bool[Array, " B"],
    block: Block,
    *,
    config: Config,
    interpret: bool,
) -> Chunks:
    """Prepare the chunks of prompts.

    Args:
        kept: what the layers keep of sequences; its inputs are read.
        weights: of the layer.
        rows: of the sequences.
        is_first: whether the tokens begin the sequence.
        block: the tokens.
        config: how the kernels are cut.
        interpret: run in Pallas' interpreter.
    """
    B, T, HK, _ = block.inputs.shape
    HV, shapes = kept.state.shape[1], shapes_of(kept, weights, B, T, config.form)
    leaves, tree = jax.tree.flatten((kept.inputs, weights, rows, is_first.astype(jnp.int32), block))
    operands = jax.tree.unflatten(tree, leaves := list(_compat.vary_alike(*leaves)))
    out_shape = [_compat.out_like(x.shape, x.dtype, leaves[0]) for x in shapes]
    call = functools.partial(_compat.triton_call, num_stages=1, interpret=interpret)
    rows_of_heads = call(
        _convolve,
        grid=(shapes.keys.shape[2] // TOKENS, HK, B),
        out_shape=out_shape[:3],
        num_warps=WARPS,
        name="gated_delta_tokens",
    )(*operands)
    squares = call(
        functools.partial(_relate, config=config, interpret=interpret),
        grid=(shapes.keys.shape[2] // CHUNK, HV, B),
        out_shape=out_shape[3:],
        num_warps=config.chunk_warps,
        name="gated_delta_chunks",
    )(*operands, *rows_of_heads[:2])
    return Chunks(*rows_of_heads, *squares)


def _convolve(
    kept: Any, weights: Any, rows: Any, is_first: Any, block: Any, queries: Any, keys: Any, values: Any
) -> None:  # fmt: skip
    """One program: some tokens of one key head and of its value heads."""
    n, key, b = (pl.program_id(axis) for axis in range(3))
    t, place = n * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32), pl.ds(n * TOKENS, TOKENS)
    row, length = rows_of(rows, block.length, b, kept, block.inputs.shape[1])[1:]
    group, dk, dv = weights.A_log.shape[0] // weights.conv.shape[0], keys.shape[-1], values.shape[-1]

    def convolved_of(value: Any, channels: str) -> Array:
        head = head_of(value, weights, dk, dv)
        source = behind(kept, (row, 0), block, (b, t), weights, head, is_first[b] == 0)
        return convolved(source, weights, head, getattr(head, channels))

    def value_head(i: Any, carry: Any) -> Any:
        values[b, key * group + i, place, :] = convolved_of(key * group + i, "value_channels").astype(values.dtype)
        return carry

    # The last chunk's padding is written, too: it is multiplied by 0.
    @pl.when(n * TOKENS // CHUNK * CHUNK < length)
    def _() -> None:
        q, k = (normed(convolved_of(key * group, channels)) for channels in ("query_channels", "key_channels"))
        queries[b, key, place, :], keys[b, key, place, :] = (q * dk**-0.5).astype(queries.dtype), k.astype(keys.dtype)
        jax.lax.fori_loop(0, group, value_head, 0)


def _relate(
    kept: Any, weights: Any, rows: Any, is_first: Any, block: Any, queries: Any, keys: Any,
    solution: Any, scores: Any, since_start: Any, until_end: Any, *, config: Config, interpret: bool,
) -> None:  # fmt: skip
    """One program: how the tokens of one chunk of one value head relate."""
    n, value, b = (pl.program_id(axis) for axis in range(3))
    place, t = (b, value, pl.ds(n * CHUNK, CHUNK)), n * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    row, length = rows_of(rows, block.length, b, kept, block.inputs.shape[1])[1:]
    head = head_of(value, weights, queries.shape[-1], CHUNK)
    exact, among = (f(config.form, interpret) for f in (exact_product, product_of))

    @pl.when(n * CHUNK < length)
    def _() -> None:
        source = behind(kept, (row, 0), block, (b, t), weights, head, is_first[b] == 0)
        (g, beta), (i, j) = decay_and_strength(source, weights, head), _square()
        between = jnp.cumsum(jnp.where(i > j, jnp.broadcast_to(g[:, None], i.shape), 0.0), axis=0)
        decay = jnp.where(i >= j, jnp.exp(between), 0.0)
        since_start[*place] = jnp.exp(jnp.cumsum(g, axis=0))
        until_end[*place] = jnp.sum(jnp.where(i == CHUNK - 1, decay, 0.0), axis=0)
        k = keys[b, head.key, place[2], :]
        scores[*place, :] = (among(queries[b, head.key, place[2], :], k.T) * decay).astype(scores.dtype)
        system = jnp.where(i > j, beta[:, None] * among(k, k.T) * decay, 0.0)
        inverse = _inverse(system, config.solved, exact)  # exact in every form: in bfloat16 it diverges
        solution[*place, :] = (inverse * beta[None, :]).astype(solution.dtype)


def _inverse(system: Array, solved: int, product: Product) -> Array:
    """Invert I + system, which is strictly lower triangular.

    Diagonal blocks of `solved` rows are eliminated row by row, all at once. Inverses of neighbours are then put
    together to blocks of twice the size: [[A, 0], [B, C]]^-1 = [[A', 0], [-C' B A', C']]. All of these are bounded as
    the whole inverse is; the powers of the system, of which six factors give the inverse too, are not.
    """
    i, j = _square()
    first_i, first_j = i & -solved, j & -solved  # of the block

    def eliminate(n: Any, inverse: Array) -> Array:
        """Take row n of each block, which is final, out of those below it."""
        column = jnp.sum(jnp.where(j == first_i + n, system, 0.0), axis=1)
        row = jnp.sum(jnp.where(i == first_j + n, inverse, 0.0), axis=0)
        return inverse - jnp.where(first_i == first_j, column[:, None] * row[None, :], 0.0)

    inverse = jax.lax.fori_loop(0, solved - 1, eliminate, jnp.where(i == j, 1.0, 0.0))
    while solved < CHUNK:
        is_below = ((i & -solved) == (j & -solved) + solved) & ((j & solved) == 0)
        inverse -= product(product(inverse, jnp.where(is_below, system, 0.0)), inverse)
        solved *= 2
    return inverse


def _square() -> tuple[Array, Array]:
    """Row and column of each element of a chunk's square."""
    t = jnp.arange(CHUNK, dtype=jnp.int32)
    return jnp.broadcast_to(t[:, None], (CHUNK, CHUNK)), jnp.broadcast_to(t[None, :], (CHUNK, CHUNK))
