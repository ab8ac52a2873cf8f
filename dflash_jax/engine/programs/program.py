"""One step of an engine, compiled for one set of shapes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.engine.device.slots import FlatParams

MOST_REHEARSED = 1 << 30  # bytes of arguments; the embedded pair's take 360 MB, SmolLM2's pages alone 4 GB


class Program:
    """One step compiled for one set of shapes; call it with the step's positional arguments.

    JAX sees a function of flat arrays: what our classes hold is taken apart and put together here, once a call. Each
    program has a `jax.jit` of its own, which lets it be dropped; JAX's caches of a shared function do not.

    Args:
        compile: compiles a program, unless it is, and gives its executable.
        label: names it in logs: the step and its shapes.
        function: the step.
        donated: names of its positional arguments that it changes in place.
        arguments: positional; shapes, dtypes and places count, values do not.
        static: keyword arguments that are compiled in.
        compiler_options: XLA's.

    Attributes:
        step: name of the step.
        executable: what is compiled of it; None before, and once it was dropped.
        error: why it could not be compiled beside the engine; whoever calls it next is told.
        used: when it was called last, as `time.monotonic` counts.
    """

    def __init__(
        self,
        compile: Callable[[Program], Callable[..., Any]],
        label: str,
        function: Callable[..., Any],
        donated: Sequence[str],
        arguments: Sequence[Any],
        static: dict[str, Any],
        compiler_options: dict[str, Any],
    ):
        self.label, self.static, self._compile, self._function = label, static, compile, function
        self.step = function.__name__
        self._structure: Any = jax.tree.structure(tuple(arguments))
        self._leaves = [_shape_of(leaf) for leaf in jax.tree.leaves(tuple(arguments))]
        self._donated = _donated_leaves(function, donated, arguments)
        self._options = compiler_options
        self._result: Any = None  # structure of what it returns
        self.executable: Callable[..., Any] | None = None
        self.error: Exception | None = None
        self.used = 0.0

    @property
    def key(self) -> tuple:
        """What two programs have in common that are one."""
        return self._function, self._structure, tuple(self._leaves), tuple(self.static.items())

    def __call__(self, *arguments: Any) -> Any:
        """Run it, compiling it first if need be; raises what compiling raised."""
        executable = self.executable or self._compile(self)
        self.used = time.monotonic()
        first, *others = arguments
        parameters = first.leaves if isinstance(first, FlatParams) else jax.tree.leaves(first)
        return self._result.unflatten(executable(*parameters, *jax.tree.leaves(others)))

    def lower(self) -> jax.stages.Lowered:
        """Trace it, which is Python's work."""

        def flat(*leaves: Any) -> list[Any]:
            results = self._function(*self._structure.unflatten(leaves), **self.static)
            self._result = jax.tree.structure(results)
            return jax.tree.leaves(results)

        flat.__name__ = self.step  # by which profiles know it
        jitted = jax.jit(flat, donate_argnums=self._donated, compiler_options=self._options)
        return jitted.lower(*self._leaves)

    def rehearse(self, executable: Callable[..., Any]) -> None:
        """Run what was compiled of it over zeros, unless they are many.

        XLA's CPU backend builds the graphs of YNNPACK when a program runs first: 80 to 130 ms with the embedded pair,
        whose rounds take 10. A stream should not wait for that. Programs over several devices are left out: two that
        run at once may wait for each other for ever.
        """
        is_spread = any(leaf.sharding is not None and leaf.sharding.num_devices > 1 for leaf in self._leaves)
        if not is_spread and sum(leaf.size * leaf.dtype.itemsize for leaf in self._leaves) <= MOST_REHEARSED:
            zeros = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) for leaf in self._leaves]
            jax.block_until_ready(executable(*zeros))


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """What a program depends on of an argument: arrays that the host hands over may lie anywhere.

    Steps give state back with other words for the same place, which here are one.
    """
    place = getattr(leaf, "sharding", None)
    if isinstance(place, NamedSharding):
        axes = list(place.spec) if place.mesh.size > 1 else []
        while axes and axes[-1] is None:
            axes.pop()
        place = NamedSharding(place.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _donated_leaves(function: Callable[..., Any], donated: Sequence[str], arguments: Sequence[Any]) -> tuple[int, ...]:
    """Places of the donated arguments' arrays among all arrays."""
    names = list(inspect.signature(function).parameters)[: len(arguments)]
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    spans = [range(end - count, end) for name, count, end in zip(names, counts, ends, strict=True) if name in donated]
    return tuple(place for span in spans for place in span)
