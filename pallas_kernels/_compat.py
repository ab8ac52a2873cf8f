"""The only file that knows JAX versions (0.10.2 to 0.11.2), devices and what Pallas calls things on each.

The rest of the package names a kernel, its outputs and its parameters, and gets from here what differs.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_OLD = jax.__version_info__ < (0, 11)
_H200_SMS = 132

Interpret = bool


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: Interpret,
    name: str,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` on the Triton backend: explicit parameters, since the default backend differs by version."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=_triton_backend().CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


def _triton_backend() -> Any:
    """Pallas' Triton backend, imported when a kernel is built for it: a CPU or TPU never needs it.

    It is deprecated since JAX 0.11 in favour of Mosaic GPU, and warns at every lowering. It stays here on purpose: it
    is the only backend whose whole semantics run on a CPU (interpret mode), and it covers what the Mosaic kernels do
    not. The filter matches that one message and nothing else.

    MLIR's bindings import the Python side of a dialect when they meet one of its types, from a module that they derive
    from the dialect's name. Triton's dialect lies elsewhere, so they searched in vain at each type, for half of the
    time that a kernel takes to lower.
    """
    from jax.experimental.pallas import triton
    from jaxlib.triton import dialect

    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)
    return triton


def mosaic_in_place(
    body: Callable[[Any], None], arrays: list[jax.Array], mesh: Any, *, compiler_params: Any, name: str
) -> list[jax.Array]:
    """Run a Mosaic kernel that changes some of its arrays: donated ones are written where they lie.

    JAX 0.11 deprecates `core_map` in favour of `kernel` over a `jax.Ref`, which 0.10 cannot trace. The filter matches
    that one message and nothing else.

    Args:
        body: of a CTA; it is given a reference to each array.
        arrays: what it reads and writes.
        mesh: a Mosaic mesh.
        compiler_params: Mosaic's.
        name: of the kernel, in profiles.

    Returns:
        The arrays as they are then.
    """
    message = "jax.experimental.pallas.core_map is deprecated"
    warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)

    def run(refs: Any) -> None:
        pl.core_map(mesh, compiler_params=compiler_params, name=name)(functools.partial(body, refs))

    changed: list[jax.Array] = pl.run_state(run)(arrays)
    return changed


def row_index(*index: Any) -> tuple[jax.Array, ...]:
    """Index of full rows of a reference: scalars and vectors of one length, then the length of a row.

    The interpreter takes indices that are all slices or all arrays, not some of each, so a row is an array too.
    Rows out of range are legal under a mask: the GPU does not touch them, the interpreter fills or drops them.
    """
    *leading, width = index
    size = max(getattr(i, "size", 1) for i in leading)
    shape = (size, width)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return *(jnp.broadcast_to(jnp.reshape(i, (-1, 1)), shape) for i in leading), column


def out_like(shape: Sequence[int], dtype: Any, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """An output that varies over the same mesh axes as ``operand``, which ``shard_map`` has to know."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=_manual(operand))


def _manual(x: jax.Array) -> Any:
    return jax.typeof(x).manual_axis_type


def vary_alike(*operands: Any) -> tuple[Any, ...]:
    """The operands, arrays or trees of such, each array marked as varying over the mesh axes of any (no data moves)."""
    arrays, structure = jax.tree.flatten(operands)
    varying = [_manual(x).varying for x in arrays]
    every: frozenset[Any] = frozenset().union(*varying)
    marked = [
        jax.lax.pcast(x, tuple(every - axes), to="varying") if every - axes else x
        for x, axes in zip(arrays, varying, strict=True)
    ]
    alike: tuple[Any, ...] = jax.tree.unflatten(structure, marked)
    return alike


def smem_transpose(ref: Any, permutation: tuple[int, ...] = (1, 0)) -> Any:
    """A shared-memory reference whose axes are permuted (Mosaic GPU)."""
    if _OLD:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.transpose_ref(ref, permutation)
    return ref.transpose(permutation)


def smem_load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """Load a full reference to shared or global memory into registers of the given layout (Mosaic GPU).

    Bank conflicts of shared memory are an error if it must be ``optimized``.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, *([()] if _OLD else []), layout=layout, optimized=optimized)


def tiling(tiles: tuple[tuple[int, ...], ...]) -> Any:
    """The tiling expression of a register layout (Mosaic GPU), which Pallas takes but does not export."""
    from jax.experimental.mosaic.gpu import fragmented_array

    return fragmented_array.Tiling(tiles)


@functools.cache
def compute_capability() -> tuple[int, int] | None:
    """Compute capability of the default device, or None if it is no NVIDIA GPU."""
    device = jax.devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if device.platform != "gpu" or not major.isdecimal():  # AMD's are like "gfx942"
        return None
    return int(major), int(minor or 0)


def platform() -> str:
    """Platform of the default device, by the name that lowering takes: "cpu", "cuda", "rocm" or "tpu"."""
    name: str = jax.devices()[0].platform
    return name if name != "gpu" else ("rocm" if compute_capability() is None else "cuda")


@functools.cache
def sm_count() -> int:
    """Multiprocessors of the default device, or an H200's if it is no NVIDIA GPU (lowering for CUDA on a CPU)."""
    if compute_capability() is None:
        return _H200_SMS
    return int(getattr(jax.devices()[0], "core_count", _H200_SMS))


def max_finite(dtype: Any) -> float:
    """The largest finite number of a floating dtype: 448 for e4m3, 57344 for e5m2."""
    return float(jnp.finfo(dtype).max)


def is_fp8(dtype: Any) -> bool:
    """Whether a dtype is one of the two 8-bit floats that pages may hold."""
    return jnp.dtype(dtype) in (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
