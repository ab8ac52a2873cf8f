"""The command line: `python -m dflash_jax.eval acceptance ...`."""

from __future__ import annotations

import sys

from dflash_jax.options.commands import parse_command, run_command
from dflash_jax.progress import importing


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a check failed, 2 if nothing could be measured."""
    with importing(arguments):
        from dflash_jax.eval import command
    args = parse_command("python -m dflash_jax.eval", "Measure drafters.", {"acceptance": command}, arguments)
    return run_command(args)


if __name__ == "__main__":
    sys.exit(main())
