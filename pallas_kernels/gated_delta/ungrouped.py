"""Gated DeltaNet in plain JAX: the convolution, the gates, the recurrence, and its chunked form.

Letters beside the project's: HK and HV key and value heads (value head h reads key head h // (HV // HK)), dk and dv
their sizes, C channels of the convolution (2 HK dk + HV dv). A state S is [HV, dk, dv] in float32; for one token

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

Decoding, verifying and committing all go through `recur`, in one order of operations: a token's state must not depend
on whether it was drafted. On CPUs that holds bit for bit. On an H100 it does not, since XLA sums differently for other
numbers of tokens: the two tests that compare bits fail there, and a GPU needs the kernel. Prompts go through `chunked`,
whose sums have another order (differences near 1e-6 in float32).

Source: transformers 5.24 (`qwen3_5`), arXiv 2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64  # tokens that the chunked form solves at once: transformers', and a page of keys and values
L2_EPS = 1e-6  # added to the sum of squares, not to the mean


class Rows(NamedTuple):
    """Tokens as the recurrence takes them: convolved channels, and the gates of each value head."""

    mixed: Float[Array, "B T C"]  # queries of HK heads, keys of HK heads, values of HV heads
    g: Float[Array, "B T HV"]  # float32; 0 for padding
    beta: Float[Array, "B T HV"]  # float32; 0 for padding


def convolve(
    inputs: Float[Array, "B T C"], tail: Float[Array, "B J C"], weight: Float[Array, "C I"]
) -> Float[Array, "B T C"]:
    """Apply the causal depthwise convolution and SiLU.

    Args:
        inputs: projections of the tokens, before the convolution.
        tail: inputs of the J = I - 1 tokens before them; zeros before the sequence.
        weight: I taps of each channel; the last multiplies the current token.

    Returns:
        The activations, in the dtype of the inputs.
    """
    window = jnp.concatenate([tail.astype(inputs.dtype), inputs], axis=1).astype(jnp.float32)
    taps, length = weight.shape[1], inputs.shape[1]
    mixed = sum(window[:, i : i + length] * weight[:, i].astype(jnp.float32) for i in range(taps))
    return jax.nn.silu(mixed).astype(inputs.dtype)


def tail_after(
    inputs: Float[Array, "B T C"], tail: Float[Array, "B J C"], count: Float[Array, " B"]
) -> Float[Array, "B J C"]:
    """Keep the last J inputs once the first `count` tokens, 0 to T, are committed."""
    window = jnp.concatenate([tail.astype(inputs.dtype), inputs], axis=1)
    rows = count[:, None] + jnp.arange(tail.shape[1])
    return jnp.take_along_axis(window, rows[..., None], axis=1).astype(tail.dtype)


def gates(
    a: Float[Array, "B T HV"],
    b: Float[Array, "B T HV"],
    log_decay: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    is_token: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T HV"], Float[Array, "B T HV"]]:
    """Compute log decay g <= 0 and write strength beta of each token, in float32.

    Args:
        a: projection that decides how much of the state decays.
        b: projection that decides how strongly the token is written.
        log_decay: the checkpoint's `A_log`.
        dt_bias: added to `a`.
        is_token: False for padding, whose g and beta become 0. They must be cleared here, after the gate: zero
            projections would still decay the state by exp(-exp(A_log) softplus(dt_bias)).
    """
    rate = jnp.exp(log_decay.astype(jnp.float32))
    g = -rate * jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    return jnp.where(is_token[..., None], g, 0.0), jnp.where(is_token[..., None], beta, 0.0)


def split_heads(
    mixed: Float[Array, "B T C"], *, key_heads: int, key_dim: int, value_dim: int
) -> tuple[Float[Array, "B T HV dk"], Float[Array, "B T HV dk"], Float[Array, "B T HV dv"]]:
    """Split convolved channels into queries, keys and values of each value head, in float32.

    Queries and keys are divided by their L2 norm, and queries by sqrt(dk).
    """
    B, T, _ = mixed.shape
    query, key, value = jnp.split(mixed.astype(jnp.float32), [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)
    value = value.reshape(B, T, -1, value_dim)
    groups = value.shape[2] // key_heads
    q, k = (_normed(x.reshape(B, T, key_heads, key_dim)) for x in (query, key))
    q, k = (jnp.repeat(x, groups, axis=2) for x in (q * key_dim**-0.5, k))
    return q, k, value


def recur(
    q: Float[Array, "B T HV dk"],
    k: Float[Array, "B T HV dk"],
    v: Float[Array, "B T HV dv"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV dk dv"],
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "B HV dk dv"]]:
    """Run the recurrence token by token, all in float32; returns the outputs and the state after the last token.

    A token with g = 0 and beta = 0 leaves the state as it is, bit for bit.
    """

    def step(S: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, g_t, beta_t = token
        S = S * jnp.exp(g_t)[..., None, None]
        d = beta_t[..., None] * (v_t - (S * k_t[..., None]).sum(axis=-2))
        S = S + k_t[..., None] * d[..., None, :]
        return S, (S * q_t[..., None]).sum(axis=-2)

    state, outputs = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta)))
    return jnp.moveaxis(outputs, 0, 1), state


def replay(
    state: Float[Array, "Q HV dk dv"], slots: Int[Array, " B"], tape: Rows, count: Int[Array, " B"], block: Rows
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "Q HV dk dv"]]:
    """Commit the accepted rows of the last block, then run the next block without committing it.

    Args:
        state: of Q slots.
        slots: of the sequences; one outside 0..Q-1 is padding, whose outputs mean nothing.
        tape: rows of each sequence's last block.
        count: how many of them were accepted; they are folded into the state.
        block: rows to verify.

    Returns:
        Outputs of the block's rows in float32, and the states after the accepted rows.
    """
    accepted = (jnp.arange(tape.g.shape[1]) < count[:, None])[..., None]
    kept = Rows(tape.mixed, jnp.where(accepted, tape.g, 0.0), jnp.where(accepted, tape.beta, 0.0))
    before = state.at[slots].get(mode="clip")
    _, after = _run(kept, before)
    outputs, _ = _run(block, after)
    places = jnp.where(slots < 0, len(state), slots)  # a negative index would count from the end
    return outputs, state.at[places].set(after, mode="drop")


def _run(rows: Rows, state: Float[Array, "B HV dk dv"]) -> tuple[Array, Array]:
    key_dim, value_dim = state.shape[-2:]
    key_heads = (rows.mixed.shape[-1] - state.shape[1] * value_dim) // (2 * key_dim)
    q, k, v = split_heads(rows.mixed, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
    return recur(q, k, v, rows.g, rows.beta, state)


def chunked(
    q: Float[Array, "B T HV dk"],
    k: Float[Array, "B T HV dk"],
    v: Float[Array, "B T HV dv"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV dk dv"],
) -> tuple[Float[Array, "B T HV dv"], Float[Array, "B HV dk dv"]]:
    """Run the recurrence over chunks of 64 tokens, each a few matrix products; arguments and results as for `recur`.

    Within a chunk, with G the running sum of g and D[i, j] = exp(G_i - G_j) for i >= j, the written rows d solve the
    unit lower triangular system (I + strict(beta K K^T D)) d = beta (V - exp(G) K S). Decays enter as differences
    before exp: exp(-G) alone overflows.
    """
    B, T, HV, _ = q.shape
    padding = -T % CHUNK
    padded = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta)]
    # [chunks, B, HV, CHUNK, ...]
    chunks = [jnp.moveaxis(x.reshape(B, -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2)) for x in padded]
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))

    def step(S: Array, chunk: list[Array]) -> tuple[Array, Array]:
        q_c, k_c, v_c, g_c, beta_c = chunk
        total = jnp.cumsum(g_c, axis=-1)
        decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
        system = jnp.tril(beta_c[..., None] * _product("bhik,bhjk->bhij", k_c, k_c) * decay, -1) + jnp.eye(CHUNK)
        wanted = v_c - jnp.exp(total)[..., None] * _product("bhik,bhkv->bhiv", k_c, S)
        d = jax.scipy.linalg.solve_triangular(system, beta_c[..., None] * wanted, lower=True, unit_diagonal=True)
        outputs = jnp.exp(total)[..., None] * _product("bhik,bhkv->bhiv", q_c, S)
        outputs += _product("bhij,bhjv->bhiv", _product("bhik,bhjk->bhij", q_c, k_c) * decay, d)
        kept = jnp.exp(total[..., -1:] - total)[..., None] * k_c
        return jnp.exp(total[..., -1])[..., None, None] * S + _product("bhjk,bhjv->bhkv", kept, d), outputs

    state, outputs = jax.lax.scan(step, state, chunks)
    outputs = jnp.moveaxis(outputs, (0, 2), (1, 3)).reshape(B, T + padding, HV, -1)
    return outputs[:, :T], state


def _normed(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + L2_EPS)


def _product(spec: str, left: Array, right: Array) -> Array:
    """Multiply in float32 on every device: TF32 and bfloat16 products make the triangular solve diverge."""
    return jnp.einsum(spec, left, right, precision=jax.lax.Precision.HIGHEST)
