"""Which platform JAX runs on, and where it keeps compiled programs."""

from __future__ import annotations

from importlib.util import find_spec

import jax

from dflash_jax.base.env import cache_folder


def runs_on_cpus() -> bool:
    """Whether JAX has nothing but CPUs to run on; told without a look at its devices, which fixes many settings."""
    plugins = ("jax_plugins", "libtpu")  # the packages that bring GPUs and TPUs
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # an option, made at run time
    return platforms == "cpu" or not any(map(find_spec, plugins))


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
