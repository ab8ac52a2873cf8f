"""The compiled steps: prefill a chunk of prompts, and a round of draft -> verify -> commit.

Both take parameters as plain pytrees, donate the slots and the caches, and read nothing back to the host.
Source of the rules: arXiv 2602.06036 section 4.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.checkpoint.loader import Params
from dflash_jax.engine.sampling import logprobs_of, sample
from dflash_jax.engine.state import Caches, Chunk, Emitted, Sampler, Slots, StepSpec, Tables
from dflash_jax.models.dflash import DraftModel
from dflash_jax.models.layers import KVCache
from dflash_jax.models.target import TargetModel

Tree = TypeVar("Tree")


@partial(jax.jit, static_argnames="spec", donate_argnames=("slots", "caches"))
def run_round(
    params: tuple[Params, Params],
    slots: Slots,
    caches: Caches,
    tables: Tables,
    sampler: Sampler,
    active: Bool[Array, " B"],
    *,
    spec: StepSpec,
) -> tuple[Slots, Caches, Emitted]:
    """Draft a block, verify it with the target, commit what it confirmed; for the first B slots.

    Args:
        params: the target's, and the drafter's (empty without one).
        slots: all slots; donated.
        caches: all pools; donated.
        tables: of the first B slots.
        sampler: of all slots.
        active: which of the B slots take part; the others write and emit nothing.
        spec: static.

    Returns:
        The slots and caches after the round, and the tokens it emitted: at least one for each active slot, at
        most G = `spec.block`.
    """
    target, draft = bind(params, spec)
    own = first_rows(slots, len(active))
    own_sampler = first_rows(sampler, len(active))
    caches = caches.through(tables)
    positions = jnp.where(active[:, None], own.length[:, None] + jnp.arange(spec.block), -1)
    block = own.anchor[:, None]
    if draft is not None:
        drafts, draft_cache = draft_block(target, draft, own, positions, caches.draft)
        block = jnp.concatenate([block, drafts], axis=1)
        caches = caches.with_draft(draft_cache)

    hidden, features, target_cache = target(block, positions, caches.target, taps(spec))
    caches = caches.with_target(target_cache)
    logits = target.logits(hidden)
    emitted_before = own.emitted[:, None] + jnp.arange(spec.block)
    tokens = sample(logits, positions + 1, emitted_before, own_sampler, spec.sampling)
    count = accepted(tokens, block[:, 1:]) + 1

    if draft is not None:
        confirmed = jnp.arange(spec.block) < count[:, None]
        context_positions = jnp.where(confirmed, positions, -1)
        caches = caches.with_draft(draft.write_context(features, context_positions, caches.draft))
    last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0]
    count = jnp.where(active, count, 0)
    after = Slots(anchor=jnp.where(active, last, own.anchor), length=own.length + count, emitted=own.emitted + count)
    slots = jax.tree.map(lambda whole, part: whole.at[: len(active)].set(part), slots, after)
    return slots, caches.pools(), Emitted(tokens, count, logprobs_of(logits, tokens, spec.num_logprobs))


@partial(jax.jit, static_argnames="spec", donate_argnames=("slots", "caches"))
def prefill_chunk(
    params: tuple[Params, Params], slots: Slots, caches: Caches, chunk: Chunk, sampler: Sampler, *, spec: StepSpec
) -> tuple[Slots, Caches, Emitted]:
    """Process a part of R prompts, and emit the first token of the sequences whose prompt ends in it.

    Args:
        params: the target's, and the drafter's (empty without one).
        slots: all slots; donated. Those of the chunk are set up to decode from the end of their prompt.
        caches: all pools, filled up to the chunk; donated.
        chunk: the part.
        sampler: of all slots.
        spec: static.
    """
    target, draft = bind(params, spec)
    caches = caches.through(chunk.tables)
    hidden, features, target_cache = target(chunk.tokens, chunk.positions, caches.target, taps(spec))
    caches = caches.with_target(target_cache)
    if draft is not None:
        caches = caches.with_draft(draft.write_context(features, chunk.positions, caches.draft))

    is_last = chunk.positions == chunk.length[:, None] - 1
    is_new = chunk.anchor < 0
    logits = target.logits(jnp.take_along_axis(hidden, is_last.argmax(axis=1)[:, None, None], axis=1))
    own_sampler = jax.tree.map(lambda whole: whole.at[chunk.rows].get(mode="clip"), sampler)
    first = sample(logits, chunk.length[:, None], chunk.emitted[:, None], own_sampler, spec.sampling)
    count = (is_last.any(axis=1) & is_new).astype(jnp.int32)
    ready = Slots(
        anchor=jnp.where(is_new, first[:, 0], chunk.anchor), length=chunk.length, emitted=chunk.emitted + count
    )
    slots = jax.tree.map(lambda whole, part: whole.at[chunk.rows].set(part, mode="drop"), slots, ready)
    return slots, caches.pools(), Emitted(first, count, logprobs_of(logits, first, spec.num_logprobs))


def first_rows(tree: Tree, number: int) -> Tree:
    """The first rows of every array."""
    return jax.tree.map(lambda array: array[:number], tree)


def bind(params: tuple[Params, Params], spec: StepSpec) -> tuple[TargetModel, DraftModel | None]:
    """The models of a step with their parameters."""
    target = TargetModel(spec.target).bind({"params": params[0]})
    return target, None if spec.draft is None else DraftModel(spec.draft).bind({"params": params[1]})


def taps(spec: StepSpec) -> tuple[int, ...]:
    """Target layers whose outputs the drafter wants."""
    return () if spec.draft is None else spec.draft.target_layer_ids


def draft_block(
    target: TargetModel, draft: DraftModel, slots: Slots, positions: Int[Array, "B G"], cache: KVCache
) -> tuple[Int[Array, "B G-1"], KVCache]:
    """The drafter's tokens for positions n+1..n+G-1, from the anchor and G-1 mask tokens at n..n+G-1."""
    masked = jnp.full_like(positions[:, 1:], draft.config.mask_token_id)
    embedded = target.embed(jnp.concatenate([slots.anchor[:, None], masked], axis=1))
    hidden, cache = draft(embedded, positions, cache)
    # Row j predicts the token at its own position; the anchor's is already known.
    return draft.tokens(hidden[:, 1:], target.head), cache


def accepted(tokens: Int[Array, "B G"], drafts: Int[Array, "B G-1"]) -> Int[Array, " B"]:
    """How many drafts the target confirms: the longest prefix in which its own tokens are the drafts."""
    return jnp.cumprod(drafts == tokens[:, :-1], axis=1, dtype=jnp.int32).sum(axis=1)
