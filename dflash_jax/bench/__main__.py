"""The command line: `python -m dflash_jax.bench serve|offline|round ...`."""

from __future__ import annotations

import argparse
import sys

from dflash_jax.options.commands import parse_command, run_command
from dflash_jax.progress import importing


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    with importing(arguments):
        from dflash_jax.bench import offline, round, serve
    commands = {"serve": serve, "offline": offline, "round": round}
    return parse_command("python -m dflash_jax.bench", "Measure speed.", commands, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request failed, 2 if nothing could be measured."""
    return run_command(parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
