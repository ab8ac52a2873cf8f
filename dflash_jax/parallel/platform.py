"""The platform that JAX runs on: its memory, how XLA compiles for it, and the folder of compiled programs."""

from __future__ import annotations

import ctypes
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from dflash_jax.base.env import MOST_CLAIMED, cache_folder

# CUDA takes it of a GPU beside JAX's allocator, for its context and the code of kernels: 0.67 GiB measured on an H200.
OUTSIDE_BYTES = 768 << 20
# dot_merger off: XLA would concatenate the context weights of all drafter layers into one array, in every round.
# triton_gemm off: XLA would compile dozens of Triton kernels of each product to try them, a minute for a program, and
# picks none that is faster there.
# dynamic_slice_fusion off: XLA would hand kernels the middle of an array in place of a slice, the page table of one
# sequence for example, and Mosaic's refuse arrays that are not aligned to 256 bytes.
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# float-normalization off: XLA would convert a whole pool of bfloat16 or fp8 pages to write one token, and back.
# One codegen part: a program is compiled in one thread of low priority; XLA's own threads would hold up others' rounds.
CPU_COMPILER_OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": ",".join(f"float-normalization-{name}" for name in ("bf16", "f8e4m3fn", "f8e5m2")),
    "xla_cpu_parallel_codegen_split_count": 1,
}
# XLA times matrix products while it compiles, over operands of its own: 2.4 GiB for the head of Qwen3.6-27B.
UNTIMED_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0}


def runs_on_cpus() -> bool:
    """Whether JAX will run on CPUs.

    It does not ask JAX for its devices, which would fix settings that are still to be made.
    """
    plugins = ("jax_plugins", "libtpu")  # packages that add GPUs and TPUs to JAX
    platforms = jax.config.values["jax_platforms"]
    return platforms == "cpu" or not any(map(find_spec, plugins))


def share_of_gpu(most: int | None) -> float:
    """The share of a GPU's memory that JAX's allocator may take, if the process may take `most` bytes in all.

    JAX knows the memory of its devices only after their allocators are made, so CUDA is asked.
    """
    total = None if most is None or runs_on_cpus() else _bytes_of_gpu()
    return MOST_CLAIMED if most is None or total is None else max(most - OUTSIDE_BYTES, 0) / total


def _bytes_of_gpu() -> int | None:
    """Bytes of the first visible GPU; None without CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceTotalMem_v2(ctypes.byref(size), device),
    )
    return None if any(call() for call in calls) else size.value


def compiler_options(platform: str, *, has_room: bool = True) -> dict[str, Any]:
    """XLA's options for programs that run on devices of this platform.

    Args:
        platform: as `jax.Device.platform` names it.
        has_room: whether the device has memory left for another copy of the largest parameter; without it, XLA takes
            the matrix products that its heuristics choose.
    """
    options = COMPILER_OPTIONS | (CPU_COMPILER_OPTIONS if platform == "cpu" else {})
    return options if has_room else options | UNTIMED_OPTIONS


def enable_compilation_cache() -> None:
    """Let JAX keep what it compiles over restarts, unless the user has configured its cache.

    Not on CPUs: what JAX has loaded there cannot be saved again as a program of an engine (`folder_of_programs`).
    """
    if _may_keep() and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", _jaxs_folder())
        # The engine has many small programs; compiling all of them takes as long as compiling the large ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def folder_of_programs() -> Path | None:
    """The folder in which engines keep compiled programs, which spares tracing, too; None if they keep none.

    That has run on CPUs and GPUs only: on TPUs JAX keeps what it compiles.
    """
    return cache_folder() / "programs" if _may_keep() and jax.default_backend() != "tpu" else None


def load_runtime() -> None:
    """Load what compiled programs call that no kernel of this process has loaded: the runtime of Mosaic's GPU kernels.

    XLA finds it by an environment variable that this import sets. Without it a program from a file fails to load:
    "Symbols not found: [mosaic_gpu_launch_kernel]".
    """
    if jax.default_backend() == "gpu":
        import_module("jax.experimental.pallas.mosaic_gpu")


def _may_keep() -> bool:
    """Whether the user has left it to us where compiled programs are kept."""
    options = jax.config.values
    is_users = options["jax_compilation_cache_dir"] not in (None, _jaxs_folder())
    return bool(options["jax_enable_compilation_cache"]) and not is_users


def _jaxs_folder() -> str:
    """The folder of JAX's own cache."""
    return str(cache_folder() / "xla")
