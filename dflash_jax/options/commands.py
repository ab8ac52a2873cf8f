"""Command lines with several commands, such as `python -m dflash_jax.bench serve ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from dflash_jax.base.errors import DFlashError
from dflash_jax.options.flags import CommandParser, HelpFormatter


def parse_command(
    prog: str, description: str, commands: Mapping[str, ModuleType], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line; `args.run` is the function of the command that was named.

    Args:
        prog: what is typed before the command.
        description: what all commands together are for.
        commands: by name, modules with `HELP`, `add_arguments(parser)` and `run(args) -> status`.
        arguments: None takes the process's.
    """
    parser = CommandParser(prog=prog, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            formatter_class=HelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser.parse_args(arguments)


def run_command(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status, or 2 after printing the error that stopped it."""
    try:
        status: int = args.run(args)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status
