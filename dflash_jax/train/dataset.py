"""Samples in memory, and the batches of an epoch: a function of seed, epoch and number, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int

from dflash_jax.base.errors import ConfigError
from dflash_jax.train.data.shards import Sample
from dflash_jax.train.objective import Batch

BUCKETS = 4  # shapes: batches are padded to a quarter, two, three or four quarters of max_length
DEFAULT_EVAL_SAMPLES = 64  # at most: as many as the measuring engine decodes side by side


@dataclass(frozen=True)
class Dataset:
    """Prompts and responses in one array.

    Attributes:
        tokens: token ids of all samples, int32; X tokens.
        starts: index in `tokens` at which each of the n samples begins, and the end of the last.
        prompts: tokens of the prompt of each sample.
    """

    tokens: Int[np.ndarray, " X"]
    starts: Int[np.ndarray, " n+1"]
    prompts: Int[np.ndarray, " n"]

    @staticmethod
    def of(samples: Iterable[Sample], max_length: int) -> Dataset:
        """Keep the samples whose response has two tokens within max_length: an anchor, and one to predict.

        Args:
            samples: to keep.
            max_length: tokens; longer samples are cut.

        Raises:
            ConfigError: no sample is left.
        """
        kept: list[np.ndarray] = []
        prompts: list[int] = []
        for sample in samples:
            ids = np.array([*sample.prompt_token_ids, *sample.token_ids][:max_length], np.int32)
            if len(ids) - len(sample.prompt_token_ids) >= 2:
                kept.append(ids)
                prompts.append(len(sample.prompt_token_ids))
        if not kept:
            raise ConfigError(
                f"the data hold no response of two tokens or more within max_length={max_length}; raise it or give "
                "other data."
            )
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in kept])])
        return Dataset(np.concatenate(kept), starts, np.array(prompts, np.int32))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.prompts)

    def sample(self, i: int) -> Sample:
        """Sample i, as it was read or cut."""
        ids = self.tokens[self.starts[i] : self.starts[i + 1]].tolist()
        return Sample(tuple(ids[: self.prompts[i]]), tuple(ids[self.prompts[i] :]))

    def split(self, eval_samples: int | None, seed: int) -> tuple[Dataset, list[Sample]]:
        """Hold random samples out of training.

        Args:
            eval_samples: how many; None takes a tenth of the samples, at most `DEFAULT_EVAL_SAMPLES`.
            seed: decides which.

        Returns:
            The data to train on, and the samples held out.

        Raises:
            ConfigError: eval_samples leaves nothing to train on.
        """
        held_out = min(DEFAULT_EVAL_SAMPLES, len(self) // 10) if eval_samples is None else eval_samples
        if held_out >= len(self):
            raise ConfigError(
                f"eval_samples={held_out} leaves nothing of {len(self)} samples to train on; give less than "
                f"{len(self)}, or leave it out to hold out a tenth."
            )
        out = np.random.default_rng([seed, 0]).permutation(len(self))[:held_out]
        kept = np.setdiff1d(np.arange(len(self)), out)
        pieces = [self.tokens[self.starts[i] : self.starts[i + 1]] for i in kept]
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        return Dataset(np.concatenate(pieces), starts, self.prompts[kept]), [self.sample(i) for i in out]


@dataclass(frozen=True)
class Batches:
    """The batches of every epoch: samples of similar length side by side, padded to one of a few shapes.

    Attributes:
        dataset: the samples.
        max_length: tokens of the longest shape.
        batch_tokens: limit of tokens of a batch, padding included.
        multiple_of: the rows of a batch are a multiple of it.
        num_anchors: blocks of a sequence of max_length tokens.
        seed: decides order and anchors.
    """

    dataset: Dataset
    max_length: int
    batch_tokens: int
    multiple_of: int
    num_anchors: int
    seed: int

    @cached_property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Tokens T, rows B and anchors A of each shape, shortest first."""
        lengths = sorted({-(-self.max_length * quarter // BUCKETS) for quarter in range(1, BUCKETS + 1)})
        rows = [self.batch_tokens // length // self.multiple_of * self.multiple_of for length in lengths]
        # A sequence of T tokens has fewer than T anchors, and `draw_anchors` draws at most T.
        anchors = [min(-(-self.num_anchors * length // self.max_length), length) for length in lengths]
        return list(zip(lengths, rows, anchors, strict=True))

    @property
    def used_shapes(self) -> list[tuple[int, int, int]]:
        """The shapes that some sample has."""
        return [shape for shape, members in zip(self.shapes, self._members, strict=True) if len(members)]

    @cached_property
    def _members(self) -> list[np.ndarray]:
        """Indices of the samples of each shape."""
        lengths = np.diff(self.dataset.starts)
        which = np.searchsorted([shape[0] for shape in self.shapes], lengths)
        return [np.flatnonzero(which == i) for i in range(len(self.shapes))]

    @cached_property
    def per_epoch(self) -> int:
        """Number of batches of an epoch."""
        return sum(-(-len(members) // B) for members, (_, B, _) in zip(self._members, self.shapes, strict=True))

    def after(self, step: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """Indices of the samples, and the batch, of every step from `step` on, without end."""
        while True:
            epoch, first = divmod(step, self.per_epoch)
            for samples, batch in self.epoch(epoch, first):
                yield samples, batch
                step += 1

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[np.ndarray, Batch]]:
        """Indices of the samples, and the batch, of an epoch from batch `first` on."""
        for number, (shape, samples) in enumerate(self._order(epoch)):
            if number >= first:
                yield samples, self._batch(shape, samples, epoch * self.per_epoch + number)

    def _order(self, epoch: int) -> list[tuple[tuple[int, int, int], np.ndarray]]:
        """Shape and samples of each batch of an epoch; the last batch of a shape may not fill its rows."""
        rng = np.random.default_rng([self.seed, 1, epoch])
        batches = []
        for shape, members in zip(self.shapes, self._members, strict=True):
            shuffled = rng.permutation(members)
            batches += [(shape, shuffled[start : start + shape[1]]) for start in range(0, len(shuffled), shape[1])]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _batch(self, shape: tuple[int, int, int], samples: np.ndarray, step: int) -> Batch:
        """A batch as host arrays; rows without a sample are zeros."""
        T, B, A = shape
        tokens, lengths, prompts = np.zeros((B, T), np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
        for row, i in enumerate(samples):
            ids = self.dataset.tokens[self.dataset.starts[i] : self.dataset.starts[i + 1]]
            tokens[row, : len(ids)] = ids
            lengths[row], prompts[row] = len(ids), self.dataset.prompts[i]
        positions = np.arange(T)
        allowed = (positions >= prompts[:, None]) & (positions < lengths[:, None] - 1)
        return Batch(tokens, lengths, draw_anchors(np.random.default_rng([self.seed, 2, step]), allowed, A))


def draw_anchors(rng: np.random.Generator, allowed: Bool[np.ndarray, "B T"], A: int) -> Int[np.ndarray, "B A"]:
    """Draw up to A different allowed positions of each row, in order; -1 where a row has no other.

    Args:
        rng: random numbers.
        allowed: positions that may be anchors.
        A: at most T.
    """
    order = np.where(allowed, rng.random(allowed.shape), 2.0)
    drawn = np.argsort(order, axis=1)[:, :A]
    drawn = np.where(np.take_along_axis(allowed, drawn, axis=1), drawn, -1)
    return np.sort(drawn, axis=1).astype(np.int32)
