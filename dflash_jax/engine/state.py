"""What a compiled step is specialised on, and the state of the running sequences that it carries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.cache.paged import PagedKVCache
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models.layers import KVCache

SamplingMode = Literal["greedy", "random", "filtered"]


@dataclass(frozen=True)
class StepSpec:
    """The static argument of every compiled step, and so the key under which it is reused.

    The configurations hold the normalised tap ids and the mask of every layer.

    Attributes:
        target: the target.
        draft: the drafter, None without one.
        block: G, tokens verified in a round; 1 without a drafter.
        sampling: what the most demanding sequence of the batch needs: no randomness, temperature alone, or
            a sort for top-k and top-p too.
        num_logprobs: likeliest alternatives to report, None when nobody asked for log-probabilities.
    """

    target: TargetConfig
    draft: DraftConfig | None
    block: int
    sampling: SamplingMode
    num_logprobs: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """Sampling parameters of B sequences; `SamplingParams` says what each means."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]  # V keeps all
    min_p: Float[Array, " B"]
    min_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B E"]  # tokens that min_tokens forbids, -1 where there are fewer
    key: UInt32[Array, "B 2"]  # words of the seed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of B slots that only the device knows in time; donated from step to step.

    Attributes:
        anchor: last emitted token, not yet processed by the target.
        length: n, tokens processed by the target; the anchor's position.
        emitted: tokens emitted so far.
    """

    anchor: Int[Array, " B"]
    length: Int[Array, " B"]
    emitted: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """Page tables of B slots, one a KV group; a negative entry keeps nothing.

    Attributes:
        full: of the target's layers and the drafter's full layers.
        sliding: of the drafter's sliding layers.
        sliding_from: first position that the sliding layers have keys of; a prefix hit leaves a gap before it.
    """

    full: Int[Array, "B M"]
    sliding: Int[Array, "B M"]
    sliding_from: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A part of the prompts of R sequences, to be prefilled.

    Attributes:
        rows: their slots; beyond the last slot for padding.
        tokens: of the chunk.
        positions: absolute, -1 for padding behind the tokens.
        length: of each whole prompt.
        emitted: tokens that a sequence had emitted before it was preempted; they are part of its prompt.
        anchor: its last emitted token then, -1 for a sequence whose first token is still to be sampled.
        tables: page tables of the R sequences.
    """

    rows: Int[Array, " R"]
    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    length: Int[Array, " R"]
    emitted: Int[Array, " R"]
    anchor: Int[Array, " R"]
    tables: Tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """Pools of the target and of the drafter's context; without a drafter the latter has no layers."""

    target: PagedKVCache
    draft: PagedKVCache

    def through(self, tables: Tables) -> Caches:
        """The caches seen through the page tables of a step."""
        everything = jnp.zeros_like(tables.sliding_from)
        return Caches(
            target=replace(self.target, tables=(tables.full,), valid_from=(everything,)),
            draft=replace(
                self.draft, tables=(tables.full, tables.sliding), valid_from=(everything, tables.sliding_from)
            ),
        )

    def with_target(self, cache: KVCache) -> Caches:
        """After the target wrote to its cache."""
        assert isinstance(cache, PagedKVCache)
        return replace(self, target=cache)

    def with_draft(self, cache: KVCache) -> Caches:
        """After the drafter wrote to its cache."""
        assert isinstance(cache, PagedKVCache)
        return replace(self, draft=cache)

    def pools(self) -> Caches:
        """Without the tables."""
        return Caches(*(replace(cache, tables=(), valid_from=()) for cache in (self.target, self.draft)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """Tokens of one step: of row b, the first `count[b]` of T were emitted.

    The log-probabilities belong to the same rows and are None unless asked for.
    """

    tokens: Int[Array, "B T"]
    count: Int[Array, " B"]
    logprobs: Logprobs | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the unprocessed distribution: of the chosen tokens, and of the A likeliest."""

    chosen: Float[Array, "B T"]
    rank: Int[Array, "B T"]  # 1 = likeliest
    top: Float[Array, "B T A"]
    top_tokens: Int[Array, "B T A"]
