"""The host loop: batches of sequences, prefilled in chunks and then advanced round by round.

The engine knows tokens, not text: what a token means to a completion is `Sequence`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache.kv import DenseKVCache
from dflash_jax.checkpoint.loader import Params
from dflash_jax.config import DecoderConfig, DraftConfig, EngineConfig, TargetConfig
from dflash_jax.core import Logprob
from dflash_jax.engine.round import prefill_chunk, run_round
from dflash_jax.engine.sequence import Sequence, TokenLogprobs
from dflash_jax.engine.sharding import Mesh
from dflash_jax.engine.state import Caches, Emitted, Sampler, SamplingMode, Slots, StepSpec

LEAST_CHUNK = 16  # tokens: prompts shorter than this share a compiled prefill
LEAST_CACHE = 128  # slots: likewise for caches
COLDEST, HOTTEST = 1e-6, 1e6  # temperatures: beyond them, nothing but the range of float32 would change


@dataclass(frozen=True)
class Model:
    """Parameters and what they mean."""

    config: TargetConfig | DraftConfig
    params: Params


class Engine:
    """Runs sequences on a target with or without a drafter."""

    def __init__(self, target: Model, draft: Model | None, *, mesh: Mesh, config: EngineConfig):
        self.target, self.draft = target, draft
        self.mesh, self.config = mesh, config
        self.block = config.num_speculative_tokens + 1

    def run(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Advance sequences until all have ended; after each step, yields those that changed."""
        for start in range(0, len(sequences), self.config.max_num_seqs):
            yield from self._run_batch(sequences[start : start + self.config.max_num_seqs])

    def _run_batch(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        spec = self._spec(sequences)
        rows = power_of_two(len(sequences))
        slots = self.mesh.replicate(make_slots(sequences, rows, spec.target.vocab_size))
        caches = self._make_caches(rows, self._slots_needed(sequences))
        params = (self.target.params, self.draft.params if self.draft else {})
        most = max(self.config.max_num_batched_tokens // rows, 1)
        for tokens, positions in prompt_chunks([s.prompt_token_ids for s in sequences], rows, most):
            slots, caches, emitted = prefill_chunk(params, slots, caches, tokens, positions, spec=spec)
            changed = take_emitted(sequences, emitted, is_round=False)
            slots = retire(slots, changed, sequences)
            yield changed
        while not all(s.finished for s in sequences):
            slots, caches, emitted = run_round(params, slots, caches, spec=spec)
            changed = take_emitted(sequences, emitted, is_round=True)
            slots = retire(slots, changed, sequences)
            yield changed

    def _spec(self, sequences: list[Sequence]) -> StepSpec:
        params = [s.params for s in sequences]
        mode: SamplingMode = "greedy"
        if any(p.temperature > 0 for p in params):
            mode = "random"
        if any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params):
            mode = "filtered"
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        assert isinstance(self.target.config, TargetConfig)
        return StepSpec(
            target=self.target.config,
            draft=self.draft.config if self.draft and isinstance(self.draft.config, DraftConfig) else None,
            block=self.block,
            sampling=mode,
            num_logprobs=max(wanted) if wanted else None,
        )

    def _slots_needed(self, sequences: list[Sequence]) -> int:
        """Cache slots: the longest sequence and the look-ahead of its last block, in few different sizes."""
        longest = max(len(s.prompt_token_ids) + s.max_new_tokens for s in sequences)
        return min(max(power_of_two(longest), LEAST_CACHE), self.config.max_model_len) + self.block

    def _make_caches(self, rows: int, slots: int) -> Caches:
        def cache(config: DecoderConfig) -> DenseKVCache:
            shape = (rows, slots, config.num_key_value_heads, config.head_dim)
            placed = self.mesh.place(("B", "S", "K", "H"), shape)
            return DenseKVCache.zeros(config.num_hidden_layers, shape, self.config.kv_cache_dtype, placed)

        return Caches(cache(self.target.config), cache(self.draft.config) if self.draft else DenseKVCache([], []))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def prompt_chunks(prompts: list[list[int]], rows: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut prompts into chunks of tokens [rows, T] and their positions, -1 where a prompt has ended."""
    longest = max(len(prompt) for prompt in prompts)
    width = min(max(power_of_two(longest), LEAST_CHUNK), most)
    for start in range(0, longest, width):
        tokens = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), -1, np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + width]
            tokens[row, : len(part)] = part
            positions[row, : len(part)] = np.arange(start, start + len(part))
        yield tokens, positions


def make_slots(sequences: list[Sequence], rows: int, vocab_size: int) -> Slots:
    """The state of a batch before prefill; rows beyond the sequences are idle."""
    params = [s.params for s in sequences]
    stop_ids = [s.stop_ids for s in sequences]
    widest = power_of_two(max(1, *map(len, stop_ids)))

    def column(values: list, dtype: type, shape: tuple[int, ...] = ()) -> jax.Array:
        array: np.ndarray = np.zeros((rows, *shape), dtype)
        array[: len(values)] = values
        return jnp.asarray(array)

    sampler = Sampler(
        temperature=column([p.temperature and min(max(p.temperature, COLDEST), HOTTEST) for p in params], np.float32),
        top_p=column([p.top_p for p in params], np.float32),
        top_k=column([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], np.int32),
        min_p=column([p.min_p for p in params], np.float32),
        min_tokens=column([min(s.params.min_tokens, s.max_new_tokens) for s in sequences], np.int32),
        stop_ids=column([[*ids, *[-1] * (widest - len(ids))] for ids in stop_ids], np.int32, (widest,)),
        key=column([[s.seed >> 32, s.seed & 0xFFFFFFFF] for s in sequences], np.uint32, (2,)),
    )
    return Slots(
        anchor=column([0] * len(sequences), np.int32),
        length=column([len(s.prompt_token_ids) for s in sequences], np.int32),
        emitted=column([0] * len(sequences), np.int32),
        active=column([True] * len(sequences), np.bool_),
        sampler=sampler,
    )


def take_emitted(sequences: list[Sequence], emitted: Emitted, *, is_round: bool) -> list[Sequence]:
    """Hand each running sequence the tokens that a step emitted for it; returns those that got any."""
    emitted = jax.device_get(emitted)
    changed = []
    for row, sequence in enumerate(sequences):
        count = int(emitted.count[row])
        if sequence.finished or count == 0:
            continue
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = [logprobs_at(emitted, row, i, sequence) for i in range(count)]
        taken = sequence.extend(emitted.tokens[row, :count].tolist(), logprobs)
        if is_round:
            sequence.acceptance_lengths.append(taken)
        changed.append(sequence)
    return changed


def logprobs_at(emitted: Emitted, row: int, column: int, sequence: Sequence) -> TokenLogprobs:
    """The likeliest alternatives of one emitted token, and the token itself."""
    found = emitted.logprobs
    assert found is not None
    assert sequence.params.logprobs is not None

    def entry(token: int, logprob: jax.Array, rank: jax.Array | int) -> Logprob:
        return Logprob(float(logprob), int(rank), sequence.decode_one(token))

    chosen = int(emitted.tokens[row, column])
    entries = {chosen: entry(chosen, found.chosen[row, column], found.rank[row, column])}
    for i, token in enumerate(found.top_tokens[row, column, : sequence.params.logprobs].tolist()):
        entries.setdefault(token, entry(token, found.top[row, column, i], i + 1))
    return entries


def retire(slots: Slots, changed: list[Sequence], sequences: list[Sequence]) -> Slots:
    """Mark sequences that have just ended as idle."""
    if not any(s.finished for s in changed):
        return slots
    active = np.zeros(slots.active.shape, np.bool_)
    active[: len(sequences)] = [not s.finished for s in sequences]
    return replace(slots, active=jax.device_put(active, slots.active.sharding))
