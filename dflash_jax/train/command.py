"""The command line of `python -m dflash_jax.train`."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from dflash_jax.base.errors import ConfigError, DFlashError
from dflash_jax.options.flags import CommandParser, add_preset_options
from dflash_jax.options.option import default_of, flag_of, options_of, unknown_option
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.loop import train


def build_parser() -> argparse.ArgumentParser:
    """A parser with `--config` and a flag for each option; it returns only the flags that were given."""
    parser = CommandParser(
        prog="python -m dflash_jax.train",
        description="Train a DFlash drafter for a target.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", type=Path, help="preset: a YAML file of these options; flags win over it")
    add_preset_options(parser, TrainConfig)
    return parser


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """Options of a run: flags come before the preset, the preset before defaults.

    Raises:
        ConfigError: the preset cannot be read, or an option is unknown, missing or impossible.
    """
    flags = vars(build_parser().parse_args(arguments))
    path = flags.pop("config", None)
    options = ({} if path is None else _read_preset(path)) | flags
    for name in options_of(TrainConfig):
        if name not in options and default_of(TrainConfig, name) is MISSING:
            raise ConfigError(f"{flag_of(name)} is missing; give it as a flag or in the preset.")
    return TrainConfig(**{name: _typed(name, value) for name, value in options.items()})


def _read_preset(path: Path) -> dict[str, Any]:
    """The options of a YAML file, by field.

    Raises:
        ConfigError: the file cannot be read, or one of its options is unknown.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--config={str(path)!r} cannot be read ({reason}); give a file of YAML.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--config={str(path)!r} holds no options; give a YAML file of 'option: value' lines.")
    options = {str(name).replace("-", "_"): value for name, value in raw.items()}
    known = options_of(TrainConfig)
    for name in options:
        if name not in known:
            raise ConfigError(f"{path}: {unknown_option(name, known)}")
    return options


def _typed(name: str, value: Any) -> Any:
    """The value of a flag or of a preset as `TrainConfig` has it: lists as tuples, numbers as numbers.

    PyYAML reads some numbers, such as 1e-3, as text. A text that is no number stays, and `TrainConfig` refuses it.
    """
    about = options_of(TrainConfig)[name]
    read = about.kind.plain_flag()["type"]
    if isinstance(value, list):
        return tuple(value)
    if about.nargs and value is not None:
        return (value,)
    if read in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            return read(value)
    return value


def main(arguments: list[str] | None = None, *, began: float | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error. `began` is that of `train`."""
    try:
        print(train(parse(arguments), began=began))
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
