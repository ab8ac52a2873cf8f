"""Every flag of every command is pinned: its names, what it accepts and its default.

`flags.txt` holds one line a flag, of all commands that have it alike. After a change of a flag that is meant, renew it
and read the difference:

    python -m tests.options.test_flags && git diff tests/options/flags.txt
"""

import argparse
from contextlib import redirect_stderr, suppress
from dataclasses import MISSING, fields
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

from dflash_jax.options import EngineArgs

SNAPSHOT = Path(__file__).with_name("flags.txt")
PROBES = ("", "0", "1", "2", "-1", "3.0", "0.5", "1.5", "70000", "32k", "none", "auto", "x", "nan", "inf", '{"a": 1}')
ENGINE_COMMANDS = ("generate", "bench offline", "bench round", "eval acceptance", "train.data")
COMMANDS = ("serve", *ENGINE_COMMANDS, "bench serve", "train")


class CapturedError(Exception):
    """Carries the parser of a command out of it, before it has parsed anything."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that a command builds when it is started."""

    def capture(self, *_):
        raise CapturedError(self)

    module, _, name = command.partition(" ")
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        pytest.raises(CapturedError) as raised,
    ):
        start(module)
    parser = raised.value.args[0]
    subcommands = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(subcommands).choices[name] if name else parser


def start(module: str) -> None:
    if module == "serve":
        from dflash_jax.serve import server

        server.parse_args([])
    elif module == "generate":
        from dflash_jax import generate

        generate.parse_args([])
    elif module == "bench":
        from dflash_jax.bench import __main__ as bench

        bench.parse_args([])
    elif module == "eval":
        from dflash_jax.eval import __main__ as eval_command

        eval_command.main([])
    elif module == "train":
        from dflash_jax.train import command

        command.parse([])
    else:
        from dflash_jax.train.data import command as data_command

        data_command.parse_args([])


def field_defaults(command: str) -> dict:
    """The defaults of the fields that flags set, in commands whose parsers return only what was given."""
    if command == "serve":
        from dflash_jax.options.serve_args import SERVER_ENGINE, Limits, ServeArgs

        parts = (ServeArgs(), SERVER_ENGINE, Limits())
        return {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
    if command == "train":
        from dflash_jax.train.config import TrainConfig

        return {f.name: "(required)" if f.default is MISSING else f.default for f in fields(TrainConfig)}
    return {}


def values_of(read) -> dict[str, str]:
    """What becomes of each probe that a reader accepts, as text."""
    values = {}
    for text in PROBES:
        with suppress(argparse.ArgumentError, ValueError):
            values[text] = repr(read(text))
    return values


def not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


PLAIN = {kind.__name__: values_of(kind) for kind in (int, float, str, Path)}
PLAIN |= {"str, not empty": values_of(not_empty), "[str], not empty": values_of(lambda text: [not_empty(text)])}


def accepted(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The plain type that a flag takes; otherwise what becomes of the probes that it accepts."""
    values = values_of(lambda text: parser._get_value(action, text))
    named = (name for name, expected in PLAIN.items() if values == expected)
    shown = ", ".join(text if value in (text, repr(text)) else f"{text}: {value}" for text, value in values.items())
    return next(named, f"reads {shown}" if shown else "refuses all probes")


def line_of(parser: argparse.ArgumentParser, action: argparse.Action, defaults: dict) -> str:
    names = " ".join(action.option_strings) or action.dest
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        takes = "sets True or False" if len(action.option_strings) > 1 and action.const is None else f"{action.const!r}"
    elif action.choices is not None:
        takes = f"one of {' '.join(action.choices)}"
    else:
        takes = accepted(parser, action)
    default = defaults.get(action.dest) if action.default is argparse.SUPPRESS else action.default
    repeats = type(action).__name__.strip("_") if isinstance(action, argparse._AppendAction) else ""
    nargs = f"nargs {action.nargs}" if action.nargs else ""
    parts = [takes, nargs, repeats, "required" if action.required else "", f"default {default!r}"]
    return f"{names} -> {action.dest} | {' | '.join(filter(None, parts))}"


def lines_of(command: str) -> list[str]:
    """A line for each flag of a command, and one for each group of flags of which only one may be given."""
    with redirect_stderr(StringIO()):
        parser, defaults = parser_of(command), field_defaults(command)
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        lines = [line_of(parser, action, defaults) for action in actions]
    for group in parser._mutually_exclusive_groups:
        lines.append(f"at most one of {' '.join(a.option_strings[0] for a in group._group_actions)}")
    return sorted(lines)


def table() -> list[str]:
    """The lines of all commands, each once."""
    commands: dict[str, list[str]] = {}
    for command in COMMANDS:
        for line in lines_of(command):
            commands.setdefault(line, []).append(command)
    return [f"{', '.join(having)}: {line}" for line, having in commands.items()]


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_those_of_the_snapshot(command):
    lines = [line.split(": ", 1) for line in SNAPSHOT.read_text().splitlines()]
    assert lines_of(command) == sorted(line for commands, line in lines if command in commands.split(", "))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(command):
    parser = parser_of(command)
    shown = parser.format_help()
    for action in parser._actions:
        assert action.help
        assert all(name in shown for name in action.option_strings)
        assert action.help.count("(default: ") <= 1
        assert "None" not in action.help


def test_the_snapshot_has_every_option_of_the_engine():
    text = SNAPSHOT.read_text()
    for field in fields(EngineArgs):
        assert f" -> {field.name} | " in text


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in table()))
