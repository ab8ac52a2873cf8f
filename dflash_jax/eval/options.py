"""Flags of `eval acceptance`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval.conversations import PROMPT_STYLES
from dflash_jax.options.flags import add_engine_arguments

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_engine_arguments(parser, without=("num_speculative_tokens",), compile_at_start=None)
    add = parser.add_argument_group("what to measure").add_argument
    data_help = "humaneval, mt-bench, python (build/corpus), a folder or .tar.gz of .py files, or a JSONL file; several"
    add("--dataset", nargs="+", required=True, metavar="NAME", help=data_help)
    add("--num-prompts", type=int, help="most prompts of each data set; without it, all of it and 64 Python files")
    add("--prompt-len", type=int, default=256, metavar="TOKENS", help="what is shown of a Python file, at most")
    add("--prompt-style", default="auto", choices=PROMPT_STYLES, help="auto asks an instruct model questions as a user")
    add("--max-tokens", type=int, default=256, help="most tokens of an answer")
    add("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help="0 is greedy; several")
    add(
        "--num-speculative-tokens",
        type=block_length,
        nargs="+",
        default=[AUTO],
        metavar="N",
        help="drafts verified each round, or auto: as many as pay; several",
    )
    add("--seed", type=int, default=0, help="of the choice of prompts and of sampling")
    add("--no-plain", action="store_true", help="do not decode without the drafter: no speed-up, no check of outputs")
    add("--no-plots", action="store_true", help="write results.json alone; plots need matplotlib")
    add("--output", type=Path, required=True, metavar="FOLDER", help="for results.json and the plots")


def block_length(text: str) -> int | str:
    """Parse the drafts of a round: a number, or "auto"."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of drafts nor {AUTO!r}") from None


def check(args: argparse.Namespace) -> None:
    """Refuse impossible options before anything is loaded.

    Raises:
        ConfigError: an option is out of range.
    """
    for name in ("num_prompts", "prompt_len", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be at least 1.")
    if args.seed < 0:
        raise ConfigError(f"--seed={args.seed} must be at least 0.")
    for name in ("dataset", "temperature", "num_speculative_tokens"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise ConfigError(f"--{name.replace('_', '-')} names something twice; name it once.")
