"""From logits to tokens, with randomness that depends on nothing but the seed and the position.

Every row of a block is sampled from the target's own processed distribution with noise keyed by
(seed, position). A token is therefore the same whether its row was verified in a block or decoded alone: that
is what makes speculation exact at any temperature.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.engine.state import Logprobs, Sampler, SamplingMode


def sample(
    logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    emitted: Int[Array, "B T"],
    sampler: Sampler,
    mode: SamplingMode,
) -> Int[Array, "B T"]:
    """Choose a token for each row.

    Args:
        logits: the target's, float32.
        positions: of the tokens to be chosen (one beyond the rows' own).
        emitted: tokens emitted before each row, for `min_tokens`.
        sampler: parameters of the B sequences.
        mode: greedy ignores temperatures, random ignores top-k and top-p.
    """
    logits = forbid_stop(logits, emitted, sampler)
    greedy = logits.argmax(axis=-1).astype(jnp.int32)
    if mode == "greedy":
        return greedy
    is_greedy = (sampler.temperature == 0)[:, None]
    scaled = logits / jnp.where(is_greedy, 1.0, sampler.temperature[:, None])[..., None]
    scaled = keep_min_p(scaled, sampler.min_p)
    if mode == "filtered":
        scaled = keep_top_k_top_p(scaled, sampler.top_k, sampler.top_p)
    drawn = (scaled + gumbel(sampler.key, positions, logits.shape[-1])).argmax(axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, greedy, drawn)


def gumbel(key: Array, positions: Int[Array, "B T"], size: int) -> Float[Array, "B T V"]:
    """Gumbel noise of each (seed, position): the argmax of logits + noise is a sample of their softmax."""

    def one(words: Array, position: Array) -> Array:
        seeded = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(seeded, position), (size,), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(key, positions)


def forbid_stop(logits: Float[Array, "B T V"], emitted: Int[Array, "B T"], sampler: Sampler) -> Float[Array, "B T V"]:
    """Rule out the tokens that would end a sequence before `min_tokens` are emitted."""
    early = emitted < sampler.min_tokens[:, None]
    vocabulary = logits.shape[-1]
    rows = jnp.arange(logits.shape[0])[:, None]
    stop = jnp.where(sampler.stop_ids < 0, vocabulary, sampler.stop_ids)
    stops = jnp.zeros((logits.shape[0], vocabulary), bool).at[rows, stop].set(True, mode="drop")
    return jnp.where(early[..., None] & stops[:, None, :], -jnp.inf, logits)


def keep_min_p(logits: Float[Array, "B T V"], min_p: Float[Array, " B"]) -> Float[Array, "B T V"]:
    """Drop tokens whose probability is below min_p times the likeliest one's."""
    least = logits.max(axis=-1, keepdims=True) + jnp.log(min_p)[:, None, None]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_k_top_p(
    logits: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Keep the k likeliest tokens, then of those the likeliest whose probabilities reach top_p.

    Tokens tied with the last one kept are kept too, so that the choice does not depend on their order.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    rank = jnp.arange(logits.shape[-1])
    likeliest = rank < top_k[:, None, None]
    ordered = jnp.where(likeliest, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A top_p of 1 keeps all, whatever the rounding of the sum; the likeliest token always stays.
    reaching = (before < top_p[:, None, None]) | (top_p >= 1.0)[:, None, None] | (rank == 0)
    least = jnp.where(likeliest & reaching, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def logprobs_of(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], num_logprobs: int | None) -> Logprobs | None:
    """Log-probabilities of chosen tokens under the unprocessed distribution (vLLM's `raw_logprobs`)."""
    if num_logprobs is None:
        return None
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)
    top, top_tokens = jax.lax.top_k(logprobs, num_logprobs)
    return Logprobs(chosen=chosen[..., 0], rank=(logprobs > chosen).sum(axis=-1) + 1, top=top, top_tokens=top_tokens)
