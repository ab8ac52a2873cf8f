"""The command line: `python -m dflash_jax.train ...`."""

from __future__ import annotations

import sys
import time

from dflash_jax.progress import importing

PACKAGES = {"optax": "optax", "orbax": "orbax-checkpoint", "tensorboardX": "tensorboardx"}  # by name of their module


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error or without a package of the extra `train`."""
    began = time.monotonic()  # --minutes covers imports
    try:
        with importing(arguments):
            from dflash_jax.train import command
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        reason = f"training needs the package {package}, which is not installed"
        print(f"error: {reason}; run pip install '.[train]' in the checkout.", file=sys.stderr)
        return 2
    return command.main(arguments, began=began)


if __name__ == "__main__":
    sys.exit(main())
