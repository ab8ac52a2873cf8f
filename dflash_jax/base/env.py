"""The only place that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder of compiled programs: `DFLASH_CACHE_DIR`, or `dflash_jax` in the user's cache folder."""
    folder = os.environ.get("DFLASH_CACHE_DIR")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def xla_flags() -> str:
    """Flags that the user gives XLA."""
    return os.environ.get("XLA_FLAGS", "")


MOST_CLAIMED = 0.97  # share of a GPU's memory


def claim_device_memory(share: float = MOST_CLAIMED) -> None:
    """Let JAX use this share of a GPU's memory, not three quarters, so that `gpu_memory_utilization` may be that much.

    Has no effect once JAX has initialised its devices, and does not override what the user has set.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(share, MOST_CLAIMED):.6f}")
