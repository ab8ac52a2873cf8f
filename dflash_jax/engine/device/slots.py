"""What compiled steps are specialised on, and the state of running sequences that they hand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.base.values import MOST_LOGPROBS
from dflash_jax.models.caches import KVCache
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.state.hybrid import HybridCache
from dflash_jax.state.paged_kv import PagedKVCache
from dflash_jax.state.recurrent import RecurrentStates
from dflash_jax.weights.loader import Params

Tree = TypeVar("Tree")
SamplingMode = Literal["greedy", "random", "filtered", "controlled", "reported", "any"]
# Each mode adds to the one before: temperature; top-k and top-p; penalties, biases and masks; log-probabilities.
MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered", "controlled", "reported")
ANY: SamplingMode = "any"  # a program that branches: it is told at run time which mode is needed
CONTROLLED_MODES: tuple[SamplingMode, ...] = ("controlled", "reported", ANY)  # modes that take `Controls` and masks
GROUPS = 2  # groups of a layout: layers that keep every token, and sliding layers of the drafter
DEFERRED = 16  # tokens of a sequence whose features may wait to become context of the drafter


@dataclass(frozen=True)
class StepSpec:
    """The static argument of every compiled step, and so the key under which it is reused.

    Attributes:
        target: configuration of the target.
        draft: configuration of the drafter, with the ids of its capture layers; None without a drafter.
        block: G, tokens of a drafted block; 1 without a drafter.
        mesh: devices; all arrays that steps hand to each other are replicated on them, but for the pools.
    """

    target: TargetConfig
    draft: DraftConfig | None
    block: int
    mesh: Mesh

    def replicate(self, tree: Tree) -> Tree:
        """Inside a step: keep these arrays whole on every device, whatever the compiler would choose."""
        return jax.lax.with_sharding_constraint(tree, self.mesh.whole)

    @property
    def taps(self) -> tuple[int, ...]:
        """Capture layers: target layers whose outputs are the drafter's features."""
        return () if self.draft is None else self.draft.target_layer_ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatParams:
    """Parameters of target and drafter, flattened once: JAX would otherwise walk the tree at each call of a step."""

    leaves: tuple[jax.Array, ...]
    structure: Any = field(metadata={"static": True})

    @staticmethod
    def of(params: tuple[Params, Params]) -> FlatParams:
        """Flatten the parameters of target and drafter."""
        leaves, structure = jax.tree.flatten(params)
        return FlatParams(tuple(leaves), structure)

    def unflatten(self) -> tuple[Params, Params]:
        """Parameters of target and drafter."""
        params: tuple[Params, Params] = self.structure.unflatten(self.leaves)
        return params


def rows_of(tree: Tree, rows: Int[Array, " B"]) -> Tree:
    """Rows of arrays over all slots; a row beyond the last slot reads the last one's."""
    return jax.tree.map(lambda array: array.at[rows].get(mode="clip"), tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """Sampling parameters of Q slots, as documented in `SamplingParams`."""

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
    """What penalties, biases and `min_tokens` need for each token of the vocabulary, for Q slots; donated.

    A slot's row means something only while its sequence uses controls.

    Attributes:
        counts: how often the slot's sequence has emitted the token.
        prompted: whether the token stands in its prompt.
        stops: whether the token ends the sequence.
        bias: added to the logits; -inf where `allowed_token_ids` leaves a token out.
    """

    counts: Int[Array, "Q V"]
    prompted: Bool[Array, "Q V"]
    stops: Bool[Array, "Q V"]
    bias: Float[Array, "Q V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State of Q slots that the device advances without the host; donated from step to step.

    It is packed in one array, since every array that a step returns costs the host time, on each device.
    """

    packed: Int[Array, "Q 3"]

    @staticmethod
    def of(*, anchor: Int[Array, " Q"], length: Int[Array, " Q"], emitted: Int[Array, " Q"]) -> Slots:
        """Pack the three columns."""
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

    def put(self, rows: Int[Array, " B"], state: Slots) -> Slots:
        """Replace the state of some slots; rows beyond the last slot are dropped."""
        return Slots(self.packed.at[rows].set(state.packed, mode="drop"))


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
        tokens: token ids of the chunk.
        positions: absolute position of each token, -1 for the padding behind them.
        length: tokens of each whole prompt.
        emitted: tokens that a sequence had emitted before it was preempted; they are part of its prompt.
        anchor: last token emitted before the preemption; -1 for a sequence that has emitted none.
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
        features: features of the tokens that rounds without drafts have processed last, for each of Q slots; that of
            position p lies at p % R, R = `DEFERRED`. Turning them into context would cost a tenth of a drafted round,
            and be useless where no later round drafts; `catch_up` does it when one does.
        states: recurrent states of the target; None if it has attention alone.
    """

    target: PagedKVCache
    draft: PagedKVCache
    features: Float[Array, "Q R C"]
    states: RecurrentStates | None = None

    def for_round(self, tables: Tables, slots: Slots) -> Caches:
        """The caches as a round sees them: through its page tables, the states at the anchors of its sequences."""
        states = self.states and self.states.verifying(tables.rows, rows_of(slots.length, tables.rows))
        return replace(self._through(tables), states=states)

    def for_chunk(self, chunk: Chunk) -> Caches:
        """The caches as a prefill sees them."""
        states = self.states and self.states.prefilling(chunk.tables.rows, chunk.positions)
        return replace(self._through(chunk.tables), states=states)

    def _through(self, tables: Tables) -> Caches:
        return replace(self, target=tables.over_target(self.target), draft=tables.over_draft(self.draft))

    @property
    def of_target(self) -> PagedKVCache | HybridCache:
        """The cache that the target's layers take."""
        return self.target if self.states is None else HybridCache(self.target, self.states)

    def with_target(self, cache: KVCache) -> Caches:
        """Replace the target's cache."""
        if self.states is None:
            assert isinstance(cache, PagedKVCache)
            return replace(self, target=cache)
        assert isinstance(cache, HybridCache)
        return replace(self, target=cache.kv, states=cache.states)

    def with_draft(self, cache: KVCache) -> Caches:
        """Replace the drafter's cache."""
        assert isinstance(cache, PagedKVCache)
        return replace(self, draft=cache)

    def defer(self, rows: Int[Array, " B"], positions: Int[Array, "B 1"], features: Float[Array, "B 1 C"]) -> Caches:
        """Keep the features of a round without drafts for `catch_up`."""
        kept = self.features.at[rows, positions[:, 0] % DEFERRED].set(features[:, 0], mode="drop")
        return replace(self, features=kept)

    def pools(self) -> Caches:
        """Remove what concerned one step: only the pools are handed from step to step."""
        states = self.states and self.states.between_steps()
        return replace(self, target=pools_of(self.target), draft=pools_of(self.draft), states=states)


def pools_of(cache: KVCache) -> PagedKVCache:
    """Remove the tables from a cache."""
    assert isinstance(cache, PagedKVCache)
    return replace(cache, tables=(), valid_from=())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """Tokens that one step has emitted.

    Attributes:
        packed: the tokens of each row, and how many of them were emitted.
        logprobs: log-probabilities of the same rows; None unless asked for.
    """

    packed: Int[Array, "B T+1"]
    logprobs: Logprobs | None

    @staticmethod
    def of(tokens: Int[Array, "B T"], count: Int[Array, " B"], logprobs: Logprobs | None) -> Emitted:
        """Pack tokens and counts."""
        return Emitted(jnp.concatenate([tokens, count[:, None]], axis=1), logprobs)

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """Sampled tokens; the first `count[b]` of row b were emitted."""
        return self.packed[:, :-1]

    @property
    def count(self) -> Int[Array, " B"]:
        """Emitted tokens of each row, 1 to T; -1 where the logits were NaN."""
        return self.packed[:, -1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities under the unprocessed distribution: of the chosen tokens and of the A most probable."""

    chosen: Float[Array, "B T"]
    rank: Int[Array, "B T"]  # 1 = likeliest
    top: Float[Array, "B T A"]
    top_tokens: Int[Array, "B T A"]

    @staticmethod
    def zeros(B: int, T: int, V: int) -> Logprobs:
        """Zeros in the shapes of log-probabilities of B x T tokens over V."""
        A = min(MOST_LOGPROBS, V)
        return Logprobs(
            chosen=jnp.zeros((B, T), jnp.float32),
            rank=jnp.zeros((B, T), jnp.int32),
            top=jnp.zeros((B, T, A), jnp.float32),
            top_tokens=jnp.zeros((B, T, A), jnp.int32),
        )
