"""The only place that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled programs are kept: `DFLASH_CACHE_DIR`, or `dflash_jax` in the user's cache folder."""
    own = os.environ.get("DFLASH_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def claim_device_memory() -> None:
    """Let JAX have all of a GPU, not three quarters, so that `gpu_memory_utilization` is a share of the whole.

    Has no effect once JAX has looked at its devices, and none on what the user has set.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
