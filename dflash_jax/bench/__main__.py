"""The command line: `python -m dflash_jax.bench serve|offline|round ...`."""

from __future__ import annotations

import argparse
import sys

from dflash_jax.bench import offline, round, serve
from dflash_jax.errors import DFlashError

COMMANDS = {"serve": serve, "offline": offline, "round": round}  # each has HELP, add_arguments(parser), run(args)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `args.run` is what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m dflash_jax.bench", description="Measure speed.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request failed, 2 if nothing could be measured."""
    args = parse_args(arguments)
    try:
        status: int = args.run(args)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
