"""Penalties, biases and masks: what changes the logits before sampling, for every row of a block.

Row j of a block follows its first j drafts, so it is processed as if they had been emitted. If one of them is rejected,
row j is dropped too. This makes every option here exact with speculation. Names and formulas are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.engine.device.slots import Controls, Sampler


def process(
    logits: Float[Array, "B T V"],
    drafts: Int[Array, "B T-1"],
    emitted: Int[Array, " B"],
    sampler: Sampler,
    controls: Controls,
    allowed: UInt32[Array, "B T X"] | None,
) -> Float[Array, "B T V"]:
    """The logits to sample from.

    Args:
        logits: the target's logits.
        drafts: token that each row but the first follows.
        emitted: how many tokens each sequence had emitted before the first row.
        sampler: sampling parameters of the B sequences.
        controls: controls of the B sequences.
        allowed: bits of the tokens that each row may emit; None allows all.
    """
    B, T, V = logits.shape
    before = jnp.concatenate([jnp.full((B, 1), V), drafts], axis=1)  # token before each row; V counts for none

    def one(counts: Array, j: Array) -> tuple[Array, Array]:
        counts = counts.at[jnp.arange(B), before[:, j]].add(1, mode="drop")
        row = logits[:, j] + jnp.where(sampler.has_bias[:, None], controls.bias, 0.0)
        if allowed is not None:
            row = jnp.where(unpack_bits(allowed[:, j], V), row, -jnp.inf)
        row = forbid_stop(row, emitted + j, sampler, controls)
        return counts, penalise(row, counts, sampler, controls)

    # One row at a time, since the counts of all rows would be as large as the logits.
    _, rows = jax.lax.scan(one, controls.counts, jnp.arange(T))
    return jnp.swapaxes(rows, 0, 1)


def penalise(
    logits: Float[Array, "B V"], counts: Int[Array, "B V"], sampler: Sampler, controls: Controls
) -> Float[Array, "B V"]:
    """Apply repetition, frequency and presence penalties."""
    seen = (counts > 0) | controls.prompted
    factor = jnp.where(seen, sampler.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - sampler.frequency_penalty[:, None] * counts
    return logits - sampler.presence_penalty[:, None] * (counts > 0)


def forbid_stop(
    logits: Float[Array, "B V"], emitted: Int[Array, " B"], sampler: Sampler, controls: Controls
) -> Float[Array, "B V"]:
    """Rule out the tokens that would end a sequence before `min_tokens` are emitted.

    Where a grammar allows nothing but the end, the end stays allowed: a text that breaks the grammar would be worse.
    """
    early = emitted < sampler.min_tokens
    kept = jnp.where(early[:, None] & controls.stops, -jnp.inf, logits)
    return jnp.where((kept == -jnp.inf).all(axis=-1, keepdims=True), logits, kept)


def unpack_bits(words: UInt32[Array, "B X"], size: int) -> Bool[Array, "B V"]:
    """Token v is allowed if bit v % 32 of word v // 32 is set, for each v below `size`."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(words), -1)[:, :size].astype(bool)


def bits_of(token_ids: Seq[int], words: int) -> UInt32[np.ndarray, " X"]:
    """Words in which bit v % 32 of word v // 32 is set for each of these tokens v."""
    marks = np.zeros(words * 32, bool)
    marks[list(token_ids)] = True
    return np.packbits(marks, bitorder="little").view(np.uint32)


def count_emitted(
    controls: Controls, rows: Int[Array, " B"], tokens: Int[Array, "B T"], taken: Bool[Array, "B T"]
) -> Controls:
    """Add emitted tokens to the counts; rows beyond the last slot are dropped."""
    counts = controls.counts.at[rows[:, None], tokens].add(taken.astype(jnp.int32), mode="drop")
    return replace(controls, counts=counts)


def empty_controls(slots: int, vocab_size: int) -> Controls:
    """Controls that change nothing."""
    shape = (slots, vocab_size)
    return Controls(
        counts=jnp.zeros(shape, jnp.int32),
        prompted=jnp.zeros(shape, bool),
        stops=jnp.zeros(shape, bool),
        bias=jnp.zeros(shape, jnp.float32),
    )


def set_controls(controls: Controls, slot: Int[Array, ""], row: Controls) -> Controls:
    """Replace the controls of one slot by `row`, whose arrays are [V]; a step, which donates `controls`."""
    return jax.tree.map(lambda array, new: array.at[slot].set(new), controls, row)
