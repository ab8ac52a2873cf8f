"""What a compiled step is specialised on, and the state of the running sequences that it carries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

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
    """State of B sequences on the device.

    Attributes:
        anchor: last emitted token, not yet processed by the target.
        length: n, tokens processed by the target; the anchor's position.
        emitted: tokens emitted so far.
        active: False for sequences that have ended; they write nothing.
        sampler: their sampling parameters.
    """

    anchor: Int[Array, " B"]
    length: Int[Array, " B"]
    emitted: Int[Array, " B"]
    active: Bool[Array, " B"]
    sampler: Sampler

    def block_positions(self, block: int) -> Int[Array, "B G"]:
        """Positions n..n+G-1 of each sequence, -1 for those that have ended."""
        positions = self.length[:, None] + jnp.arange(block)
        return jnp.where(self.active[:, None], positions, -1)

    def advance(self, count: Int[Array, " B"], last: Int[Array, " B"]) -> Slots:
        """After a round: `count` more tokens are processed and emitted, `last` is the new anchor."""
        count = jnp.where(self.active, count, 0)
        return replace(
            self,
            anchor=jnp.where(self.active, last, self.anchor),
            length=self.length + count,
            emitted=self.emitted + count,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """Keys and values of the target and of the drafter's context; without a drafter the latter has no layers."""

    target: KVCache
    draft: KVCache


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
