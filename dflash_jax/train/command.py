"""Flags of `python -m dflash_jax.train`, and the command."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.train.config import TrainConfig, option_kinds, options_of
from dflash_jax.train.loop import train


def build_parser() -> argparse.ArgumentParser:
    """A flag for each field of `TrainConfig`, and `--config`; flags that are not given are absent from the result."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.train",
        description="Train a DFlash drafter for a target.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", type=Path, help="preset: a YAML file of these options; flags override it")
    helps, kinds = _attribute_docs(), option_kinds()
    for field in fields(TrainConfig):
        default = "" if field.default is MISSING or field.default is None else f" (default: {field.default})"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kinds[field.name].type,
            nargs="+" if kinds[field.name].is_list else None,
            help=(helps[field.name] + default).replace("%", "%%"),
        )
    return parser


def _attribute_docs() -> dict[str, str]:
    """The help of each flag: what the docstring of `TrainConfig` says of the field."""
    text = inspect.getdoc(TrainConfig) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """Options of a run: flags come before the preset, the preset before defaults.

    Raises:
        ConfigError: the preset cannot be read, or an option is unknown, missing or impossible.
    """
    flags = vars(build_parser().parse_args(arguments))
    path = flags.pop("config", None)
    preset = {} if path is None else options_of(_read_preset(path), path)
    options = preset | {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    missing = [name for name in ("target", "data", "out") if name not in options]
    if missing:
        raise ConfigError(f"--{missing[0]} is missing; give it as a flag or in the preset.")
    return TrainConfig(**options)


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--config={str(path)!r} cannot be read ({reason}); give a file of YAML.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--config={str(path)!r} holds no options; give a YAML file of 'option: value' lines.")
    return raw


def main(arguments: list[str] | None = None, *, began: float | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 after an error. `began` is that of `train`."""
    try:
        print(train(parse(arguments), began=began))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
