"""The command line: `python -m dflash_jax.train ...`."""

from __future__ import annotations

import sys
import time

from dflash_jax.progress import importing


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 after an error."""
    began = time.monotonic()  # --minutes covers imports
    with importing(arguments):
        from dflash_jax.train import command
    return command.main(arguments, began=began)


if __name__ == "__main__":
    sys.exit(main())
