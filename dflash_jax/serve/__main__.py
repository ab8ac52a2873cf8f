"""`python -m dflash_jax.serve`."""

import sys

from dflash_jax.serve.server import main

if __name__ == "__main__":
    sys.exit(main())
