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

MOST_REHEARSED = 1 << 30  # bytes of arguments that a rehearsal may allocate; the embedded pair's take 360 MB


class Program:
    """One step compiled for one set of shapes; call it with the step's positional arguments.

    JAX sees a function of flat arrays: arguments are flattened, and results unflattened, once a call. Each program has
    a `jax.jit` of its own, so that it can be dropped; JAX's caches of a shared function cannot.

    Args:
        compile: compiles a program if it is not compiled yet, and returns its executable.
        label: step and shapes, for logs.
        function: the step.
        donated: names of the positional arguments that it changes in place.
        arguments: positional arguments; only their shapes, dtypes and shardings matter.
        static: keyword arguments that are compiled in.
        compiler_options: options of XLA.

    Attributes:
        step: name of the step.
        arguments: the structure of each argument.
        leaves: shapes, dtypes and shardings of the arguments, flat.
        result: structure of what it returns; None before it was traced.
        options: of XLA.
        executable: the compiled program; None before it is compiled and after it was dropped.
        error: why it could not be compiled in the background; raised by the next call.
        used: when it was called last, as `time.monotonic` counts.
        has_run: whether its first run is over, or has at least begun.
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
        self.arguments = [jax.tree.structure(argument) for argument in arguments]
        self.leaves = [_shape_of(leaf) for leaf in jax.tree.leaves(tuple(arguments))]
        self._donated = _donated_leaves(function, donated, arguments)
        self.options = compiler_options
        self.result: Any = None
        self.executable: Callable[..., Any] | None = None
        self.error: Exception | None = None
        self.used = 0.0
        self.has_run = False

    @property
    def key(self) -> tuple:
        """What programs are equal by: those with the same key are compiled once."""
        return self._function, self._structure, tuple(self.leaves), tuple(self.static.items())

    def __call__(self, *arguments: Any) -> Any:
        """Run the program, after compiling it if it is not compiled; raises what compiling raises."""
        executable = self.executable or self._compile(self)
        self.used, self.has_run = time.monotonic(), True
        first, *others = arguments
        parameters = first.leaves if isinstance(first, FlatParams) else jax.tree.leaves(first)
        return self.result.unflatten(executable(*parameters, *jax.tree.leaves(others)))

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower it for its devices, which holds Python's lock."""
        return self.trace().lower()

    def trace(self) -> jax.stages.Traced:
        """Trace it."""

        def flat(*leaves: Any) -> list[Any]:
            results = self._function(*self._structure.unflatten(leaves), **self.static)
            self.result = jax.tree.structure(results)
            return jax.tree.leaves(results)

        flat.__name__ = self.step  # its name in profiles
        jitted = jax.jit(flat, donate_argnums=self._donated, compiler_options=self.options)
        return jitted.trace(*self.leaves)

    def rehearse(self, executable: Callable[..., Any]) -> None:
        """Run a new executable once over zeros, unless these would fill more than `MOST_REHEARSED`.

        XLA's CPU backend builds the graphs of YNNPACK in a program's first run: 80 to 130 ms with the embedded pair,
        whose rounds take 10 ms. No stream should wait for that. Programs over several devices are not rehearsed: two
        that run at the same time could deadlock.
        """
        is_spread = any(leaf.sharding is not None and leaf.sharding.num_devices > 1 for leaf in self.leaves)
        if not is_spread and sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves) <= MOST_REHEARSED:
            zeros = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding) for leaf in self.leaves]
            jax.block_until_ready(executable(*zeros))
            self.has_run = True


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an argument; arrays of the host have no sharding.

    Shardings are normalised, since steps return state with different specs for the same sharding.
    """
    place = getattr(leaf, "sharding", None)
    if isinstance(place, NamedSharding):
        axes = list(place.spec) if place.mesh.size > 1 else []
        while axes and axes[-1] is None:
            axes.pop()
        place = NamedSharding(place.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _donated_leaves(function: Callable[..., Any], donated: Sequence[str], arguments: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the donated arguments' leaves among the leaves of all arguments."""
    names = list(inspect.signature(function).parameters)[: len(arguments)]
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    spans = [range(end - count, end) for name, count, end in zip(names, counts, ends, strict=True) if name in donated]
    return tuple(place for span in spans for place in span)
