"""The command line: `python -m dflash_jax.train.data ...`."""

from __future__ import annotations

import sys

from dflash_jax.progress import importing


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error, 130 when interrupted."""
    with importing(arguments):
        from dflash_jax.train.data import command
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
