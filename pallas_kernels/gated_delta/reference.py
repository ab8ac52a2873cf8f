"""Gated DeltaNet in plain JAX: the oracle of the kernels, the path of CPUs and TPUs, and differentiable in `prefill`.

A state S is [HV, dk, dv] in float32; for one token, with q, k, v convolved, q and k of L2 norm 1, q over sqrt(dk),

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

Decoding, verifying and folding all go through `recur`, whose loop does everything of a token from its raw projections
on, in arrays whose shapes do not depend on the number of tokens: a token's state must not depend on whether it was
drafted. On CPUs that holds bit for bit. On an H100 it does not, since XLA sums differently there, and a GPU needs the
kernel. Prompts go through `chunked`, whose sums have another order (differences near 1e-6 in float32).

Source: transformers 5.24 (`qwen3_5`), arXiv 2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import _compat

CHUNK = 64  # tokens that the chunked form solves at once: transformers', and a page of keys and values
L2_EPS = 1e-6  # added to the sum of squares, not to the mean


class Kept(NamedTuple):
    """What layers keep of sequences: P rows, each of one sequence in one layer.

    The tape of a row are the tokens of its last block, of which the state has none yet: as many of them as are accepted
    are folded into it when the next block comes.
    """

    state: Float[Array, "P HV dk dv"]  # float32, before the tape
    inputs: Float[Array, "P W HK c"]  # of the convolution: of the J tokens before the tape, then of its G tokens
    gates: Float[Array, "P G HV 2"]  # projections (b, a) of the tape's tokens


class Weights(NamedTuple):
    """What a layer has beside its projections."""

    conv: Float[Array, "HK c I"]  # taps of each channel; the last multiplies the current token
    A_log: Float[Array, " HV"]  # log of the rate of decay
    dt_bias: Float[Array, " HV"]  # added to the projection a


def verify(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    count: Int[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """See ``pallas_kernels.gated_delta.verify``."""
    before, tail = _folded(kept, weights, rows, count)
    window = jnp.concatenate([tail, inputs[..., : tail.shape[-1]].astype(tail.dtype)], axis=1)
    gates = gates.astype(kept.gates.dtype)
    outputs, _ = recur(before, weights, window, gates, length)
    places = _places(rows, len(kept.state))
    return outputs.astype(inputs.dtype), Kept(
        kept.state.at[places].set(before, mode="drop"),
        kept.inputs.at[places, : window.shape[1]].set(window, mode="drop"),
        kept.gates.at[places, : gates.shape[1]].set(gates, mode="drop"),
    )


def fold(
    kept: Kept, weights: Weights, rows: Int[Array, " B"], count: Int[Array, " B"], targets: Int[Array, " B"]
) -> Kept:
    """See ``pallas_kernels.gated_delta.fold``."""
    state, tail = _folded(kept, weights, rows, count)
    places = _places(jnp.where((rows >= 0) & (rows < len(kept.state)), targets, -1), len(kept.state))
    return Kept(
        kept.state.at[places].set(state, mode="drop"),
        kept.inputs.at[places, : tail.shape[1]].set(tail, mode="drop"),
        kept.gates,
    )


def prefill(
    kept: Kept,
    weights: Weights,
    rows: Int[Array, " B"],
    is_first: Bool[Array, " B"],
    inputs: Float[Array, "B T HK _"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
) -> tuple[Float[Array, "B T HV dv"], Kept]:
    """See ``pallas_kernels.gated_delta.prefill``."""
    before = weights.conv.shape[-1] - 1
    state, tail = (
        jnp.where(is_first[:, None, None, None], 0, array.at[*place].get(mode="clip"))
        for array, place in ((kept.state, (rows,)), (kept.inputs, (rows, slice(before))))
    )
    # Padding is cleared before it enters anything, so that its NaN reaches neither states nor gradients.
    is_token = (jnp.arange(inputs.shape[1]) < length[:, None])[..., None, None]
    inputs, gates = jnp.where(is_token, inputs[..., : tail.shape[-1]], 0), jnp.where(is_token, gates, 0)
    window = jnp.concatenate([tail, inputs.astype(tail.dtype)], axis=1)
    q, k, v = split_heads(convolve(window, weights.conv), *state.shape[-2:])
    g, beta = decay_and_strength(gates.astype(kept.gates.dtype), weights, is_token[..., 0])
    outputs, state = chunked(q, k, v, g, beta, state)
    places = _places(jnp.where(length > 0, rows, -1), len(kept.state))
    return outputs.astype(inputs.dtype), Kept(
        kept.state.at[places].set(state, mode="drop"),
        kept.inputs.at[places, :before].set(_inputs_before(window, length, before), mode="drop"),
        kept.gates,
    )


def convolve(window: Float[Array, "B W HK c"], conv: Float[Array, "HK c I"]) -> Float[Array, "B T HK c"]:
    """Apply the causal depthwise convolution and SiLU.

    Args:
        window: inputs of T tokens behind those of the J = I - 1 tokens before them (zeros before the sequence).
        conv: I taps of each channel; the last multiplies the current token.

    Returns:
        The activations of the T = W - J tokens, in the dtype of the inputs.
    """
    taps, length = conv.shape[-1], window.shape[1] - conv.shape[-1] + 1
    mixed = sum(window[:, i : i + length].astype(jnp.float32) * conv[..., i].astype(jnp.float32) for i in range(taps))
    return jax.nn.silu(mixed).astype(window.dtype)


def decay_and_strength(
    gates: Float[Array, "B T HV 2"], weights: Weights, is_token: Bool[Array, "B T #HV"]
) -> tuple[Float[Array, "B T HV"], Float[Array, "B T HV"]]:
    """Compute log decay g <= 0 and write strength beta of each token, in float32.

    Args:
        gates: projections (b, a): how strongly the token is written, and how much of the state decays.
        weights: of the layer.
        is_token: False for padding, whose g and beta become 0. They must be cleared here, after the gate: zero
            projections would still decay the state by exp(-exp(A_log) softplus(dt_bias)).
    """
    b, a = (gates[..., i].astype(jnp.float32) for i in range(2))
    rate = jnp.exp(weights.A_log.astype(jnp.float32))
    g = -rate * jax.nn.softplus(a + weights.dt_bias.astype(jnp.float32))
    return jnp.where(is_token, g, 0.0), jnp.where(is_token, jax.nn.sigmoid(b), 0.0)


def split_heads(
    mixed: Float[Array, "B T HK c"], key_dim: int, value_dim: int
) -> tuple[Float[Array, "B T HV dk"], Float[Array, "B T HV dk"], Float[Array, "B T HV dv"]]:
    """Split convolved channels into queries, keys and values of each value head, in float32.

    Queries and keys are divided by their L2 norm, and queries by sqrt(dk).
    """
    B, T, HK, _ = mixed.shape
    query, key, value = jnp.split(mixed.astype(jnp.float32), [key_dim, 2 * key_dim], axis=-1)
    value = value.reshape(B, T, -1, value_dim)
    q, k = (jnp.repeat(x, value.shape[2] // HK, axis=2) for x in (_normed(query) * key_dim**-0.5, _normed(key)))
    return q, k, value


def recur(
    state: Float[Array, "B HV dk dv"],
    weights: Weights,
    window: Float[Array, "B W HK c"],
    gates: Float[Array, "B T HV 2"],
    length: Int[Array, " B"],
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "B HV dk dv"]]:
    """Run the recurrence token by token, all in float32, as many tokens as the longest sequence has.

    Args:
        state: before the first token.
        weights: of the layer.
        window: inputs of T tokens behind those of the J tokens before them.
        gates: projections (b, a) of the T tokens.
        length: tokens of each sequence, 0 to T; what follows them is padding, which leaves the state as it is.

    Returns:
        Outputs, which mean nothing for padding, and the states after the last token.
    """
    (B, T, HV, _), taps = gates.shape, weights.conv.shape[-1]
    end = jnp.minimum(jnp.max(length), T)
    # XLA drops axes of 1 and slices of one token out of one, fuses the loop otherwise, and rounds otherwise (CPU).
    of_sequences, of_tokens, none = (0, int(B == 1)), (0, int(T == 1)), (0, 0)
    window, gates = (jnp.pad(x, [of_sequences, of_tokens, none, none]) for x in (window, gates))
    state, length = jnp.pad(state, [of_sequences, none, none, none]), jnp.pad(length, [of_sequences])
    outputs = jnp.zeros((*gates.shape[:2], HV, state.shape[-1]), jnp.float32)
    state, window, gates, outputs, length, *laid = _compat.vary_alike(state, window, gates, outputs, length, *weights)
    weights = Weights(*laid)

    def step(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        S, outputs = carry
        mixed = convolve(jax.lax.dynamic_slice_in_dim(window, t, taps, axis=1), weights.conv)
        is_token = (t < length)[:, None, None]
        g, beta = decay_and_strength(jax.lax.dynamic_slice_in_dim(gates, t, 1, axis=1), weights, is_token)
        output, after = advance(S, *split_heads(mixed, *S.shape[-2:]), g, beta)
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, output, t, axis=1)
        return jnp.where(is_token[..., None], after, S), outputs

    state, outputs = jax.lax.fori_loop(0, end, step, (state, outputs))
    return outputs[:B, :T], state[:B]


def advance(
    state: Float[Array, "B HV dk dv"],
    q: Float[Array, "B 1 HV dk"],
    k: Float[Array, "B 1 HV dk"],
    v: Float[Array, "B 1 HV dv"],
    g: Float[Array, "B 1 HV"],
    beta: Float[Array, "B 1 HV"],
) -> tuple[Float[Array, "B 1 HV dv"], Float[Array, "B HV dk dv"]]:
    """Run one token of the recurrence; returns its output and the state after it."""
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    state = state * jnp.exp(g)[..., None, None]
    d = beta[..., None] * (v - (state * k[..., None]).sum(axis=-2))
    state = state + k[..., None] * d[..., None, :]
    return (state * q[..., None]).sum(axis=-2)[:, None], state


def chunked(
    q: Float[Array, "B T HV dk"],
    k: Float[Array, "B T HV dk"],
    v: Float[Array, "B T HV dv"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV dk dv"],
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "B HV dk dv"]]:
    """Run the recurrence over chunks of 64 tokens, each a few matrix products, all in float32.

    Within a chunk, with G the running sum of g and D[i, j] = exp(G_i - G_j) for i >= j, the written rows d solve the
    unit lower triangular system (I + strict(beta K K^T D)) d = beta (V - exp(G) K S). Decays enter as differences
    before exp: exp(-G) alone overflows.

    Returns:
        The outputs and the state after the last token; a token with g = 0 and beta = 0 leaves the state as it is.
    """
    B, T, HV, _ = q.shape
    padding = -T % CHUNK
    padded = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta)]
    # [chunks, B, HV, CHUNK, ...]
    chunks = [jnp.moveaxis(x.reshape(B, -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2)) for x in padded]
    state, *chunks = _compat.vary_alike(state, *chunks)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))

    def step(S: Array, chunk: list[Array]) -> tuple[Array, Array]:
        q_c, k_c, v_c, g_c, beta_c = chunk
        total = jnp.cumsum(g_c, axis=-1)
        decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
        system = jnp.tril(beta_c[..., None] * _product("bhik,bhjk->bhij", k_c, k_c) * decay, -1)
        wanted = v_c - jnp.exp(total)[..., None] * _product("bhik,bhkv->bhiv", k_c, S)
        d = _product("bhij,bhjv->bhiv", _inverse(system), beta_c[..., None] * wanted)
        outputs = jnp.exp(total)[..., None] * _product("bhik,bhkv->bhiv", q_c, S)
        outputs += _product("bhij,bhjv->bhiv", _product("bhik,bhjk->bhij", q_c, k_c) * decay, d)
        written = jnp.exp(total[..., -1:] - total)[..., None] * k_c
        return jnp.exp(total[..., -1])[..., None, None] * S + _product("bhjk,bhjv->bhkv", written, d), outputs

    state, outputs = jax.lax.scan(step, state, chunks)
    outputs = jnp.moveaxis(outputs, (0, 2), (1, 3)).reshape(B, T + padding, HV, -1)
    return outputs[:, :T], state


def _inverse(system: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Invert I + system, which is strictly lower triangular, C a power of two.

    Neighbours among the diagonal blocks are put together, from single rows on: of blocks A and B with X below A, the
    inverse has -B^-1 X A^-1 there. XLA's triangular solve would do on GPUs. On CPUs it hands its batch to the threads
    that run the program and waits for them: two programs at a time on two cores wait for each other for ever.
    """
    *batch, C, _ = system.shape
    inverse = (jnp.diagonal(system, axis1=-2, axis2=-1) + 1)[..., None, None]
    size = 1
    while size < C:
        shape = (*batch, C // (2 * size), 2 * size, C // (2 * size), 2 * size)
        blocks = jnp.moveaxis(jnp.diagonal(system.reshape(shape), axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product("...ij,...jk,...kl->...il", second, blocks[..., size:, :size], first)
        above = jnp.pad(first, [(0, 0)] * (first.ndim - 1) + [(0, size)])
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _folded(kept: Kept, weights: Weights, rows: Int[Array, " B"], count: Int[Array, " B"]) -> tuple[Array, Array]:
    """States after the first `count` tokens of the tapes of rows, and the J inputs before that point."""
    state, window, gates = (array.at[rows].get(mode="clip") for array in kept)
    _, state = recur(state, weights, window, gates, count)
    return state, _inputs_before(window, count, weights.conv.shape[-1] - 1)


def _inputs_before(window: Float[Array, "B W HK c"], count: Int[Array, " B"], before: int) -> Array:
    """The last inputs before the token `count` of a window that begins `before` tokens earlier."""
    places = count[:, None] + jnp.arange(before)
    return jnp.take_along_axis(window, places[..., None, None], axis=1)


def _places(rows: Int[Array, " B"], size: int) -> Int[Array, " B"]:
    """Indices to write with mode="drop": a negative one would count from the end."""
    return jnp.where(rows < 0, size, rows)


def _normed(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + L2_EPS)


def _product(spec: str, *factors: Array) -> Array:
    """Multiply in float32 on every device: TF32 and bfloat16 products make the inverse diverge."""
    return jnp.einsum(spec, *factors, precision=jax.lax.Precision.HIGHEST)
