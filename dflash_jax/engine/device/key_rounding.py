"""How an engine rounds keys to 4 bits: from the keys and queries of one prompt, before the engine serves any.

Two things are free, because attention takes no notice of them. What all keys of a head have in common can be
subtracted: after RoPE that is half of the energy of SmolLM2-135M's keys, and the range of what is left is smaller.
And where queries mostly lie in few directions, errors of a key's elements can be made to cancel in those
(docs/kv_formats.md has what both bring). Whatever prompt they are taken from, results stay right; only the errors'
size depends on it. So it is made of tokens at random, which need no text and no tokenizer. It serves the target alone:
less their mean over such tokens, keys of SmolLM2-135M's drafter have 85 to 108 % of their energy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.engine.device.memory import STATES
from dflash_jax.engine.device.pools import make_caches
from dflash_jax.engine.device.slots import GROUPS, Caches, Chunk, FlatParams, StepSpec, Tables
from dflash_jax.engine.device.steps import bind_target
from dflash_jax.models.caches import KVCache, RecurrentCache
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.platform import compiler_options
from dflash_jax.spec import GatedDelta, LayerMask
from dflash_jax.state.group import PageGroup, SnapshotGroup
from dflash_jax.state.layout import Layout
from dflash_jax.state.paged_kv import PagedKVCache, Place
from pallas_kernels.gated_delta import Weights
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import KeyRounding
from pallas_kernels.lib.rotary import Rotary, num_queries

TOKENS = 256  # of the prompt
SINKS = 4  # first tokens, to which all others attend and whose keys are unlike theirs
DAMPING = 0.3  # of the feedback; from 0.02 to 0.3 products with queries of other texts had the same error within 10 %

Statistics = tuple[Float[Array, "L K H"], Float[Array, "L K H H"]]  # mean keys, second moments of queries


def key_rounding(params: FlatParams, spec: StepSpec, config: EngineConfig) -> KeyRounding | None:
    """How the target's keys are rounded; None if they are not in 4 bits.

    The prompt is prefilled over wide pages of its own, which are freed afterwards.

    Args:
        params: of target and drafter, as steps take them.
        spec: of the steps.
        config: which keys are in 4 bits, the page size, and the dtype of the wide pages.
    """
    if config.kv_cache_dtype != int4_kv.DTYPE:
        return None
    wide = replace(config, kv_cache_dtype=config.dtype, max_num_seqs=1)
    pages, snapshots = -(-TOKENS // config.page_size), None
    groups: list[Any] = [PageGroup(pages, config.page_size)] * GROUPS
    if spec.target.recurrent_layers:
        groups, snapshots = [*groups, SnapshotGroup(0)], STATES
    layout = Layout(config.page_size, spec.block, pages, tuple(groups), snapshots)
    caches = make_caches(spec.target, None, layout, wide, spec.mesh)
    chunk = spec.mesh.replicate(_chunk(spec.target.vocab_size, pages))
    options = compiler_options(spec.mesh.platform, has_room=False)  # it runs once: products need not be timed
    statistics = jax.jit(partial(_statistics, spec=spec), compiler_options=options)(params, caches, chunk)
    # Only what is finite: some models break for tokens that no text has.
    offset, of_queries = (np.nan_to_num(np.asarray(x), posinf=0, neginf=0) for x in statistics)
    numbers: Any = int4_kv.feedback_of(of_queries.astype(np.float64), DAMPING)
    return KeyRounding(offset, numbers)


def _chunk(vocab_size: int, pages: int) -> Chunk:
    """The prompt, in the first slot and the first pages of each group."""
    zero, row = np.zeros(1, np.int32), np.arange(pages, dtype=np.int32)[None]
    tokens = np.random.default_rng(0).integers(vocab_size, size=(1, TOKENS), dtype=np.int32)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "positions": np.arange(TOKENS, dtype=np.int32)[None],
        "length": zero + TOKENS,
        "emitted": zero,
        "anchor": zero - 1,
    }
    return Chunk(**columns, tables=Tables.pack(zero, [zero] * (GROUPS - 1), [row] * GROUPS))


def _statistics(params: FlatParams, caches: Caches, chunk: Chunk, *, spec: StepSpec) -> Statistics:
    """Prefill the prompt; mean keys, and moments of queries."""
    target, caches = bind_target(params.unflatten()[0], spec), caches.for_chunk(chunk)
    watched: Any = Watched(caches.of_target, {})
    *_, watched = target.prefill(chunk.tokens, chunk.positions, watched)
    return _statistics_of(caches.with_target(watched.cache).target, watched, chunk.tables.pages)


def _statistics_of(cache: PagedKVCache, watched: Watched, pages: int) -> Statistics:
    """Mean keys of the prompt behind its first `SINKS` tokens, and moments of queries; zeros for other layers."""
    K, H = cache.keys[0].shape[1], cache.keys[0].shape[3]

    def mean(place: Place) -> Float[Array, "K H"]:
        pool: Any = cache.keys[place.pool]
        keys = jnp.swapaxes(pool[place.first_page : place.first_page + pages], 1, 2).astype(jnp.float32)
        return keys.reshape(-1, K, H)[SINKS:TOKENS].mean(0)

    means = [jnp.zeros((K, H)) if place is None else mean(place) for place in cache.places]
    moments = [watched.moments.get(layer, jnp.zeros((K, H, H))) for layer in range(len(cache.places))]
    return jnp.stack(means), jnp.stack(moments)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watched(RecurrentCache):
    """A `KVCache` that hands each call on to another, and sums up the queries that come back.

    Attributes:
        cache: the other.
        moments: float32, by layer: the mean outer product of a query with itself, over tokens and heads of a kv head.
    """

    cache: KVCache
    moments: dict[int, Float[Array, "K H H"]]

    def write(
        self, layer: int, heads: Float[Array, "B T K J H"], rotary: Rotary, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Watched]:
        """See `KVCache.write`."""
        q, cache = self.cache.write(layer, heads, rotary, positions)
        rows = q.astype(jnp.float32).reshape(-1, heads.shape[2], num_queries(heads, rotary), q.shape[-1])
        sums = jnp.einsum("tkgh,tkgi->khi", rows, rows, precision=lax.Precision.HIGHEST)
        moments = self.moments | {layer: sums / (rows.shape[0] * rows.shape[2])}
        return q, Watched(cache, moments)

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """See `KVCache.attend`."""
        return self.cache.attend(layer, q, positions, kv_length, mask)

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], Watched]:
        """See `RecurrentCache.advance`."""
        assert isinstance(self.cache, RecurrentCache)
        outputs, cache = self.cache.advance(layer, inputs, gates, weights, positions, delta)
        return outputs, replace(self, cache=cache)
