"""Workloads: prompts and lengths, from a seed or from a file, and arrival times."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.options import MOST_RANDOM, WorkloadOptions
from dflash_jax.options.flags import add_options, options_from
from dflash_jax.text.request_files import SampleRequest, read_jsonl

# Short and common, so that most vocabularies have each of them as one token.
COMMON_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also well did many must before back see through way where get much go good own"
)


@dataclass(frozen=True)
class RandomLengths:
    """Lengths in tokens, drawn uniformly from `length * (1 - range_ratio)` to `length * (1 + range_ratio)`.

    Raises:
        ConfigError: a length or the ratio is out of range.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, length in (("input", self.input_len), ("output", self.output_len)):
            if length < 1:
                raise ConfigError(f"--random-{name}-len={length} must be at least 1.")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio={self.range_ratio} must be in [0, 1).")

    def draw(self, length: int, num: int, rng: np.random.Generator) -> list[int]:
        """Draw `num` lengths around `length`."""
        low, high = math.floor(length * (1 - self.range_ratio)), math.ceil(length * (1 + self.range_ratio))
        return rng.integers(max(low, 1), high + 1, num).tolist()


def random_requests(
    num: int, lengths: RandomLengths, *, seed: int, vocab_size: int, as_text: bool = False
) -> list[SampleRequest]:
    """Prompts of random token ids below `vocab_size`, or of random words; equal for equal seeds.

    Args:
        num: requests.
        lengths: of prompts and answers.
        seed: decides all of them.
        vocab_size: of the model.
        as_text: prompts are words, not token ids.

    Raises:
        ConfigError: the vocabulary is empty.
    """
    if vocab_size < 1:
        raise ConfigError(f"--random-vocab-size={vocab_size} must be at least 1.")
    rng, words = np.random.default_rng(seed), COMMON_WORDS.split()
    input_lens = lengths.draw(lengths.input_len, num, rng)
    output_lens = lengths.draw(lengths.output_len, num, rng)
    requests = []
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        ids = rng.integers(0, len(words) if as_text else vocab_size, input_len).tolist()
        requests.append(SampleRequest(" ".join(words[i] for i in ids) if as_text else ids, output_len))
    return requests


def arrival_times(num: int, request_rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds after the first; all zero for an infinite rate.

    Args:
        num: requests.
        request_rate: requests a second.
        seed: decides the times.

    Raises:
        ConfigError: the rate is not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(f"--request-rate={request_rate} must be above 0 (inf: all at once).")
    if math.isinf(request_rate):
        return [0.0] * num
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, max(num - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the workload."""
    add_options(parser.add_argument_group("workload"), WorkloadOptions)


@dataclass(frozen=True)
class Workload:
    """Requests to measure, requests to run before, and warnings for the report."""

    requests: list[SampleRequest]
    warmups: list[SampleRequest]
    warnings: list[str]


def load(args: argparse.Namespace, *, as_text: bool, num_random: int = MOST_RANDOM) -> Workload:
    """Make the workload of a command line.

    Args:
        args: of the command.
        as_text: whether random prompts are words.
        num_random: default number of random prompts.

    Raises:
        ConfigError: an option is out of range, or the file is not one of requests.
    """
    options_from(args, WorkloadOptions)  # checks them
    if args.dataset_name == "jsonl":
        return _load_jsonl(args)
    if args.dataset_path is not None:
        raise ConfigError(f"--dataset-path {args.dataset_path} needs --dataset-name jsonl.")
    lengths = RandomLengths(args.random_input_len, args.random_output_len, args.random_range_ratio)

    def draw(num: int, seed: int) -> list[SampleRequest]:
        return random_requests(num, lengths, seed=seed, vocab_size=args.random_vocab_size, as_text=as_text)

    # Warm-ups have prompts of their own, so that the prefix cache does not know the measured ones.
    return Workload(draw(args.num_prompts or num_random, args.seed), draw(args.num_warmups, args.seed + 1), [])


def _load_jsonl(args: argparse.Namespace) -> Workload:
    if args.dataset_path is None:
        raise ConfigError("--dataset-name jsonl needs --dataset-path.")
    lines = read_jsonl(args.dataset_path, args.custom_output_len)
    num = args.num_prompts or len(lines)
    warnings = []
    if num > len(lines):
        warnings.append(
            f"{num} requests repeat the {len(lines)} lines of {args.dataset_path}: a prefix cache makes the repeated "
            "ones faster."
        )
    warmups = [lines[i % len(lines)] for i in range(args.num_warmups)]
    return Workload([lines[i % len(lines)] for i in range(num)], warmups, warnings)
