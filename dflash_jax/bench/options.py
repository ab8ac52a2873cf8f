"""The options of `bench`: workload, server, rounds and result. Names are vLLM's where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.options.flag_values import json_object
from dflash_jax.options.kinds import Choice, Number, Read, Switch
from dflash_jax.options.option import check_options, documented, option

MOST_RANDOM = 1000  # random prompts by default, as in vLLM
TARGET_QUANTIZATIONS = ("int4", "fp8")  # of the random weights of `bench round`
FEW_RANDOM = 32  # the default of an engine on CPUs, which takes half a second for a prompt of 1,024 tokens
SIZE, SIZE_OR_NONE, COUNT = Number(1), Number(1, or_none=True), Number(0)
ABOVE_ZERO = Number(0, is_whole=False, is_open=True, or_infinite=True)
# Their bounds depend on other options or on a server, and are checked where those are known.
ANY_WHOLE, ANY_NUMBER = Number(or_none=True), Number(is_whole=False)
TEXT, PATH, ON = Read(str, or_none=True), Read(Path, or_none=True), Switch("store_true")


@documented
@dataclass(frozen=True)
class WorkloadOptions:
    """Which requests `bench offline` and `bench serve` measure.

    Raises:
        ConfigError: an option is out of bounds.
    """

    dataset_name: str = option("random", Choice(("random", "jsonl")), "where prompts come from")
    dataset_path: Path | None = option(
        None, PATH, "JSONL file of prompt or messages, and perhaps output_tokens, in each line", unit="FILE"
    )
    num_prompts: int | None = option(
        None,
        SIZE_OR_NONE,
        "requests",
        unit="REQUESTS",
        unset=f"{MOST_RANDOM} random ones ({FEW_RANDOM} offline on CPUs) or one a line of the file",
    )
    random_input_len: int = option(1024, ANY_WHOLE, "tokens (or words, in text) of a random prompt", unit="TOKENS")
    random_output_len: int = option(128, ANY_WHOLE, "most tokens of an answer to a random prompt", unit="TOKENS")
    random_range_ratio: float = option(
        0.0, ANY_NUMBER, "share by which these lengths vary, from 0 to less than 1", unit="SHARE"
    )
    random_vocab_size: int = option(256, ANY_WHOLE, "random token ids are below this", unit="IDS")
    custom_output_len: int = option(
        256, ANY_WHOLE, "most tokens of an answer to a line without output_tokens", unit="TOKENS"
    )
    ignore_eos: bool = option(False, ON, "go on after the end-of-sequence token")
    temperature: float = option(0.0, ANY_NUMBER, "temperature to sample at; 0 is greedy", unit="T")
    seed: int = option(0, COUNT, "seed of prompts, lengths and arrivals", unit="N")
    num_warmups: int = option(
        1, COUNT, "requests before the clock starts; those of a file are its first ones", unit="REQUESTS"
    )

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)


@documented
@dataclass(frozen=True)
class ServerOptions:
    """Which server `bench serve` asks, and how.

    Raises:
        ConfigError: an option is out of bounds.
    """

    base_url: str = option("http://127.0.0.1:8000", Read(str), "http or https, host and port", unit="URL")
    endpoint: str = option("completions", Read(str), "chat, completions, or a path that ends with these", unit="PATH")
    model: str | None = option(None, TEXT, "model to ask for", unit="MODEL", unset="the first of /v1/models")
    api_key: str | None = option(None, TEXT, "bearer token to send; kept out of the result", unit="KEY")
    extra_body: dict[str, Any] | None = option(
        None, Read(json_object, or_none=True), "more fields of every request", unit="JSON"
    )
    request_timeout: float = option(600.0, ABOVE_ZERO, "seconds until a request has failed", unit="SECONDS")

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)


@documented
@dataclass(frozen=True)
class LoadOptions:
    """When `bench serve` sends requests; only one of these may be given.

    Raises:
        ConfigError: an option is out of bounds.
    """

    max_concurrency: int | None = option(
        None, SIZE_OR_NONE, "closed loop: so many requests at a time, all the time", unit="REQUESTS"
    )
    request_rate: float = option(
        math.inf, ABOVE_ZERO, "open loop: Poisson arrivals a second; inf sends all at once", unit="RATE"
    )

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)


@documented
@dataclass(frozen=True)
class ReportOptions:
    """Where the result of `bench offline` and `bench serve` goes."""

    output: Path | None = option(
        None, PATH, "write the result as JSON", unit="FILE", names=("--output", "--result-filename")
    )
    save_result: bool = option(False, ON, "write the result to a file named after command and time")
    save_detailed: bool = option(False, ON, "write that file, with a record of every request in it")


@documented
@dataclass(frozen=True)
class RoundOptions:
    """What `bench round` measures, besides the options of the engine.

    Raises:
        ConfigError: an option is out of bounds.
    """

    model: str = option("qwen3-8b", Read(str), "a preset, or a folder with a config.json", unit="MODEL")
    draft_model: str | None = option(
        None,
        TEXT,
        "folder with the config.json of a drafter",
        unit="FOLDER",
        unset="a drafter as z-lab publishes them",
    )
    draft_sliding_window: int | None = option(
        None, ANY_WHOLE, "tokens that all layers of that drafter except the last see", unit="TOKENS"
    )
    target_quantization: str | None = option(
        None,
        Choice(TARGET_QUANTIZATIONS, or_none=True),
        "give the target's matrices random numbers in so many bits, with a scale for each 128 inputs",
        unset="none: they have the dtype",
    )
    plain: bool = option(False, ON, "decode without a drafter")
    num_accepted_tokens: int = option(5, ANY_WHOLE, "drafts kept in each round", unit="DRAFTS")
    batch_size: tuple[int, ...] = option(
        (1,),
        SIZE,
        "requests that decode together, one or several numbers; none only prefills",
        unit="REQUESTS",
        nargs="*",
    )
    context: tuple[int, ...] = option(
        (1024,), SIZE, "tokens of each prompt, one or several numbers", unit="TOKENS", nargs="+"
    )
    temperature: tuple[float, ...] = option(
        (0.0,),
        Number(0, is_whole=False),
        "temperature of the requests, one or several numbers; 0 is greedy",
        unit="T",
        nargs="+",
    )
    output_len: int = option(256, ANY_WHOLE, "tokens that each request decodes", unit="TOKENS")
    warmup_rounds: int = option(3, SIZE, "rounds of these that are not timed; the first one compiles", unit="ROUNDS")
    prefill: bool = option(False, ON, "time the prefill of one prompt of each context, too")
    no_trace: bool = option(False, ON, "do not take rounds apart with a profiler")
    trace_rounds: int = option(8, SIZE, "rounds that are profiled after the timed ones", unit="ROUNDS")
    trace_dir: Path | None = option(None, PATH, "keep the traces in this folder", unit="FOLDER")
    baseline: Path | None = option(None, PATH, "another engine's figures, to show beside these", unit="FILE")
    output: Path | None = option(None, PATH, "write the result as JSON", unit="FILE")

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)
