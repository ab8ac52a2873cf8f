"""The command line: `python -m dflash_jax.bench serve|offline|round ...`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from dflash_jax.options.commands import parse_command, run_command
from dflash_jax.progress import importing

COMMANDS = ("serve", "offline", "round")  # each is a module of this package


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; of the commands only the one it names is imported: others may lack their packages."""
    words = sys.argv[1:] if arguments is None else arguments
    named = [word for word in words[:1] if word in COMMANDS]
    with importing(arguments):
        modules = {name: import_module(f"dflash_jax.bench.{name}") for name in named or COMMANDS}
    return parse_command("python -m dflash_jax.bench", "Measure speed.", modules, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request failed, 2 if nothing could be measured."""
    return run_command(parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
