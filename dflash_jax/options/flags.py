"""Flags of commands other than the server, made of dataclasses of options.

These flags have the fields' names and plain types; the dataclass checks their values, so that flags, presets and Python
are refused in the same sentence. The server's flags are made in `serve_flags`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING
from itertools import takewhile
from typing import Any, TypeVar

from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.option import default_of, flag_names, no_flag, options_of, shown_default, words_without
from dflash_jax.options.serve_args import ServeArgs

Options = TypeVar("Options")
MODELS = ("model", "draft_model")
# A command that loads an engine itself never queues requests, and a seed of its own decides all that is random in it.
ABSENT_IN_COMMANDS = ("max_num_queued_seqs", "seed")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds its default to the help of each flag that has one and does not name it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_nothing = action.default in (None, []) or action.default is False
        is_said = action.help is None or "(default: " in action.help
        return action.help if is_nothing or is_said else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses an unknown flag in one sentence, before it looks for what is required."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; flags of subcommands are left to their parsers, which are of this class, too."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            flags = self._option_string_actions
            for word in takewhile(lambda word: word != "--", words):
                name = word.partition("=")[0]
                if re.fullmatch(r"--\S+", name) and not any(flag.startswith(name) for flag in flags):
                    self.exit(2, f"error: {no_flag(name, flags)}\n")
        return super().parse_known_args(words, namespace)


def add_options(group: Any, owner: type, *, without: Collection[str] = (), **defaults: Any) -> None:
    """Add a flag for each option of a dataclass.

    Args:
        group: a parser, or a group of one.
        owner: the dataclass.
        without: fields that get no flag.
        defaults: by field, where they are not those of the dataclass.
    """
    for name in options_of(owner):
        if name not in without:
            add_option(group, owner, name, **({"default": defaults[name]} if name in defaults else {}))


def add_preset_options(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add a flag for each option of a dataclass to a command that a preset may give them, too.

    The parser returns only the flags that were given; none is required. Choices are left to the dataclass, which checks
    flags and preset together.
    """
    for name, about in options_of(owner).items():
        default = default_of(owner, name)
        words = "" if default is MISSING else f" (default: {words_without(about, default)})"
        changes = {"required": False, "default": argparse.SUPPRESS, "choices": None, "help": about.help + words}
        add_option(parser, owner, name, **changes)


def add_option(group: Any, owner: type, name: str, **changes: Any) -> None:
    """Add the flag of one option; `changes` are arguments of `add_argument` that replace what the option says."""
    about, default = options_of(owner)[name], default_of(owner, name)
    arguments = about.kind.plain_flag()
    if "action" not in arguments:
        arguments |= {"metavar": about.unit, "nargs": about.nargs}
    if default is MISSING:
        arguments |= {"required": True, "help": about.help}
    else:
        is_changed = changes.get("default", default) != default
        words = shown_default(changes["default"]) if is_changed else words_without(about, default)
        help = f"{about.help} (default: {words})"
        arguments |= {"default": list(default) if isinstance(default, tuple) else default, "help": help}
    arguments |= {"dest": name} | changes
    arguments["help"] = arguments["help"].replace("%", "%%")
    group.add_argument(*flag_names(name, about), **arguments)


def options_from(args: argparse.Namespace, owner: type[Options]) -> Options:
    """The dataclass of options that a command line fills; lists become tuples."""
    values = {name: getattr(args, name) for name in options_of(owner)}
    return owner(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def add_engine_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of model, drafter and engine.

    Args:
        parser: the command's.
        without: fields of `EngineArgs` that the command has other flags for, or decides itself.
        defaults: by field of `EngineArgs`, where the command's differ.
    """
    group = parser.add_argument_group("engine")
    for name in MODELS:
        add_option(group, ServeArgs, name)
    add_options(group, EngineArgs, without=(*ABSENT_IN_COMMANDS, *without), **defaults)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of a command line for `EngineArgs`, by field."""
    names = [name for name in options_of(EngineArgs) if name not in ABSENT_IN_COMMANDS]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
