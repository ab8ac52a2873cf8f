"""Options of training data, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import SamplingParams
from dflash_jax.train.data.files import read_bytes, sha256_of


@dataclass(frozen=True)
class DataOptions:
    """What data to make. The same options and the same model make the same data.

    Attributes:
        prompts: JSONL files of prompts; empty if the model makes them.
        max_prompts: limit of prompts taken from the files; None takes all.
        self_prompts: prompts that the model makes itself; 0 if there are files.
        systems: system messages of these prompts, in turn; empty for none.
        prompt_top_p: probability mass to sample these prompts from, at temperature 1.
        prompt_max_tokens: limit of tokens of such a prompt.
        chat_template_kwargs: further variables of the chat template.
        temperatures: every prompt is answered once at each temperature.
        top_p: probability mass to keep in answers.
        max_tokens: limit of tokens of an answer.
        min_tokens: shorter answers are dropped.
        max_repetition: answers with a larger share of repeated 8-grams are dropped; None drops none.
        seed: decides everything that is sampled.
        shard_size: answers asked for between two writes.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
        RequestError: a value is no sampling parameter.
    """

    prompts: tuple[Path, ...] = ()
    max_prompts: int | None = None
    self_prompts: int = 0
    systems: tuple[str, ...] = ()
    prompt_top_p: float = 1.0
    prompt_max_tokens: int = 256
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    max_tokens: int = 512
    min_tokens: int = 1
    max_repetition: float | None = None
    seed: int = 0
    shard_size: int = 4096

    def __post_init__(self) -> None:
        if bool(self.prompts) == (self.self_prompts > 0):
            raise ConfigError("give exactly one of --prompts FILE and --self-prompts N, N at least 1.")
        for name, value, source in (
            ("max-prompts", self.max_prompts is not None, self.prompts),
            ("system", self.systems, self.self_prompts),
        ):
            if value and not source:
                raise ConfigError(f"--{name} needs --{'prompts' if name == 'max-prompts' else 'self-prompts'}.")
        for name in ("max_prompts", "min_tokens", "shard_size"):
            smallest = getattr(self, name)
            if smallest is not None and smallest < 1:
                raise ConfigError(f"--{name.replace('_', '-')}={smallest} must be at least 1.")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"--min-tokens={self.min_tokens} exceeds --max-tokens={self.max_tokens}; lower it.")
        if self.max_repetition is not None and not 0 <= self.max_repetition <= 1:
            raise ConfigError(f"--max-repetition={self.max_repetition} must be in [0, 1].")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"--temperature {list(self.temperatures)} must be different numbers, at least one.")
        names = [path.name for path in self.prompts]
        if len(set(names)) < len(names):
            raise ConfigError(f"--prompts {names} must have different names: responses are marked with them.")
        for temperature in self.temperatures:
            self.answer_params(temperature, 0)
        self.prompt_params(0)

    def answer_params(self, temperature: float, index: int) -> SamplingParams:
        """Sampling parameters of answer number `index`."""
        return SamplingParams(
            detokenize=False,
            temperature=temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=seed_of(self.seed, "answer", index),
        )

    def prompt_params(self, index: int) -> SamplingParams:
        """Sampling parameters of prompt number `index` that the model makes."""
        return SamplingParams(
            detokenize=False,
            temperature=1.0,
            top_p=self.prompt_top_p,
            max_tokens=self.prompt_max_tokens,
            seed=seed_of(self.seed, "prompt", index),
        )

    def arguments(self) -> dict[str, Any]:
        """All options as JSON; files by name and sha256.

        Raises:
            ConfigError: a file cannot be read.
        """
        options = {name: value for name, value in vars(self).items() if name != "prompts"}
        return options | {"prompts": {path.name: sha256_of([read_bytes(path)]) for path in self.prompts}}


def seed_of(seed: int, what: str, index: int) -> int:
    """The seed of one request, 63 bits: a hash of the seed of the run, the kind of request and its index."""
    digest = blake2b(f"{seed} {what} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shards_of(number: int, shard_size: int) -> list[range]:
    """Indices of the answers in each shard."""
    return [range(i * shard_size, min((i + 1) * shard_size, number)) for i in range(math.ceil(number / shard_size))]
