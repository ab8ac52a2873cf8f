"""The command line: `python -m dflash_jax.eval acceptance ...`."""

from __future__ import annotations

import argparse
import sys

from dflash_jax.errors import DFlashError
from dflash_jax.eval import command

COMMANDS = {"acceptance": command}  # each has HELP, add_arguments(parser) and run(args) -> status


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `args.run` is what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m dflash_jax.eval", description="Measure drafters.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a check failed, 2 if nothing could be measured."""
    args = parse_args(arguments)
    try:
        status: int = args.run(args)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
