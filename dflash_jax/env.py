"""The only place that reads environment variables, and the process-wide settings that follow from them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import jax


def cache_folder() -> Path:
    """Where compiled programs are kept: `DFLASH_CACHE_DIR`, or `dflash_jax` in the user's cache folder."""
    own = os.environ.get("DFLASH_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def runs_on_cpus() -> bool:
    """Whether JAX has nothing but CPUs to run on; told without a look at its devices, which fixes many settings."""
    plugins = ("jax_plugins", "libtpu")  # the packages that bring GPUs and TPUs
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # an option, made at run time
    return platforms == "cpu" or not any(map(find_spec, plugins))


def claim_device_memory() -> None:
    """Let JAX have all of a GPU, not three quarters, so that `gpu_memory_utilization` is a share of the whole.

    Has no effect once JAX has looked at its devices, and none on what the user has set.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")


def enable_compilation_cache() -> None:
    """Keep compiled programs over restarts, unless JAX was already told where, or not, to keep them.

    Not on CPUs: a program kept there is for the very features of one processor, and compiling is cheap.
    """
    options = jax.config.values
    is_untold = options["jax_compilation_cache_dir"] is None and options["jax_enable_compilation_cache"]
    if is_untold and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        # The engine has many small programs; together they take as long as the large ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
