"""Which implementation of an operation serves a call, and why faster ones do not.

Each operation lists its implementations once, the fastest first and the one that serves every call on every device
last. `Operation.choose` asks them in that order: whether they run on the device, whether measurements favour them for
the call, and whether they can do it. Modules of implementations are imported when they are asked for the first time, so
a CPU never imports Triton or Mosaic. All of this happens while a program is traced, and costs nothing when it runs.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pallas_kernels import _compat

logger = logging.getLogger("pallas_kernels")

Cause = Literal["device", "slower", "refusal"]
REFERENCE = "reference"  # the name of an operation's implementation in plain jnp


class Device(NamedTuple):
    """A kind of device.

    Attributes:
        platform: as `jax.jit(...).lower(lowering_platforms=...)` names it: "cpu", "cuda", "rocm" or "tpu".
        generation: compute capability of an NVIDIA GPU, such as (9, 0); None on other platforms.
    """

    platform: str
    generation: tuple[int, int] | None = None

    @staticmethod
    def default() -> Device:
        """JAX's default device."""
        generation = _compat.compute_capability()
        return Device(_compat.platform()) if generation is None else Device("cuda", generation)

    def __str__(self) -> str:
        if self.generation is None:
            return self.platform
        return f"an NVIDIA GPU of compute capability {_dotted(self.generation)}"


@dataclass(frozen=True)
class Capability:
    """The devices that an implementation runs on: one platform, and a range of its generations.

    Attributes:
        platform: as in `Device`.
        first: the first generation; None is any.
        end: the generation behind the last; None is no end.
    """

    platform: str
    first: tuple[int, int] | None = None
    end: tuple[int, int] | None = None

    def refusal(self, device: Device) -> str | None:
        """One sentence on why a device is outside the range, or None."""
        is_inside = device.platform == self.platform
        if is_inside and self.first is not None:
            is_inside = device.generation is not None and device.generation >= self.first
        if is_inside and self.end is not None:
            is_inside = device.generation is not None and device.generation < self.end
        return None if is_inside else f"It runs on {self}; this is {device}."

    def __str__(self) -> str:
        if self.first is None:
            return self.platform
        generations = f"from {_dotted(self.first)}" + (f" to below {_dotted(self.end)}" if self.end else "")
        return f"NVIDIA GPUs of compute capability {generations}"


AMPERE_ON = Capability("cuda", (8, 0))  # the first GPUs with bfloat16
FP8_GPUS = Capability("cuda", (8, 9))  # the first GPUs whose Triton kernels can convert to and from fp8
HOPPER = Capability("cuda", (9, 0), (10, 0))  # TMA and wgmma; Blackwell has no wgmma
HOPPER_ON = Capability("cuda", (9, 0))


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation; functions are named, and imported when they are needed.

    Attributes:
        name: what the `implementation` argument of the operation calls it.
        function: "module:function" that does the call.
        runs_on: its devices; None is every device.
        slower: name of a function of the module that is given the call and says in a sentence why another
            implementation is the faster one, or None. It is asked before `refusal`, so it must take any call.
        refusal: name of a function of the module that is given the call and says in a sentence why this implementation
            cannot do it, or None.
        interprets: whether the function takes `interpret`, to run in Pallas' interpreter on any device.
    """

    name: str
    function: str
    runs_on: Capability | None = None
    slower: str | None = None
    refusal: str | None = None
    interprets: bool = False

    def load(self, name: str | None = None) -> Callable[..., Any]:
        """The function that does the call, or the function of that name beside it."""
        module, _, function = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), name or function)
        return loaded

    def objection(self, call: Sequence[Any], device: Device | None) -> Objection | None:
        """Why this implementation should not serve a call on a device, or None; without a device it is interpreted."""
        if device is not None and self.runs_on is not None and (sentence := self.runs_on.refusal(device)):
            return Objection(self.name, "device", sentence)
        if self.slower is not None and (sentence := self.load(self.slower)(*call)):
            return Objection(self.name, "slower", sentence)
        if self.refusal is not None and (sentence := self.load(self.refusal)(*call)):
            return Objection(self.name, "refusal", sentence)
        return None


class Objection(NamedTuple):
    """Why an implementation does not serve a call.

    Attributes:
        name: of the implementation.
        cause: "device" and "refusal" say that it cannot; "slower" that another was measured faster.
        sentence: the reason.
    """

    name: str
    cause: Cause
    sentence: str


class Choice(NamedTuple):
    """The implementation that serves a call, and why those that are asked before it do not."""

    implementation: Implementation
    objections: tuple[Objection, ...]

    @property
    def name(self) -> str:
        return self.implementation.name


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations, the fastest first; the last serves every call on every device.

    What an operation calls a "call" are the arguments on which its choice depends: arrays or `jax.ShapeDtypeStruct`s.
    """

    name: str
    implementations: tuple[Implementation, ...]

    def choose(self, call: Sequence[Any], device: Device, *, interpret: bool = False) -> Choice:
        """The implementation that serves a call.

        Args:
            call: as this operation defines it.
            device: that runs it.
            interpret: choose among the implementations that can be interpreted, whatever the device.
        """
        *others, last = [one for one in self.implementations if one.interprets or not interpret]
        objections: list[Objection] = []
        for implementation in others:
            objection = implementation.objection(call, None if interpret else device)
            if objection is None:
                return Choice(implementation, tuple(objections))
            objections.append(objection)
        return Choice(last, tuple(objections))

    def named(self, name: str) -> Implementation:
        """The implementation of that name.

        Raises:
            ValueError: there is none.
        """
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        names = ", ".join(repr(implementation.name) for implementation in self.implementations)
        raise ValueError(f"implementation must be {names} or None; got {name!r}")

    def pick(self, name: str | None, call: Sequence[Any], *, interpret: bool = False) -> Implementation:
        """The implementation of that name, or for None the one that serves the call on the default device.

        What faster implementations object is logged, each sentence once: as a warning where an accelerator is left with
        the reference, else as information. A CPU has no faster ones, and a measured choice needs no log.

        Raises:
            ValueError: there is no implementation of that name.
        """
        if name is not None:
            return self.named(name)
        device = Device.default()
        choice = self.choose(call, device, interpret=interpret)
        if device.platform != "cpu" and not interpret:
            level = logging.WARNING if choice.name == REFERENCE else logging.INFO
            for objection in choice.objections:
                if objection.cause != "slower":
                    _log_once(level, f"{self.name}: {choice.name!r} replaces {objection.name!r}. {objection.sentence}")
        return choice.implementation

    def function(self, name: str | None, call: Sequence[Any], *, interpret: bool = False) -> Callable[..., Any]:
        """The function of the implementation that `pick` gives, told to interpret where it can be."""
        implementation = self.pick(name, call, interpret=interpret)
        function = implementation.load()
        return functools.partial(function, interpret=interpret) if implementation.interprets else function


@functools.lru_cache(maxsize=4096)
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)


class Call(NamedTuple):
    """A call to explain: its operation, a label for people, and the call as the operation defines it."""

    operation: Operation
    label: str
    arguments: tuple[Any, ...]


class Explanation(NamedTuple):
    """What serves a call, and a sentence for each other implementation on why it does not."""

    call: Call
    chosen: str
    others: dict[str, str]


def explain(platform: str, generation: tuple[int, int] | None, calls: Iterable[Call]) -> list[Explanation]:
    """Say for each call which implementation serves it on a device, and why the others do not.

    The device need not be there. Thresholds that depend on the number of multiprocessors take that of the default
    device, or an H200's 132 where that is no NVIDIA GPU.

    Args:
        platform: as in `Device`.
        generation: likewise.
        calls: to explain.
    """
    device = Device(platform, generation)
    return [_explained(call, device) for call in calls]


def _explained(call: Call, device: Device) -> Explanation:
    chosen = call.operation.choose(call.arguments, device).name
    others = {}
    for implementation in call.operation.implementations:
        if implementation.name != chosen:
            objection = implementation.objection(call.arguments, device)
            others[implementation.name] = f"{chosen!r} is preferred." if objection is None else objection.sentence
    return Explanation(call, chosen, others)


def _dotted(generation: tuple[int, int]) -> str:
    return ".".join(map(str, generation))
