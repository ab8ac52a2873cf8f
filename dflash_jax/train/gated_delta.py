"""Gated DeltaNet over whole sequences, for training: what chunks do not need of each other, for all of them at once.

The chunked form of `pallas_kernels.gated_delta.reference` runs chunk after chunk, each in a dozen small products and an
inverse put together from single rows: exact, and slow on a GPU, where every step of a loop launches them all again.
Here a chunk becomes an affine map of the state, S -> M S + N, and only these maps wait for each other. With G the
running sum of g in a chunk, D[i, j] = exp(G_i - G_j) for i >= j, and T = (I + strict(beta K K^T D))^-1,

    U = T beta V;   W = T beta exp(G) K;   M = exp(G_last) I - K'^T W;   N = K'^T U;   K'_j = exp(G_last - G_j) K_j
    O = exp(G) Q S + (Q K^T D)(U - W S)

Source: arXiv 2412.06464, section 3.3, with the state factored out of the rows it writes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.spec import GatedDelta
from pallas_kernels.gated_delta import CHUNK, Weights, reference

LEAST = 16  # rows of a triangle that is inverted by powers; larger ones are made of these


def recur_sequences(
    inputs: Float[Array, "B T HK C"],
    gates: Float[Array, "B T HV 2"],
    weights: Weights,
    positions: Int[Array, "B T"],
    delta: GatedDelta,
) -> Float[Array, "B T HV dv"]:
    """Outputs of a Gated DeltaNet layer for whole sequences, from their first token on, in the dtype of the inputs.

    Args:
        inputs: of the convolution.
        gates: projections (b, a).
        weights: of convolution and gates.
        positions: negative ones, behind the others, are padding.
        delta: sizes of the layer.
    """
    is_token = (positions >= 0)[..., None]
    inputs = jnp.where(is_token[..., None], inputs, 0)
    window = jnp.pad(inputs, ((0, 0), (delta.conv_width - 1, 0), (0, 0), (0, 0)))
    q, k, v = reference.split_heads(reference.convolve(window, weights.conv), delta.key_dim, delta.value_dim)
    g, beta = reference.decay_and_strength(jnp.where(is_token[..., None], gates, 0), weights, is_token)
    # What is trained in float32 is computed in it. Elsewhere GPUs multiply in TF32, but for the inverse.
    precision = lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else lax.Precision.DEFAULT
    return parallel_chunks(q, k, v, g, beta, precision).astype(inputs.dtype)


def parallel_chunks(
    q: Float[Array, "B T HV dk"],
    k: Float[Array, "B T HV dk"],
    v: Float[Array, "B T HV dv"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    precision: lax.Precision,
) -> Float[Array, "B T HV dv"]:
    """Run the recurrence from a state of zeros; arguments are those of `reference.chunked`."""
    B, T, HV, _ = q.shape
    padding = -T % CHUNK
    padded = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta)]
    # [chunks, B, HV, CHUNK, ...]
    q, k, v, g, beta = (jnp.moveaxis(x.reshape(B, -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2)) for x in padded)

    def product(spec: str, left: Array, right: Array) -> Array:
        return jnp.einsum(spec, left, right, precision=precision)

    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.tril(beta[..., None] * product("nbhik,nbhjk->nbhij", k, k) * decay, -1)
    inverse, grown, last = unit_inverse(system), jnp.exp(total)[..., None], total[..., -1:]
    u = product("nbhij,nbhjv->nbhiv", inverse, beta[..., None] * v)
    w = product("nbhij,nbhjk->nbhik", inverse, beta[..., None] * grown * k)
    written = jnp.exp(last - total)[..., None] * k
    steps = jnp.exp(last)[..., None] * jnp.eye(k.shape[-1]) - product("nbhjk,nbhjl->nbhkl", written, w)
    terms = product("nbhjk,nbhjv->nbhkv", written, u)

    size = k.shape[-1]

    def after(first: Array, second: Array) -> Array:
        """The affine map [M | N] of two chunks, one behind the other."""
        composed = product("nbhkl,nbhlm->nbhkm", second[..., :size], first)
        return composed.at[..., size:].add(second[..., size:])

    maps = lax.associative_scan(after, jnp.concatenate([steps, terms], axis=-1))
    states = jnp.pad(maps[:-1, ..., size:], [(1, 0)] + [(0, 0)] * 4)  # before each chunk
    outputs = product("nbhik,nbhkv->nbhiv", grown * q, states)
    scores = product("nbhik,nbhjk->nbhij", q, k) * decay
    outputs += product("nbhij,nbhjv->nbhiv", scores, u - product("nbhik,nbhkv->nbhiv", w, states))
    return jnp.moveaxis(outputs, (0, 2), (1, 3)).reshape(B, T + padding, HV, -1)[:, :T]


@jax.custom_vjp
def unit_inverse(strict: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """The inverse of I + L for strictly lower triangular L, in float32; C is 16 times a power of two.

    Triangles of 16 rows are summed from their powers, and pairs of triangles joined. Powers of all 64 rows would have
    terms of 1e18 where keys repeat, which cancel.
    """
    if (rows := strict.shape[-1]) == LEAST:
        power = -strict
        inverse = jnp.eye(LEAST) + power
        for _ in range(3):  # powers up to 1, then 3, 7 and 15, which is the last that is not zero
            power = _exact(power, power)
            inverse += _exact(inverse, power)
        return inverse
    half = rows // 2
    upper, lower = (unit_inverse(strict[..., part, part]) for part in (slice(half), slice(half, rows)))
    corner = -_exact(lower, _exact(strict[..., half:, :half], upper))
    return jnp.concatenate(
        [
            jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
            jnp.concatenate([corner, lower], axis=-1),
        ],
        axis=-2,
    )


def _inverse_of(strict: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(strict)
    return inverse, inverse


def _slopes_of(inverse: Array, cotangent: Array) -> tuple[Array]:
    transposed = inverse.swapaxes(-1, -2)
    return (jnp.tril(-_exact(transposed, _exact(cotangent, transposed)), -1),)


unit_inverse.defvjp(_inverse_of, _slopes_of)


def _exact(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
