"""From logits to tokens, with randomness that depends only on the seed and the position.

Every row of a block is sampled from the target's own processed distribution, with noise keyed by (seed, position). A
token is therefore the same whether its row was verified in a block or decoded alone: this makes speculation exact at
any temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.base.values import MOST_LOGPROBS
from dflash_jax.engine.device.slots import Logprobs, Sampler
from dflash_jax.parallel.collectives import AUTOMATIC, Devices, highest, likeliest

Result = TypeVar("Result")


def sample(
    logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    sampler: Sampler,
    devices: Devices = AUTOMATIC,
    *,
    is_filtered: bool | Bool[Array, ""],
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Sample a token for each row.

    Args:
        logits: the target's logits after penalties and masks, float32.
        positions: positions of the tokens to be sampled, one beyond those of the rows.
        sampler: sampling parameters of the B sequences.
        devices: devices over which the vocabulary is split.
        is_filtered: whether any sequence uses top-k or top-p; if not, they are ignored.

    Returns:
        The tokens, and their logit plus noise: NaN if any logit of the row is NaN.
    """
    is_greedy = (sampler.temperature == 0)[:, None]
    scaled = logits / jnp.where(is_greedy, 1.0, sampler.temperature[:, None])[..., None]
    scaled = keep_min_p(scaled, sampler.min_p, devices)
    kept = when(is_filtered, lambda: keep_top_k_top_p(scaled, sampler.top_k, sampler.top_p), lambda: scaled)
    noised = kept + gumbel(sampler.key, positions, logits.shape[-1])
    return likeliest(jnp.where(is_greedy[..., None], logits, noised), devices)


def when(condition: bool | Bool[Array, ""], yes: Callable[[], Result], no: Callable[[], Result]) -> Result:
    """Call one of two functions: at compile time for a bool, at run time (`lax.cond`) for an array.

    Programs for GPUs pass a bool, since the host would wait for the device before each branch.
    """
    if isinstance(condition, bool):
        return yes() if condition else no()
    result: Result = jax.lax.cond(condition, yes, no)
    return result


def gumbel(key: Array, positions: Int[Array, "B T"], size: int) -> Float[Array, "B T V"]:
    """Gumbel noise of each (seed, position): the argmax of logits + noise is a sample of their softmax."""

    def one(words: Array, position: Array) -> Array:
        seeded = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(seeded, position), (size,), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(key, positions)


def keep_min_p(
    logits: Float[Array, "B T V"], min_p: Float[Array, " B"], devices: Devices = AUTOMATIC
) -> Float[Array, "B T V"]:
    """Drop tokens whose probability is below min_p times that of the most probable one."""
    threshold = highest(logits, devices) + jnp.log(min_p)[:, None]
    return jnp.where(logits < threshold[..., None], -jnp.inf, logits)


def keep_top_k_top_p(
    logits: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Keep the k most probable tokens, then of those the most probable whose probabilities add up to top_p.

    Tokens tied with the last one kept are kept too, so that the result does not depend on their order.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    rank = jnp.arange(logits.shape[-1])
    in_top_k = rank < top_k[:, None, None]
    ordered = jnp.where(in_top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A top_p of 1 keeps all tokens, however the sum is rounded; the most probable token is always kept.
    in_top_p = (before < top_p[:, None, None]) | (top_p >= 1.0)[:, None, None] | (rank == 0)
    threshold = jnp.where(in_top_k & in_top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def logprobs_of(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Logprobs:
    """Log-probabilities of chosen tokens, and the most probable ones, before processing (vLLM's `raw_logprobs`)."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)
    top, top_tokens = jax.lax.top_k(logprobs, min(MOST_LOGPROBS, logits.shape[-1]))
    return Logprobs(chosen=chosen[..., 0], rank=(logprobs > chosen).sum(axis=-1) + 1, top=top, top_tokens=top_tokens)
