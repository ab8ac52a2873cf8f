"""The compiled steps: `prefill` of a chunk of prompts, and those of a round: [catch_up -> draft ->] verify -> commit.

Each step takes parameters as plain pytrees, donates the state that it changes, and reads nothing back to the host.

On an accelerator a round of greedy sequences is one step, `greedy_round`. Other rounds are three steps, for two
reasons: each step is compiled only for the shapes that it depends on (all but `commit` depend on page tables, only
`commit` on sampling options), and the host can compute grammar masks while the target verifies the block. The steps are
enqueued together; the device goes from one to the next without waiting for the host.

On a CPU a round is two steps, however tokens are sampled: `draft`, and `verify_commit`, which branches at run time.
Branches cost nothing on a CPU (a GPU would wait for the host at each), while every program costs seconds and 280 memory
maps of the 65,530 that a process may have.

Source of the rules: arXiv 2602.06036 section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.engine.device.acceptance import Confirm, likeliest_tokens
from dflash_jax.engine.device.controls import count_emitted, process
from dflash_jax.engine.device.sampling import logprobs_of, sample, when
from dflash_jax.engine.device.slots import (
    MODES,
    Caches,
    Chunk,
    Controls,
    Emitted,
    FlatParams,
    Logprobs,
    Sampler,
    SamplingMode,
    Slots,
    StepSpec,
    Tables,
    pools_of,
    rows_of,
)
from dflash_jax.models.caches import KVCache
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.models.target import TargetModel
from dflash_jax.parallel.collectives import Devices
from dflash_jax.state.paged_kv import PagedKVCache
from dflash_jax.state.recurrent import RecurrentStates
from dflash_jax.weights.loader import Params

SCORED_ROWS = 64  # tokens of a prompt whose logits are computed at a time: those of a whole chunk would not fit

Chosen = tuple[Int[Array, "B T"], Float[Array, "B T"], Logprobs | None]  # tokens, scores, log-probabilities


def catch_up(
    params: tuple[Params, Params],
    slots: Slots,
    cache: PagedKVCache,
    features: Float[Array, "Q R C"],
    tables: Tables,
    deferred: Int[Array, " B"],
    *,
    spec: StepSpec,
) -> PagedKVCache:
    """Write the drafter's context of tokens whose features were deferred; return the drafter's pools.

    Args:
        params: as for `draft`.
        slots: state of all slots.
        cache: the drafter's pools; donated.
        features: deferred features of all slots, as of `Caches.features`.
        tables: slots and page tables of the B sequences that take part.
        deferred: how many of the newest tokens of each sequence to write, at most R.
        spec: static.
    """
    _, drafter = bind(params, spec)
    assert drafter is not None
    length = rows_of(slots.length, tables.rows)[:, None]
    last = length - 1
    positions = last - (last - jnp.arange(features.shape[1])) % features.shape[1]  # latest position p of each p % R
    positions = jnp.where(positions >= length - deferred[:, None], positions, -1)
    after = drafter.write_context(rows_of(features, tables.rows), positions, tables.over_draft(cache))
    return pools_of(after)


def draft(
    params: tuple[Params, Params], slots: Slots, cache: PagedKVCache, tables: Tables, *, spec: StepSpec
) -> tuple[Int[Array, "B G"], PagedKVCache]:
    """Draft a block: the anchor, and the drafter's tokens for the G-1 positions after it.

    Args:
        params: the target's parameters outside its layers (embedding and head are shared), and the drafter's.
        slots: state of all slots.
        cache: the drafter's pools; donated.
        tables: slots and page tables of the B sequences that take part.
        spec: static.

    Returns:
        The block, and the drafter's pools.
    """
    target, drafter = bind(params, spec)
    assert drafter is not None
    state = rows_of(slots, tables.rows)
    positions = block_positions(slots, tables, spec.block)
    drafts, after = draft_block(target, drafter, state, positions, tables.over_draft(cache))
    block = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    return spec.replicate(block), pools_of(after)


def verify(
    params: FlatParams,
    slots: Slots,
    caches: Caches,
    tables: Tables,
    block: Int[Array, "B G"] | None,
    *,
    spec: StepSpec,
    length: int,
) -> tuple[Float[Array, "B T D"], Caches]:
    """Run the target over the first T = `length` tokens of each block, or over the anchor alone without a block.

    With a block, the drafter's context of all T positions is written too, before it is known which are accepted.
    Rejected positions lie behind the sequence's end, where the next round writes before it reads. Without a block, the
    features are deferred for `catch_up`: perhaps no later round drafts.

    Returns:
        The target's final hidden states, and the caches.
    """
    models, caches = bind(params.unflatten(), spec), caches.for_round(tables, slots)
    positions = block_positions(slots, tables, length)
    tokens = rows_of(slots.anchor, tables.rows)[:, None] if block is None else block[:, :length]
    hidden, features, cache = models[0](tokens, positions, caches.of_target, spec.taps)
    caches = caches.with_target(cache)
    if block is None:
        caches = caches.defer(tables.rows, positions, spec.replicate(features))
    else:
        caches = write_context(models[1], features, positions, caches)
    return spec.replicate(hidden), caches.pools()


def commit(
    params: Params,
    slots: Slots,
    controls: Controls | None,
    rows: Int[Array, " B"],
    hidden: Float[Array, "B T D"],
    block: Int[Array, "B G"] | None,
    sampler: Sampler | None,
    allowed: UInt32[Array, "B T X"] | None,
    needed: Int[Array, ""] | None,
    *,
    spec: StepSpec,
    mode: SamplingMode,
    confirm: Confirm,
) -> tuple[Slots, Controls | None, Emitted]:
    """Sample a token for each verified row, and emit them up to the first that differs from its draft.

    Args:
        params: the target's parameters outside its layers.
        slots: state of all slots; donated.
        controls: controls of all slots; donated. None unless `mode` is one of `CONTROLLED_MODES`.
        rows: slots of the B sequences; beyond the last slot for a row that takes no part.
        hidden: hidden states that `verify` or `prefill` returned.
        block: block that `draft` returned; None without drafts.
        sampler: sampling parameters of all slots; None for mode "greedy".
        allowed: bits of the tokens that each row may emit (X words of 32); None as for `controls`.
        needed: index in `MODES` of the mode that the most demanding sequence needs; None unless `mode` is "any".
        spec: static.
        mode: static; the mode that the most demanding sequence needs, or "any".
        confirm: static; `accepted`, or a benchmark's replacement.

    Returns:
        Slots and controls after the step, and 1 to T emitted tokens a sequence. Log-probabilities mean nothing where
        `needed` is below "reported".
    """
    target = bind_target(params, spec)
    state, row_sampler = rows_of((slots, sampler), rows)
    length = hidden.shape[1]
    drafts = jnp.zeros((len(rows), 0), jnp.int32) if block is None else block[:, 1:length]
    positions = state.length[:, None] + 1 + jnp.arange(length)

    def needs(what: SamplingMode) -> bool | Bool[Array, ""]:
        """Whether any sequence needs this mode: known at compile time, or for "any" at run time."""
        return (MODES.index(mode) if needed is None else needed) >= MODES.index(what)

    def argmax() -> Chosen:
        return *likeliest_tokens(target.likeliest, hidden, drafts, confirm), no_logprobs()

    def sampled() -> Chosen:
        logits = target.logits(hidden)

        def controlled() -> Float[Array, "B T V"]:
            assert controls is not None
            assert row_sampler is not None
            assert allowed is not None
            return process(logits, drafts, state.emitted, row_sampler, rows_of(controls, rows), allowed)

        assert row_sampler is not None
        processed = when(needs("controlled"), controlled, lambda: logits)
        chosen = sample(processed, positions, row_sampler, target.devices, is_filtered=needs("filtered"))
        return *chosen, when(needs("reported"), lambda: logprobs_of(logits, chosen[0]), no_logprobs)

    def no_logprobs() -> Logprobs | None:
        """What stands for log-probabilities: both branches of a program must return the same arrays."""
        return None if needed is None else Logprobs.zeros(len(rows), length, spec.target.vocab_size)

    tokens, scores, logprobs = when(needs("random"), sampled, argmax)
    count = confirm(tokens, drafts) + 1

    taken = jnp.arange(length) < count[:, None]
    broken = (jnp.isnan(scores) & taken).any(axis=1)
    last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)[:, 0]
    slots = slots.put(rows, Slots.of(anchor=last, length=state.length + count, emitted=state.emitted + count))
    if controls is not None:
        controls = count_emitted(controls, rows, tokens, taken)
    return spec.replicate((slots, controls, Emitted.of(tokens, jnp.where(broken, -1, count), logprobs)))


def verify_commit(
    params: FlatParams,
    slots: Slots,
    controls: Controls,
    caches: Caches,
    tables: Tables,
    block: Int[Array, "B G"] | None,
    sampler: Sampler,
    allowed: UInt32[Array, "B T X"],
    needed: Int[Array, ""],
    *,
    spec: StepSpec,
    length: int,
    mode: SamplingMode,
    confirm: Confirm,
) -> tuple[Slots, Controls | None, Caches, Emitted]:
    """Run `verify` and `commit` in one program, with their arguments and results."""
    with jax.named_scope("verify"):
        hidden, caches = verify(params, slots, caches, tables, block, spec=spec, length=length)
    inputs = (tables.rows, hidden, block, sampler, allowed, needed)
    with jax.named_scope("commit"):
        slots, after, emitted = commit(
            params.unflatten()[0], slots, controls, *inputs, spec=spec, mode=mode, confirm=confirm
        )
    return slots, after, caches, emitted


def greedy_round(
    params: FlatParams,
    slots: Slots,
    caches: Caches,
    tables: Tables,
    *,
    spec: StepSpec,
    length: int,
    confirm: Confirm,
) -> tuple[Slots, Caches, Emitted]:
    """Draft, verify and commit in one program, for sequences that are all greedy: the host starts one, not three.

    Args:
        params: the target's and the drafter's parameters.
        slots: state of all slots; donated.
        caches: donated.
        tables: slots and page tables of the B sequences that take part.
        spec: static.
        length: static; tokens to verify, 1 without drafting.
        confirm: static; as for `commit`.
    """
    both, block = params.unflatten(), None
    if length > 1:
        with jax.named_scope("draft"):
            block, cache = draft(both, slots, caches.draft, tables, spec=spec)
        caches = caches.with_draft(cache)
    with jax.named_scope("verify"):
        hidden, caches = verify(params, slots, caches, tables, block, spec=spec, length=length)
    inputs = (tables.rows, hidden, block, None, None, None)
    with jax.named_scope("commit"):
        slots, _, emitted = commit(both[0], slots, None, *inputs, spec=spec, mode="greedy", confirm=confirm)
    return slots, caches, emitted


def prefill(
    params: FlatParams, slots: Slots, caches: Caches, chunk: Chunk, *, spec: StepSpec
) -> tuple[Slots, Caches, Float[Array, "B 1 D"], Float[Array, "B T D"]]:
    """Process a chunk of B prompts, and write the drafter's context of it.

    Each slot is left as if a round had verified the prompt up to its last token: `commit` of that one row then emits
    the first token. A preempted sequence has its first token already; its slot is ready to draft.

    Returns:
        The slots and caches after the step; the final hidden state of each prompt's last token in the chunk; the inputs
        of the target's last layer, for `score`.
    """
    models, caches = bind(params.unflatten(), spec), caches.for_chunk(chunk)
    last, features, before, cache = models[0].prefill(chunk.tokens, chunk.positions, caches.of_target, spec.taps)
    caches = write_context(models[1], features, chunk.positions, caches.with_target(cache))
    is_new = chunk.anchor < 0
    ready = Slots.of(anchor=chunk.anchor, length=chunk.length - is_new, emitted=chunk.emitted)
    slots, last, before = spec.replicate((slots.put(chunk.tables.rows, ready), last, before))
    return slots, caches.pools(), last, before


def score(
    params: FlatParams,
    cache: PagedKVCache,
    chunk: Chunk,
    before: Float[Array, "1 T D"],
    following: Int[Array, "1 T"],
    *,
    spec: StepSpec,
) -> Logprobs:
    """Log-probabilities of the `following` tokens of a chunk of one prompt that `prefill` has just processed."""
    target = bind_target(params.unflatten()[0], spec)
    hidden = target.finish(before, chunk.positions, chunk.tables.over_target(cache))
    tokens = hidden.shape[1]
    rows = min(SCORED_ROWS, tokens)
    missing = -tokens % rows  # the longest chunk has as many tokens as the engine's limits leave

    def one(block: tuple[Float[Array, "R D"], Int[Array, " R"]]) -> Logprobs:
        return logprobs_of(target.logits(block[0][None]), block[1][None])

    def in_blocks(array: Array) -> Array:
        padded = jnp.pad(array[0], [(0, missing), *[(0, 0)] * (array.ndim - 2)])
        return padded.reshape(-1, rows, *array.shape[2:])

    scored = jax.lax.map(one, (in_blocks(hidden), in_blocks(following)))
    return spec.replicate(jax.tree.map(lambda array: array.reshape(1, -1, *array.shape[3:])[:, :tokens], scored))


def copy_states(
    params: FlatParams,
    slots: Slots,
    states: RecurrentStates,
    moves: Int[Array, "B 3"],
    *,
    spec: StepSpec,
) -> RecurrentStates:
    """Take or restore snapshots of recurrent states.

    Args:
        params: the target's and the drafter's parameters.
        slots: state of all slots.
        states: donated.
        moves: for each, the row to read, the row to write, and the number of tokens; see `RecurrentStates.copied`.
        spec: static.
    """
    weights = bind_target(params.unflatten()[0], spec).recurrent_weights()
    return states.copied(weights, moves[:, 0], moves[:, 1], moves[:, 2], slots.length)


def bind(params: tuple[Params, Params], spec: StepSpec) -> tuple[TargetModel, DraftModel | None]:
    """Target and drafter of a step, with their parameters."""
    devices = Devices(spec.mesh, params[0].get("peers"))
    draft = None if spec.draft is None else DraftModel(spec.draft, devices).bind({"params": params[1]})
    return bind_target(params[0], spec), draft


def bind_target(params: Params, spec: StepSpec) -> TargetModel:
    """The target with its parameters; those outside its layers are enough for its embedding and head.

    `params` may also hold `peers`, the mailboxes of devices that share the models.
    """
    return TargetModel(spec.target, Devices(spec.mesh, params.get("peers"))).bind({"params": params})


def block_positions(slots: Slots, tables: Tables, length: int) -> Int[Array, "B T"]:
    """Positions of the next `length` tokens of each sequence, -1 in rows of padding."""
    takes_part = tables.rows < len(slots.packed)
    positions = rows_of(slots.length, tables.rows)[:, None] + jnp.arange(length)
    return jnp.where(takes_part[:, None], positions, -1)


def write_context(
    drafter: DraftModel | None, features: Float[Array, "B T C"], positions: Int[Array, "B T"], caches: Caches
) -> Caches:
    """Write the drafter's context of these features, if there is a drafter."""
    return caches if drafter is None else caches.with_draft(drafter.write_context(features, positions, caches.draft))


def draft_block(
    target: TargetModel, drafter: DraftModel, slots: Slots, positions: Int[Array, "B G"], cache: KVCache
) -> tuple[Int[Array, "B G-1"], KVCache]:
    """Draft tokens for positions n+1..n+G-1 from the anchor and G-1 mask tokens at n..n+G-1."""
    masked = jnp.full_like(positions[:, 1:], drafter.config.mask_token_id)
    embedded = target.embed(jnp.concatenate([slots.anchor[:, None], masked], axis=1))
    hidden, cache = drafter(embedded, positions, cache)
    # Row j predicts the token at its own position; the anchor's is already known.
    drafted = drafter.tokens(jax.tree.map(lambda x: x[:, 1:], hidden), target.draft_head, target.config.num_tokens)
    return drafted, cache
