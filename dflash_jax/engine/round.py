"""The compiled steps: prefill a chunk of prompts, and a round of draft -> verify -> commit.

Both take parameters as plain pytrees, donate the slots and the caches, and read nothing back to the host.
Source of the rules: arXiv 2602.06036 section 4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.checkpoint.loader import Params
from dflash_jax.engine.sampling import logprobs_of, sample
from dflash_jax.engine.state import Caches, Emitted, Slots, StepSpec
from dflash_jax.models.dflash import DraftModel
from dflash_jax.models.layers import KVCache
from dflash_jax.models.target import TargetModel


@partial(jax.jit, static_argnames="spec", donate_argnames=("slots", "caches"))
def run_round(
    params: tuple[Params, Params], slots: Slots, caches: Caches, *, spec: StepSpec
) -> tuple[Slots, Caches, Emitted]:
    """Draft a block, verify it with the target, commit what it confirmed.

    Args:
        params: the target's, and the drafter's (empty without one).
        slots: the sequences; donated.
        caches: their keys and values; donated.
        spec: static.

    Returns:
        The slots and caches after the round, and the tokens it emitted: at least one for each active
        sequence, at most G = `spec.block`.
    """
    target, draft = bind(params, spec)
    positions = slots.block_positions(spec.block)
    block = slots.anchor[:, None]
    if draft is not None:
        drafts, draft_cache = draft_block(target, draft, slots, caches.draft, spec.block)
        block = jnp.concatenate([block, drafts], axis=1)
        caches = replace(caches, draft=draft_cache)

    hidden, features, target_cache = target(block, positions, caches.target, taps(spec))
    caches = replace(caches, target=target_cache)
    logits = target.logits(hidden)
    emitted_before = slots.emitted[:, None] + jnp.arange(spec.block)
    tokens = sample(logits, positions + 1, emitted_before, slots.sampler, spec.sampling)
    count = accepted(tokens, block[:, 1:]) + 1

    if draft is not None:
        confirmed = jnp.arange(spec.block) < count[:, None]
        context_positions = jnp.where(confirmed, positions, -1)
        caches = replace(caches, draft=draft.write_context(features, context_positions, caches.draft))
    last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0]
    emitted = Emitted(tokens, jnp.where(slots.active, count, 0), logprobs_of(logits, tokens, spec.num_logprobs))
    return slots.advance(count, last), caches, emitted


@partial(jax.jit, static_argnames="spec", donate_argnames=("slots", "caches"))
def prefill_chunk(
    params: tuple[Params, Params],
    slots: Slots,
    caches: Caches,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    spec: StepSpec,
) -> tuple[Slots, Caches, Emitted]:
    """Process a chunk of prompts, and emit the first token of the sequences whose prompt ends in it.

    `slots.length` is the length of the prompt meanwhile.

    Args:
        params: the target's, and the drafter's (empty without one).
        slots: the sequences; donated.
        caches: filled up to the chunk; donated.
        tokens: of the chunk.
        positions: absolute, -1 for padding.
        spec: static.
    """
    target, draft = bind(params, spec)
    hidden, features, target_cache = target(tokens, positions, caches.target, taps(spec))
    caches = replace(caches, target=target_cache)
    if draft is not None:
        caches = replace(caches, draft=draft.write_context(features, positions, caches.draft))

    is_last = positions == slots.length[:, None] - 1
    ends = is_last.any(axis=1) & slots.active
    logits = target.logits(jnp.take_along_axis(hidden, is_last.argmax(axis=1)[:, None, None], axis=1))
    first = sample(logits, slots.length[:, None], slots.emitted[:, None], slots.sampler, spec.sampling)
    slots = replace(
        slots, anchor=jnp.where(ends, first[:, 0], slots.anchor), emitted=slots.emitted + ends.astype(jnp.int32)
    )
    return slots, caches, Emitted(first, ends.astype(jnp.int32), logprobs_of(logits, first, spec.num_logprobs))


def bind(params: tuple[Params, Params], spec: StepSpec) -> tuple[TargetModel, DraftModel | None]:
    """The models of a step with their parameters."""
    target = TargetModel(spec.target).bind({"params": params[0]})
    return target, None if spec.draft is None else DraftModel(spec.draft).bind({"params": params[1]})


def taps(spec: StepSpec) -> tuple[int, ...]:
    """Target layers whose outputs the drafter wants."""
    return () if spec.draft is None else spec.draft.target_layer_ids


def draft_block(
    target: TargetModel, draft: DraftModel, slots: Slots, cache: KVCache, block: int
) -> tuple[Int[Array, "B {block}-1"], KVCache]:
    """The drafter's tokens for positions n+1..n+G-1, from the anchor and G-1 mask tokens at n..n+G-1."""
    masked = jnp.full((slots.anchor.shape[0], block - 1), draft.config.mask_token_id, jnp.int32)
    embedded = target.embed(jnp.concatenate([slots.anchor[:, None], masked], axis=1))
    hidden, cache = draft(embedded, slots.block_positions(block), cache)
    # Row j predicts the token at its own position; the anchor's is already known.
    return draft.tokens(hidden[:, 1:], target.head), cache


def accepted(tokens: Int[Array, "B G"], drafts: Int[Array, "B G-1"]) -> Int[Array, " B"]:
    """How many drafts the target confirms: the longest prefix in which its own tokens are the drafts."""
    return jnp.cumprod(drafts == tokens[:, :-1], axis=1, dtype=jnp.int32).sum(axis=1)
