"""From running sequences to the arrays of a step. Pure host code."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from dflash_jax.engine.device.controls import bits_of
from dflash_jax.engine.device.shapes import Load
from dflash_jax.engine.device.slots import GROUPS, MODES, Chunk, Controls, Sampler, SamplingMode, Tables
from dflash_jax.engine.host.constraints import fill_masks
from dflash_jax.engine.host.scheduler import Running, Scheduler
from dflash_jax.engine.host.sequence import Sequence

# Temperatures and repetition penalties are clipped to these: beyond, logits would leave the range of float32.
SMALLEST, LARGEST = 1e-6, 1e6


class SamplerRows:
    """Sampling parameters of every slot, as the host keeps them."""

    def __init__(self, slots: int, vocab_size: int):
        self.vocab_size = vocab_size
        columns: dict[str, Any] = {
            "temperature": np.zeros(slots, np.float32),
            "top_p": np.ones(slots, np.float32),
            "top_k": np.full(slots, vocab_size, np.int32),
            "min_p": np.zeros(slots, np.float32),
            "key": np.zeros((slots, 2), np.uint32),
            "presence_penalty": np.zeros(slots, np.float32),
            "frequency_penalty": np.zeros(slots, np.float32),
            "repetition_penalty": np.ones(slots, np.float32),
            "min_tokens": np.zeros(slots, np.int32),
            "has_bias": np.zeros(slots, np.bool_),
        }
        self.rows = Sampler(**columns)

    def snapshot(self) -> Sampler:
        """A copy for the device, which may read it after the next change."""
        return jax.tree.map(np.copy, self.rows)

    def put(self, slot: int, sequence: Sequence) -> None:
        """Set a slot's row to the parameters of its new sequence."""
        params = sequence.params
        row = {
            "temperature": params.temperature and _clipped(params.temperature),
            "top_p": params.top_p,
            "top_k": min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size,
            "min_p": params.min_p,
            "key": (sequence.seed >> 32, sequence.seed & 0xFFFFFFFF),
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": _clipped(params.repetition_penalty),
            "min_tokens": min(params.min_tokens, sequence.max_new_tokens),
            "has_bias": bool(params.logit_bias) or params.allowed_token_ids is not None,
        }
        for name, value in row.items():
            getattr(self.rows, name)[slot] = value


def _clipped(value: float) -> float:
    return min(max(value, SMALLEST), LARGEST)


def controls_of(sequence: Sequence, vocab_size: int) -> Controls:
    """The controls of one sequence as it is now, as host arrays [V]."""

    def marked(token_ids: Seq[int]) -> np.ndarray:
        row = np.zeros(vocab_size, bool)
        row[list(token_ids)] = True
        return row

    params = sequence.params
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[~marked(params.allowed_token_ids)] = -np.inf
    for token, value in dict(params.logit_bias).items():
        bias[token] += value
    rows: dict[str, Any] = {
        "counts": np.bincount(sequence.output.token_ids, minlength=vocab_size).astype(np.int32),
        "prompted": marked(sequence.prompt_token_ids),
        "stops": marked(sequence.stop_ids),
        "bias": bias,
    }
    return Controls(**rows)


def uses_controls(sequence: Sequence) -> bool:
    """Whether its next tokens depend on `Controls`."""
    p = sequence.params
    is_early = len(sequence.output.token_ids) < p.min_tokens
    has_penalty = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1)
    return is_early or has_penalty or bool(p.logit_bias) or p.allowed_token_ids is not None


def mode_of(sequence: Sequence) -> SamplingMode:
    """The cheapest sampling mode that is right for a sequence; it changes only where there is a least length."""
    if sequence.mode is None or sequence.params.min_tokens > 0:
        sequence.mode = _mode_of(sequence)
    mode: SamplingMode = sequence.mode
    return mode


def _mode_of(sequence: Sequence) -> SamplingMode:
    p = sequence.params
    if p.logprobs is not None:
        return "reported"
    if sequence.constraint is not None or uses_controls(sequence):
        return "controlled"
    if p.temperature == 0:
        return "greedy"
    return "filtered" if p.top_k > 0 or p.top_p < 1 else "random"


def mode_of_all(sequences: list[Sequence]) -> SamplingMode:
    """The cheapest sampling mode that is right for all of these sequences."""
    modes = set(map(mode_of, sequences))
    return modes.pop() if len(modes) == 1 else max(modes, key=MODES.index)


def load_of(sequences: Seq[Sequence]) -> Load:
    """The load of an engine that runs all of these sequences side by side."""
    params = [s.params for s in sequences]
    later: set[SamplingMode] = {"greedy" if p.temperature == 0 else "random" for p in params if p.min_tokens > 0}
    return Load(
        num_seqs=len(sequences),
        prompt_lengths=frozenset(len(s.prompt_token_ids) for s in sequences),
        total_tokens=max(len(s.prompt_token_ids) + s.max_new_tokens for s in sequences),
        modes=frozenset(map(mode_of, sequences)) | later,
        speculates=any(p.speculation for p in params),
        is_scored=any(s.wants_prompt_logprobs for s in sequences),
    )


def tables_of(scheduler: Scheduler, running: list[Running], rows: int, width: int) -> Tables:
    """Slots and tables of units of some sequences.

    Args:
        scheduler: owns the tables.
        running: the sequences.
        rows: B, to which they are padded.
        width: M, entries of each table.
    """
    num_slots = len(scheduler.tables[0])
    slots = slots_of(running, rows, padding=num_slots)
    # Rows of padding read some slot's table, and nobody reads theirs.
    within = slots if len(running) == rows else np.minimum(slots, num_slots - 1)
    return Tables.pack(
        slots,
        [valid_from[within] for valid_from in scheduler.valid_from[1:GROUPS]],
        [table[within, :width] for table in scheduler.tables[:GROUPS]],
    )


def slots_of(running: Seq[Running | None], rows: int, *, padding: int) -> np.ndarray:
    """Slot of each row's sequence [B]; `padding` for a row without one."""
    slots = np.full(rows, padding, np.int32)
    slots[: len(running)] = [padding if r is None else r.slot for r in running]
    return slots


def masks_of(
    running: Seq[Running | None], rows: int, length: int, block: jax.Array | None, vocab_size: int
) -> UInt32[np.ndarray, "B T X"] | None:
    """Bits of the tokens that each row may emit; None if no sequence has a constraint.

    Waits until the block has been drafted.
    """
    if not any(r.sequence.constraint for r in running if r):
        return None
    allowed = np.full((rows, length, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    drafts = np.zeros((rows, 1), np.int32) if block is None else np.asarray(block)
    batch = []
    for row, sequence in enumerate(r.sequence if r else None for r in running):
        if sequence is not None and sequence.constraint is not None:
            if sequence.params.allowed_token_ids is not None:  # bad words must leave at least one of these
                allowed[row] = bits_of(sequence.params.allowed_token_ids, allowed.shape[-1])
            batch.append((sequence.constraint, allowed[row], drafts[row, 1:length].tolist()))
    fill_masks(batch)
    return allowed


def deferred_of(running: Seq[Running], rows: int) -> Int[np.ndarray, " B"]:
    """How many of the newest tokens of each row's sequence have deferred features."""
    deferred = np.zeros(rows, np.int32)
    deferred[: len(running)] = [r.deferred for r in running]
    return deferred


def following_of(running: Running, width: int) -> Int[np.ndarray, "1 T"]:
    """The token behind each of the next `width` tokens of a prompt; 0 behind its end."""
    following = np.zeros((1, width), np.int32)
    tokens = running.text[running.prefilled + 1 : running.prefilled + 1 + width]
    following[0, : len(tokens)] = tokens
    return following


def chunk_of(pending: list[Running], rows: int, width: int, tables: Tables) -> Chunk:
    """The chunk of the next `width` tokens of each prompt, padded to so many rows."""
    tokens = np.zeros((rows, width), np.int32)
    positions = np.full((rows, width), -1, np.int32)
    length, emitted = np.zeros((2, rows), np.int32)
    anchor = np.full(rows, -1, np.int32)
    for row, running in enumerate(pending):
        part = running.text[running.prefilled : min(running.prefilled + width, running.chunk_end)]
        tokens[row, : len(part)] = part
        positions[row, : len(part)] = np.arange(running.prefilled, running.prefilled + len(part))
        before = running.sequence.output.token_ids  # what it had emitted when it was preempted
        length[row], emitted[row] = len(running.text), len(before)
        anchor[row] = before[-1] if before else -1
    columns: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "length": length,
        "emitted": emitted,
        "anchor": anchor,
    }
    return Chunk(**columns, tables=tables)
