"""The platform that JAX runs on, and the folder of its compilation cache."""

from __future__ import annotations

from importlib.util import find_spec

import jax

from dflash_jax.base.env import cache_folder


def runs_on_cpus() -> bool:
    """Whether JAX will run on CPUs.

    It does not ask JAX for its devices, which would fix settings that are still to be made.
    """
    plugins = ("jax_plugins", "libtpu")  # packages that add GPUs and TPUs to JAX
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # an option, made at run time
    return platforms == "cpu" or not any(map(find_spec, plugins))


def enable_compilation_cache() -> None:
    """Keep compiled programs over restarts, unless the user has configured JAX's compilation cache.

    CPUs keep none: a stored program fits the features of one processor only, and compiling is cheap.
    """
    options = jax.config.values
    is_unset = options["jax_compilation_cache_dir"] is None and options["jax_enable_compilation_cache"]
    if is_unset and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        # The engine has many small programs; compiling all of them takes as long as compiling the large ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
