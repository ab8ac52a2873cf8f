"""Flags of `eval acceptance`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval.conversations import PROMPT_STYLES
from dflash_jax.options.flags import add_engine_arguments, add_options, options_from
from dflash_jax.options.kinds import Choice, Number, Read, Switch, Text
from dflash_jax.options.option import check_options, described, documented, flag_of, option

AUTO = "auto"
SIZE, SIZE_OR_NONE = Number(1), Number(1, or_none=True)


def block_length(text: str) -> int | str:
    """Drafts a round: a number, or "auto".

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of drafts nor {AUTO!r}") from None


@documented
@dataclass(frozen=True)
class EvalOptions:
    """What to measure.

    Raises:
        ConfigError: an option is out of bounds, or a list names something twice.
    """

    dataset: tuple[str, ...] = field(
        metadata=described(
            Text(),
            "one or several of humaneval, mt-bench, python (build/corpus), folders and .tar.gz of .py files, JSONL",
            unit="NAME",
            nargs="+",
        )
    )
    output: Path = field(metadata=described(Read(Path), "folder for results.json and the plots", unit="FOLDER"))
    num_prompts: int | None = option(
        None, SIZE_OR_NONE, "most prompts of each data set", unit="PROMPTS", unset="all, but 64 Python files"
    )
    prompt_len: int = option(256, SIZE, "most tokens that are shown of a Python file", unit="TOKENS")
    prompt_style: str = option(
        "auto", Choice(PROMPT_STYLES), "how prompts are asked; auto asks an instruct model questions as a user"
    )
    max_tokens: int = option(256, SIZE, "most tokens of an answer", unit="TOKENS")
    temperature: tuple[float, ...] = option(
        (0.0,), Number(is_whole=False), "temperatures to sample at, one or several; 0 is greedy", unit="T", nargs="+"
    )
    num_speculative_tokens: tuple[int | str, ...] = option(
        (AUTO,),
        Read(block_length),
        "drafts verified in each round, or auto (as many as pay), one or several",
        unit="DRAFTS",
        nargs="+",
    )
    seed: int = option(0, Number(0), "seed of the choice of prompts and of sampling", unit="N")
    no_plain: bool = option(
        False, Switch("store_true"), "do not decode without the drafter: no speed-up, no check of outputs"
    )
    no_plots: bool = option(False, Switch("store_true"), "write only results.json; plots need matplotlib")

    def __post_init__(self) -> None:
        check_options(self, as_flags=True)
        for name in ("dataset", "temperature", "num_speculative_tokens"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{flag_of(name)} names something twice; name it once.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command: the engine's, and what to measure."""
    add_engine_arguments(parser, without=("num_speculative_tokens",), compile_at_start=None)
    add_options(parser.add_argument_group("what to measure"), EvalOptions)


def check(args: argparse.Namespace) -> None:
    """Refuse impossible options before anything is loaded.

    Raises:
        ConfigError: an option is out of bounds.
    """
    options_from(args, EvalOptions)
