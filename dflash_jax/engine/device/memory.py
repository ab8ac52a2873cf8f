"""How much memory steps need, and how many pages fit beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.base.errors import ConfigError
from dflash_jax.engine.device.slots import DEFERRED
from dflash_jax.options import EngineConfig
from dflash_jax.parallel.platform import OUTSIDE_BYTES
from dflash_jax.spec import DecoderConfig, DraftConfig, TargetConfig
from dflash_jax.state import recurrent
from dflash_jax.state.group import PageGroup, SnapshotGroup
from dflash_jax.state.layout import Layout
from pallas_kernels.lib import int4_kv
from pallas_kernels.paged_attention import MOST_WIDENED, MOST_WIDENED_HEAD

CPU_CACHE_BYTES = 4 << 30  # for keys and values, where devices do not say how much memory they have
LOGITS_COPIES = 6  # float32 [rows, V] that sampling holds at once: logits, scaled, sorted, probabilities, sum, noise
SAMPLING_STATE_BYTES = 10  # bytes of `Controls` for each token of the vocabulary and each slot
FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

GAPS_BYTES = 256 << 20  # that JAX's allocator cannot use, where `gpu_memory_bytes` leaves no other room

MOST_SNAPSHOTS = 16  # snapshots of recurrent states for each slot: more would hardly be hit
FULL, SLIDING, STATES = 0, 1, 2  # places of the groups in `Layout.groups`; the last only with recurrent layers

logger = logging.getLogger("dflash_jax")


def group_of(layer_window: int | None) -> int:
    """The group of a drafter's layer; those of the target are all in `FULL`."""
    return FULL if layer_window is None else SLIDING


def bytes_per_token(model: DecoderConfig, dtype: jnp.dtype, tensor_parallel_size: int) -> int:
    """Bytes of keys and values of one token in one layer, on all devices together."""
    copies = 1 if model.num_key_value_heads % tensor_parallel_size == 0 else tensor_parallel_size
    size = model.head_dim
    head_bytes = int4_kv.head_bytes(size) if dtype == int4_kv.DTYPE else size * dtype.itemsize
    return 2 * copies * model.num_key_value_heads * head_bytes


def group_bytes(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig) -> tuple[int, int]:
    """Bytes of one token in all layers of the full group and of the sliding group."""
    devices = config.tensor_parallel_size
    full = len(target.attention_layers) * bytes_per_token(target, config.kv_cache_dtype, devices)
    if draft is None:
        return full, 0
    of_layer = bytes_per_token(draft, config.draft_kv_cache_dtype, devices)
    sliding_layers = sum(group_of(layer.window) == SLIDING for layer in draft.layers)
    return full + (draft.num_hidden_layers - sliding_layers) * of_layer, sliding_layers * of_layer


@dataclass(frozen=True)
class Division:
    """How the memory for what is kept of sequences is divided; `plan_layout` says by what rules.

    Attributes:
        budget: bytes on all devices together.
        width: pages of the longest sequence's table.
        window: of the sliding group; None without one.
        sliding_pages: of the sliding group.
        full_pages: of the full group; they fit nothing where they are fewer than `width`.
        snapshots: of recurrent states.
    """

    budget: int
    width: int
    window: int | None
    sliding_pages: int
    full_pages: int
    snapshots: int

    @property
    def fits(self) -> bool:
        """Whether one sequence of `max_model_len` fits."""
        return self.full_pages >= self.width


def divide(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, parameters: int = 0) -> Division:
    """Divide the memory; `parameters` are their bytes on one device, for devices that do not say what is in use."""
    size, block = config.page_size, config.num_speculative_tokens + 1
    windows = [mask.window for mask in draft.layers if mask.window is not None] if draft else []
    window = max(windows) if windows else None
    # One round is in flight while the next is reserved, so a table reaches two blocks beyond the last token.
    width = -(-(config.max_model_len + 2 * block) // size)
    sliding_each = 0 if window is None else min(width, -(-(window + 3 * block) // size) + 1)
    full_bytes, sliding_bytes = group_bytes(target, draft, config)
    budget = config.kv_cache_memory_bytes or free_bytes(target, draft, config, parameters)
    sliding_pages = config.max_num_seqs * sliding_each
    state_bytes = recurrent.row_bytes(target, block, config.dtype)
    snapshots = num_snapshots(target, config, budget, state_bytes)
    states = (config.max_num_seqs + snapshots) * state_bytes
    left = budget - sliding_pages * size * sliding_bytes - states
    full_pages = min(left // (size * full_bytes), config.max_num_seqs * width)
    return Division(budget, width, window, sliding_pages, full_pages, snapshots)


def plan_layout(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, parameters: int = 0) -> Layout:
    """Divide the memory for what is kept of sequences among the groups.

    Every slot has its recurrent state. Snapshots of such states get their share; the sliding group gets as many pages
    as `max_num_seqs` sequences can need; the full group gets the rest, but no more than these sequences can fill.

    Args:
        target: the target.
        draft: its drafter.
        config: lengths, dtypes and shares.
        parameters: their bytes on one device, for devices that do not say what is in use.

    Raises:
        ConfigError: the memory does not hold one sequence of `max_model_len`, the target has no attention, or a model's
            head size does not suit its `int4_had`.
    """
    _check_head_sizes(target, draft, config)
    if not target.attention_layers:
        raise ConfigError(
            "no layer of the target has attention, and such models are not supported; give another model."
        )
    size, block = config.page_size, config.num_speculative_tokens + 1
    division = divide(target, draft, config, parameters)
    if not division.fits:
        raise _too_little(target, draft, config, division, parameters)
    pages = PageGroup(division.full_pages, size), PageGroup(division.sliding_pages, size, division.window)
    if not target.recurrent_layers:
        return Layout(size, block, division.width, pages)
    groups = (*pages, SnapshotGroup(division.snapshots))
    return Layout(size, block, division.width, groups, snapshots=STATES)


def _too_little(
    target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, division: Division, parameters: int
) -> ConfigError:
    """The refusal of memory that does not hold one sequence; it names the options that would change that."""
    tokens = max(division.full_pages, 0) * config.page_size
    needed = (
        f"{tokens} tokens, and one sequence of max_model_len={config.max_model_len} needs "
        f"{division.width * config.page_size}"
    )
    if config.kv_cache_memory_bytes is not None:
        size = config.kv_cache_memory_bytes
        words = f" ({_in_words(size)})" if size >= 2**20 else ""
        has_slots = target.recurrent_layers or division.window is not None  # of which each takes some of it
        lower = "max_model_len or max_num_seqs," if has_slots else "max_model_len"
        return ConfigError(
            f"kv_cache_memory_bytes={size}{words} holds {needed}; lower {lower} or raise kv_cache_memory_bytes."
        )
    limit = "gpu_memory_utilization" if config.gpu_memory_bytes is None else "gpu_memory_bytes"
    taken = "" if config.gpu_memory_bytes is None else f" ({_what_is_taken(target, draft, config, parameters)})"
    kept = "keys, values and recurrent states" if target.recurrent_layers else "keys and values"
    return ConfigError(
        f"{_in_words(division.budget)} for {kept}{taken} hold {needed}; lower max_model_len, max_num_seqs or "
        f"max_num_batched_tokens, or raise {limit}, kv_cache_memory_bytes or tensor_parallel_size."
    )


def _in_words(size: int) -> str:
    """A number of bytes, with a unit in which it is not 0.00."""
    if size < 2**20:
        return f"{size} bytes"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def _what_is_taken(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, parameters: int) -> str:
    """What `gpu_memory_bytes` loses before keys and values get anything, in words."""
    assert config.gpu_memory_bytes is not None
    states = config.max_num_seqs * recurrent.row_bytes(target, config.num_speculative_tokens + 1, config.dtype)
    parts = {
        "parameters": parameters,
        "temporaries of steps": working_bytes(target, draft, config),
        "CUDA and gaps between arrays": OUTSIDE_BYTES + GAPS_BYTES,
        f"and within them the states of {config.max_num_seqs} sequences": states,
    }
    words = ", ".join(f"{name} {_in_words(size)}" for name, size in parts.items() if size)
    return f"gpu_memory_bytes={_in_words(config.gpu_memory_bytes)} less {words}"


def _check_head_sizes(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig) -> None:
    stored: list[tuple[str, DecoderConfig, jnp.dtype]] = [("kv_cache_dtype", target, config.kv_cache_dtype)]
    if draft is not None:
        stored.append(("draft_kv_cache_dtype", draft, config.draft_kv_cache_dtype))
    for name, model, dtype in stored:
        if dtype == int4_kv.DTYPE and (reason := int4_kv.size_refusal(model.head_dim)):
            raise ConfigError(f"{name}: {reason}; take fp8 or bfloat16.")


def num_snapshots(target: TargetConfig, config: EngineConfig, budget: int, state_bytes: int) -> int:
    """Snapshots of recurrent states that `state_cache_fraction` of the memory holds, beside those of the slots."""
    if not target.recurrent_layers or not config.enable_prefix_caching:
        return 0
    return min(int(budget * config.state_cache_fraction) // state_bytes, MOST_SNAPSHOTS * config.max_num_seqs)


@dataclass(frozen=True)
class Capacity:
    """What a layout can hold, in numbers for people.

    Attributes:
        tokens: tokens that the full group holds.
        full_bytes: bytes of a token in the full group: the target's layers and the drafter's full layers.
        sliding_bytes: bytes of a token in the sliding group: the drafter's sliding layers.
        sliding_tokens: tokens that the sliding group keeps of a sequence, however long; 0 without such layers.
        max_model_len: tokens of the longest sequence.
        max_concurrency: sequences of that length, with their look-ahead, that can run side by side.
        unshared_bytes: bytes of a token if every drafter layer kept it, and all layers in the dtype of the model.
        state_bytes: bytes of a sequence's recurrent states, tapes included; 0 without such layers.
        tape_bytes: bytes of the tapes among them.
        snapshots: snapshots of such states that are kept beside those of running sequences.
    """

    tokens: int
    full_bytes: int
    sliding_bytes: int
    sliding_tokens: int
    max_model_len: int
    max_concurrency: float
    unshared_bytes: int
    state_bytes: int = 0
    tape_bytes: int = 0
    snapshots: int = 0

    def sequence_bytes(self, length: int) -> int:
        """Bytes that a sequence of this length takes."""
        return length * self.full_bytes + min(length, self.sliding_tokens) * self.sliding_bytes

    def full_allocation_bytes(self, length: int) -> int:
        """Bytes that it would take if every drafter layer kept every token, in the dtype of the model."""
        return length * self.unshared_bytes

    def lines(self) -> list[str]:
        """Lines for the log, one fact each."""
        longest, longest_bytes = self.max_model_len, self.sequence_bytes(self.max_model_len)
        facts = [
            f"KV cache size: {self.tokens:,} tokens",
            f"KV cache bytes per token: {self.full_bytes:,} in layers that keep every token",
        ]
        if self.sliding_bytes:
            facts.append(
                f"KV cache bytes per token: {self.sliding_bytes:,} in sliding layers, which keep "
                f"{self.sliding_tokens:,} tokens a sequence"
            )
        if self.state_bytes:
            facts.append(
                f"Recurrent states: {self.state_bytes / 2**20:,.1f} MiB a sequence, of which "
                f"{self.tape_bytes / 2**20:,.1f} MiB are the tape of a block; room for {self.snapshots:,} snapshots"
            )
        return [
            *facts,
            f"Maximum concurrency for {longest:,} tokens per sequence: {self.max_concurrency:.2f}x",
            f"KV cache bytes per sequence of {longest:,} tokens: {longest_bytes / 2**20:,.0f} MiB, "
            f"{longest_bytes / self.full_allocation_bytes(longest):.1%} of a full allocation",
        ]


def capacity_of(target: TargetConfig, draft: DraftConfig | None, layout: Layout, config: EngineConfig) -> Capacity:
    """What a layout can hold."""
    full_bytes, sliding_bytes = group_bytes(target, draft, config)
    models = (target,) if draft is None else (target, draft)
    devices = config.tensor_parallel_size
    state_bytes = recurrent.row_bytes(target, layout.block, config.dtype)
    return Capacity(
        tokens=layout.num_tokens,
        full_bytes=full_bytes,
        sliding_bytes=sliding_bytes,
        sliding_tokens=layout.groups[SLIDING].num_units // config.max_num_seqs * layout.page_size,
        max_model_len=config.max_model_len,
        max_concurrency=layout.groups[FULL].num_units / layout.table_width,
        unshared_bytes=sum(len(m.attention_layers) * bytes_per_token(m, config.dtype, devices) for m in models),
        state_bytes=state_bytes,
        tape_bytes=state_bytes - recurrent.row_bytes(target, 0, config.dtype),
        snapshots=0 if layout.snapshots is None else layout.groups[layout.snapshots].num_units,
    )


def log_capacity(target: TargetConfig, draft: DraftConfig | None, layout: Layout, config: EngineConfig) -> None:
    """Log at INFO what a layout can hold."""
    for line in capacity_of(target, draft, layout, config).lines():
        logger.info(line)


def free_bytes(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, parameters: int = 0) -> int:
    """Bytes that the devices together have left for keys and values, once the parameters are loaded.

    Args:
        target: the target.
        draft: its drafter.
        config: the share or the bytes of each device that may be taken.
        parameters: their bytes on one device, for devices that do not say what is in use.
    """
    stats = [device.memory_stats() or {} for device in jax.devices()[: config.tensor_parallel_size]]
    is_known = all("bytes_limit" in stat for stat in stats)
    if config.gpu_memory_bytes is not None:
        most = config.gpu_memory_bytes - OUTSIDE_BYTES
        unused = [min(most, s["bytes_limit"]) - s["bytes_in_use"] for s in stats] if is_known else [most - parameters]
        left = min(unused) - GAPS_BYTES
    elif is_known:
        left = min(int(s["bytes_limit"] * config.gpu_memory_utilization) - s["bytes_in_use"] for s in stats)
    else:
        return CPU_CACHE_BYTES
    return max(left - working_bytes(target, draft, config), 0) * config.tensor_parallel_size


def working_bytes(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig) -> int:
    """Bytes on one device beside parameters and pools: sampling state, deferred features, temporaries of steps.

    This is an upper estimate. Steps run one after another, so only the step with the most temporaries counts.
    """
    deferred = DEFERRED * feature_size(target, draft) * config.dtype.itemsize
    state = config.max_num_seqs * (SAMPLING_STATE_BYTES * target.vocab_size + deferred)
    verified = config.max_num_seqs * (config.num_speculative_tokens + 1)
    prefill = step_bytes(target, draft, config, tokens=config.max_num_batched_tokens, rows=config.max_num_seqs)
    widened = 0  # bytes of the 16-bit copy of a layer's fp8 pages that a prefill makes
    if config.kv_cache_dtype in FP8 and target.head_dim <= MOST_WIDENED_HEAD:
        kept = config.max_num_seqs * config.max_model_len * target.num_key_value_heads * target.head_dim
        widened = min(MOST_WIDENED, 2 * 2 * kept)
    return state + max(prefill + widened, step_bytes(target, draft, config, tokens=verified, rows=verified))


def feature_size(target: TargetConfig, draft: DraftConfig | None) -> int:
    """C, size of the features of a token: outputs of all capture layers together; 0 without a drafter."""
    return 0 if draft is None else len(draft.target_layer_ids) * target.hidden_size


def step_bytes(target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, *, tokens: int, rows: int) -> int:
    """Bytes of temporaries on one device, for a step over T tokens that samples from the logits of some rows.

    The outputs of the capture layers [T, C] live to the end. Beside them lives the largest of:

    - a layer: four arrays [T, D] (residual, normed, attended, projected), and either three [T, F] of its MLP, or
      queries, keys and values before and after the rotary embedding, or for each of a token's k experts its hidden
      units and its float32 part of the sum, [T, k, M] and [T, k, D], beside the shared expert's three [T, SF];
    - the outputs of the capture layers a second time, concatenated;
    - the drafter's context [T, D], and its keys and values of all layers, as one product and split;
    - the logits [rows, V] in float32, `LOGITS_COPIES` times.

    On an H200, for Qwen3-8B with a drafter of five layers, XLA takes 964 MiB for a chunk of 8192 tokens where this
    function gives 1152, and 3580 MiB for a round of 64 x 16 with top-p where it gives 3601.

    Args:
        target: the target.
        draft: its drafter.
        config: dtype and number of devices.
        tokens: T.
        rows: rows of logits.
    """

    def split(length: int) -> int:
        return length if length % config.tensor_parallel_size else length // config.tensor_parallel_size

    def layer(model: DecoderConfig) -> int:
        heads = (split(model.num_attention_heads) + 2 * split(model.num_key_value_heads)) * model.head_dim
        return 4 * model.hidden_size + max(3 * split(model.intermediate_size), 2 * heads, routed(model))

    def routed(model: DecoderConfig) -> int:
        if model.experts is None:
            return 0
        parts = 4 // config.dtype.itemsize * model.hidden_size  # in numbers of the model's dtype
        return model.experts.per_token * (split(model.experts.width) + parts) + 3 * split(
            model.experts.shared_width or 0
        )

    def context(model: DraftConfig) -> int:
        heads = 2 * model.num_hidden_layers * split(model.num_key_value_heads) * model.head_dim
        return model.hidden_size + 2 * heads

    features = feature_size(target, draft)
    widest = max(features, layer(target), *(() if draft is None else (layer(draft), context(draft))))
    size = config.dtype.itemsize * tokens
    return size * features + max(size * widest, LOGITS_COPIES * 4 * rows * split(target.vocab_size))


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error inside into one that names the options to change.

    Allocations are asynchronous: block inside until the arrays made there are ready.

    Raises:
        ConfigError: the device ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        raise ConfigError(
            f"the device ran out of memory ({message.splitlines()[0]}); lower gpu_memory_utilization or "
            "kv_cache_memory_bytes, max_num_seqs, max_num_batched_tokens or max_model_len, or raise gpu_memory_bytes "
            "or tensor_parallel_size."
        ) from error
