"""Command lines that hold several commands: `python -m dflash_jax.bench serve ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from dflash_jax.base.errors import DFlashError


def parse_command(
    prog: str, description: str, commands: Mapping[str, ModuleType], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """A command line; `args.run` is what it asks for.

    Args:
        prog: what is typed before the command.
        description: of all commands.
        commands: by name, modules with `HELP`, `add_arguments(parser)` and `run(args) -> status`.
        arguments: None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser.parse_args(arguments)


def run_command(args: argparse.Namespace) -> int:
    """Run it; returns the exit status: what the command says, 2 if it could not do its work."""
    try:
        status: int = args.run(args)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status
