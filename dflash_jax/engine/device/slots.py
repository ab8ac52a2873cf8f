"""What a compiled step is specialised on, and the state of the running sequences that it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.base.values import MOST_LOGPROBS
from dflash_jax.models.layers import KVCache
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.state.paged_kv import PagedKVCache
from dflash_jax.weights.loader import Params

Tree = TypeVar("Tree")
SamplingMode = Literal["greedy", "random", "filtered", "controlled", "reported", "any"]
# Each can do what the one before can: temperature, top-k and top-p, penalties with biases and masks, log-probabilities.
MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered", "controlled", "reported")
ANY: SamplingMode = "any"  # one program that is told at run time which of them is needed
CONTROLLED_MODES: tuple[SamplingMode, ...] = ("controlled", "reported", ANY)  # these take `Controls` and masks
GROUPS = 2  # groups of a layout: layers that keep every token, and sliding layers of the drafter
DEFERRED = 16  # rounds without drafts whose features may wait to become context of the drafter


@dataclass(frozen=True)
class StepSpec:
    """The static argument of every compiled step, and so the key under which it is reused.

    The configurations hold the normalised tap ids and the mask of every layer.

    Attributes:
        target: the target.
        draft: the drafter, None without one.
        block: G, tokens of a drafted block; 1 without a drafter.
        mesh: devices; what steps hand to each other lies whole on each of them, but for the pools.
    """

    target: TargetConfig
    draft: DraftConfig | None
    block: int
    mesh: Mesh

    def replicate(self, tree: Tree) -> Tree:
        """Inside a step: let the arrays lie whole on every device, whatever the compiler would choose."""
        return jax.lax.with_sharding_constraint(tree, self.mesh.whole)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter wants."""
        return () if self.draft is None else self.draft.target_layer_ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatParams:
    """Parameters of target and drafter, flattened once: JAX would walk the tree at each call of a step, on the host."""

    leaves: tuple[jax.Array, ...]
    structure: Any = field(metadata={"static": True})

    @staticmethod
    def of(params: tuple[Params, Params]) -> FlatParams:
        """From the target's and the drafter's."""
        leaves, structure = jax.tree.flatten(params)
        return FlatParams(tuple(leaves), structure)

    def unflatten(self) -> tuple[Params, Params]:
        """The target's and the drafter's."""
        params: tuple[Params, Params] = self.structure.unflatten(self.leaves)
        return params


def rows_of(tree: Tree, rows: Int[Array, " B"]) -> Tree:
    """What arrays over all slots hold of some; a row beyond the last slot gets anything."""
    return jax.tree.map(lambda whole: whole.at[rows].get(mode="clip"), tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """Sampling parameters of Q slots; `SamplingParams` says what each means."""

    temperature: Float[Array, " Q"]
    top_p: Float[Array, " Q"]
    top_k: Int[Array, " Q"]  # V keeps all
    min_p: Float[Array, " Q"]
    key: UInt32[Array, "Q 2"]  # words of the seed
    presence_penalty: Float[Array, " Q"]
    frequency_penalty: Float[Array, " Q"]
    repetition_penalty: Float[Array, " Q"]
    min_tokens: Int[Array, " Q"]
    has_bias: Bool[Array, " Q"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Controls:
    """What penalties, biases and `min_tokens` know of each token of the vocabulary, for Q slots; donated.

    A slot's rows mean something only while its sequence uses them.

    Attributes:
        counts: how often the slot's sequence has emitted the token.
        prompted: whether the token stands in its prompt.
        stops: whether the token ends it.
        bias: added to the logits; -inf where `allowed_token_ids` leaves a token out.
    """

    counts: Int[Array, "Q V"]
    prompted: Bool[Array, "Q V"]
    stops: Bool[Array, "Q V"]
    bias: Float[Array, "Q V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of Q slots that only the device knows in time; donated from step to step.

    It is one array, since the host pays for each array that a step gives back, on each device.
    """

    packed: Int[Array, "Q 3"]

    @staticmethod
    def of(*, anchor: Int[Array, " Q"], length: Int[Array, " Q"], emitted: Int[Array, " Q"]) -> Slots:
        """From its parts."""
        return Slots(jnp.stack([anchor, length, emitted], axis=-1))

    @property
    def anchor(self) -> Int[Array, " Q"]:
        """Last emitted token, not yet processed by the target."""
        return self.packed[:, 0]

    @property
    def length(self) -> Int[Array, " Q"]:
        """n, tokens processed by the target; the anchor's position."""
        return self.packed[:, 1]

    @property
    def emitted(self) -> Int[Array, " Q"]:
        """Tokens emitted so far."""
        return self.packed[:, 2]

    def put(self, rows: Int[Array, " B"], own: Slots) -> Slots:
        """With the state of some slots replaced; rows beyond the last slot are dropped."""
        return Slots(self.packed.at[rows].set(own.packed, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """Slots and page tables of B sequences, packed so that they reach the device in one transfer.

    Attributes:
        packed: the slot, beyond the last one for a row of padding; of each group but the first, which keeps every
            token, the first position that is kept (a prefix hit leaves a gap before it); the page table of each group,
            M entries each, of which a negative one keeps nothing.
    """

    packed: Int[Array, "B _"]

    @staticmethod
    def pack(rows: np.ndarray, valid_from: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> Tables:
        """Pack host arrays.

        Args:
            rows: slots [B].
            valid_from: first position that is kept, of each of the `GROUPS` groups but the first, [B].
            tables: of each group, [B, M].
        """
        columns = [array[:, None] for array in (rows, *valid_from)]
        packed: Any = np.concatenate([*columns, *tables], axis=1, dtype=np.int32)
        return Tables(packed)

    @staticmethod
    def width(pages: int) -> int:
        """Columns of `packed` where each table has so many pages."""
        return GROUPS * (pages + 1)

    def over_target(self, cache: PagedKVCache) -> PagedKVCache:
        """The target's cache seen through these tables: its layers are all of the first group."""
        return replace(cache, tables=self.tables[:1], valid_from=self.valid_from[:1])

    def over_draft(self, cache: PagedKVCache) -> PagedKVCache:
        """The drafter's cache seen through these tables."""
        return replace(cache, tables=self.tables, valid_from=self.valid_from)

    @property
    def pages(self) -> int:
        """M, entries of each table."""
        return self.packed.shape[1] // GROUPS - 1

    @property
    def rows(self) -> Int[Array, " B"]:
        """The slots."""
        return self.packed[:, 0]

    @property
    def valid_from(self) -> tuple[Int[Array, " B"], ...]:
        """First position that each group keeps."""
        others = tuple(self.packed[:, index] for index in range(1, GROUPS))
        return (jnp.zeros_like(others[0]), *others)

    @property
    def tables(self) -> tuple[Int[Array, "B M"], ...]:
        """Page table of each group."""
        starts = [GROUPS + index * self.pages for index in range(GROUPS)]
        return tuple(self.packed[:, start : start + self.pages] for start in starts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A part of the prompts of B sequences, to be prefilled.

    Attributes:
        tokens: of the chunk.
        positions: absolute, -1 for padding behind the tokens.
        length: of each whole prompt.
        emitted: tokens that a sequence had emitted before it was preempted; they are part of its prompt.
        anchor: its last emitted token then, -1 for a sequence whose first token is still to be sampled.
        tables: slots and page tables.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    length: Int[Array, " B"]
    emitted: Int[Array, " B"]
    anchor: Int[Array, " B"]
    tables: Tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """What is kept of processed tokens.

    Attributes:
        target: pools of the target.
        draft: pools of the drafter's context; without a drafter they have no layers.
        features: of the tokens that the last rounds without drafts have processed in each of Q slots, that of position
            p at p % R, R = `DEFERRED`. They are no context yet: that would cost a tenth of a drafted round, and be for
            nothing where nobody drafts.
    """

    target: PagedKVCache
    draft: PagedKVCache
    features: Float[Array, "Q R C"]

    def through(self, tables: Tables) -> Caches:
        """The caches seen through the page tables of a step."""
        return replace(self, target=tables.over_target(self.target), draft=tables.over_draft(self.draft))

    def with_target(self, cache: KVCache) -> Caches:
        """After the target wrote to its cache."""
        assert isinstance(cache, PagedKVCache)
        return replace(self, target=cache)

    def with_draft(self, cache: KVCache) -> Caches:
        """After the drafter wrote to its cache."""
        assert isinstance(cache, PagedKVCache)
        return replace(self, draft=cache)

    def defer(self, rows: Int[Array, " B"], positions: Int[Array, "B 1"], features: Float[Array, "B 1 C"]) -> Caches:
        """After a round without drafts."""
        kept = self.features.at[rows, positions[:, 0] % DEFERRED].set(features[:, 0], mode="drop")
        return replace(self, features=kept)

    def pools(self) -> Caches:
        """Without the tables."""
        return replace(self, target=pools_of(self.target), draft=pools_of(self.draft))


def pools_of(cache: KVCache) -> PagedKVCache:
    """A cache without tables."""
    assert isinstance(cache, PagedKVCache)
    return replace(cache, tables=(), valid_from=())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """Tokens of one step.

    Attributes:
        packed: the tokens of each row, and how many of them were emitted.
        logprobs: of the same rows; None unless asked for.
    """

    packed: Int[Array, "B T+1"]
    logprobs: Logprobs | None

    @staticmethod
    def of(tokens: Int[Array, "B T"], count: Int[Array, " B"], logprobs: Logprobs | None) -> Emitted:
        """From its parts."""
        return Emitted(jnp.concatenate([tokens, count[:, None]], axis=1), logprobs)

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """Of row b, the first `count[b]` were emitted."""
        return self.packed[:, :-1]

    @property
    def count(self) -> Int[Array, " B"]:
        """From 1 to T; -1 where the logits were no numbers."""
        return self.packed[:, -1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the unprocessed distribution: of the chosen tokens, and of the A likeliest."""

    chosen: Float[Array, "B T"]
    rank: Int[Array, "B T"]  # 1 = likeliest
    top: Float[Array, "B T A"]
    top_tokens: Int[Array, "B T A"]

    @staticmethod
    def zeros(B: int, T: int, V: int) -> Logprobs:
        """Zeros in the shapes that log-probabilities over V tokens have."""
        A = min(MOST_LOGPROBS, V)
        return Logprobs(
            chosen=jnp.zeros((B, T), jnp.float32),
            rank=jnp.zeros((B, T), jnp.int32),
            top=jnp.zeros((B, T, A), jnp.float32),
            top_tokens=jnp.zeros((B, T, A), jnp.int32),
        )
