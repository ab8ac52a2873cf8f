"""The options of making training data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import SamplingParams
from dflash_jax.options.flag_values import json_object
from dflash_jax.options.kinds import Number, Read
from dflash_jax.options.option import check_options, described, documented, option
from dflash_jax.train.data.files import read_bytes, sha256_of

SIZE, SIZE_OR_NONE, COUNT = Number(1), Number(1, or_none=True), Number(0)
SAMPLED, SAMPLED_SIZE = Number(is_whole=False), Number()  # `SamplingParams` has their bounds


@documented
@dataclass(frozen=True)
class DataOptions:
    """What data to make. Equal options and the same model make the same data.

    Raises:
        ConfigError: a value is out of bounds, or two do not go together.
        RequestError: a value cannot be sampled with.
    """

    prompts: tuple[Path, ...] = option(
        (), Read(Path), "JSONL files of messages or prompts; none if the model makes them", unit="FILE", nargs="+"
    )
    max_prompts: int | None = option(
        None, SIZE_OR_NONE, "most prompts to take from the files", unit="PROMPTS", unset="none: all"
    )
    self_prompts: int = option(0, COUNT, "prompts that the model makes itself; 0 if there are files", unit="PROMPTS")
    systems: tuple[str, ...] = option(
        (),
        Read(str),
        "system messages of prompts that the model makes, in turn",
        unit="TEXT",
        names=("--system",),
        nargs="+",
    )
    prompt_top_p: float = option(
        1.0, SAMPLED, "probability mass from which the model samples prompts, at temperature 1", unit="P"
    )
    prompt_max_tokens: int = option(256, SAMPLED_SIZE, "most tokens of a prompt that the model makes", unit="TOKENS")
    chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=described(Read(json_object), "further variables of the chat template", unit="JSON"),
    )
    temperatures: tuple[float, ...] = option(
        (0.0,),
        SAMPLED,
        "temperatures; every prompt is answered once at each",
        unit="T",
        names=("--temperature",),
        nargs="+",
    )
    top_p: float = option(1.0, SAMPLED, "probability mass from which responses are sampled", unit="P")
    max_tokens: int = option(512, SAMPLED_SIZE, "most tokens of a response", unit="TOKENS")
    min_tokens: int = option(1, SIZE, "responses with fewer tokens are dropped", unit="TOKENS")
    max_repetition: float | None = option(
        None,
        Number(0, 1, is_whole=False, or_none=True),
        "responses with a larger share of repeated 8-grams are dropped",
        unit="SHARE",
        unset="none: all are kept",
    )
    seed: int = option(0, Number(), "seed of everything that is sampled", unit="N")
    shard_size: int = option(4096, SIZE, "responses asked for between two writes", unit="RESPONSES")

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)
        if bool(self.prompts) == (self.self_prompts > 0):
            raise ConfigError("give exactly one of --prompts FILE and --self-prompts N, N at least 1.")
        if self.max_prompts is not None and not self.prompts:
            raise ConfigError("--max-prompts needs --prompts.")
        if self.systems and not self.self_prompts:
            raise ConfigError("--system needs --self-prompts.")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"--min-tokens={self.min_tokens} exceeds --max-tokens={self.max_tokens}; lower it.")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"--temperature {list(self.temperatures)} must be different numbers, at least one.")
        names = [path.name for path in self.prompts]
        if len(set(names)) < len(names):
            raise ConfigError(f"--prompts {names} must have different names: responses are marked with them.")
        for temperature in self.temperatures:
            self.answer_params(temperature, 0)
        self.prompt_params(0)

    def answer_params(self, temperature: float, index: int) -> SamplingParams:
        """How response number `index` is sampled."""
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
        """All options as JSON values; files by name and sha256.

        Raises:
            ConfigError: a file cannot be read.
        """
        others = {name: value for name, value in vars(self).items() if name != "prompts"}
        return others | {"prompts": {path.name: sha256_of([read_bytes(path)]) for path in self.prompts}}


def seed_of(seed: int, what: str, index: int) -> int:
    """The seed of one request of a run: 63 bits that depend only on the arguments."""
    digest = blake2b(f"{seed} {what} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shards_of(number: int, shard_size: int) -> list[range]:
    """The indices of the responses in each shard."""
    return [range(i * shard_size, min((i + 1) * shard_size, number)) for i in range(math.ceil(number / shard_size))]
