"""The compiled programs of a process: compiled when they are needed or before, dropped when memory maps run short.

A program is compiled from the shapes of its arguments alone, so that any thread may do it while an engine runs others.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax

from dflash_jax.base.errors import ProgramLimitError
from dflash_jax.engine.programs.program import Program

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax.monitoring's event, one a program
MAPS_OF_ONE = 1024  # memory maps that compiling one program may take; the embedded pair's take up to 600
AT_ONCE = 8  # programs that are compiled at a time where maps are few
DROPPED_AT_ONCE = 8  # programs, before the maps are counted again
WORKERS = 2  # threads that compile beside an engine
NICENESS = 19  # of these: what streams comes before what is to come
SWITCH_SECONDS = 0.0005  # between two threads while one of them lowers; Python's default is ten times as long
KEPT = 8  # programs that are never dropped: those of a round and of a prefill must be there together
HIGHEST_SHARE = 0.9  # of the limit: above it, XLA may be refused a map and abort

logger = logging.getLogger(__name__)


class MapLimit:
    """The memory maps that Linux lets a process have: XLA aborts when it is refused one.

    Args:
        most: None reads the system's limit.
    """

    def __init__(self, most: int | None = None):
        self.most = most or int(Path("/proc/sys/vm/max_map_count").read_text())

    def count(self) -> int:
        """Maps that this process has; 0.3 ms for each thousand."""
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)


class Programs:
    """The programs of a process, found by what they are compiled for.

    Args:
        limit: of memory maps, of which programs take half at most; None where programs take none.
        rehearses: whether programs that are compiled beside streams are run once before they are ready.
    """

    def __init__(self, limit: MapLimit | None = None, *, rehearses: bool = False):
        self._limit, self._rehearses = limit, rehearses
        self._programs: dict[tuple, Program] = {}
        self._changed = threading.Condition()  # guards all that follows
        self._queue: dict[Program, bool] = {}  # whether each is urgent, in the order of requests
        self._compiling: set[Program] = set()
        self._num_working = 0
        self._lowering = threading.Lock()  # lowering is Python's work, of which threads do one at a time anyway
        self._workers: ThreadPoolExecutor | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._at_once = os.cpu_count() or 1
        if limit is not None:
            self._at_once = min(self._at_once, AT_ONCE)
        self.num_dropped = 0
        self.has_streams = False  # whether an engine computes meanwhile, which then has a core of its own

    def find(self, program: Program) -> Program:
        """The program that is held of this key, which may be compiled already; without one, hold this one."""
        with self._changed:
            return self._programs.setdefault(program.key, program)

    @property
    def is_compiling(self) -> bool:
        """Whether anything is being compiled or waits for it."""
        return bool(self._queue or self._compiling)

    @property
    def num_compiled(self) -> int:
        """Programs that are held."""
        with self._changed:
            return sum(program.executable is not None for program in self._programs.values())

    def request(self, programs: Sequence[Program], *, is_urgent: bool) -> None:
        """Compile some beside the calling thread, unless they are compiled; urgent ones come before all others."""
        with self._changed:
            for program in programs:
                if program.executable is None and program not in self._compiling:
                    self._queue[program] = self._queue.get(program, False) or is_urgent
            for _ in range(min(len(self._queue), self._most_working() - self._num_working)):
                self._submit()

    def wait(self, timeout: float) -> None:
        """Until another is compiled or has failed, or so many seconds have passed."""
        with self._changed:
            self._changed.wait(timeout)

    def join(self) -> None:
        """Until nothing is left to compile."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_compiling)

    def compile(self, program: Program) -> Callable[..., Any]:
        """The executable of a program: compiled now, or awaited where another thread compiles it.

        Raises:
            ProgramLimitError: there is no room for its memory maps.
            Exception: whatever the compiler raises; the next call tries again.
        """
        with self._changed:
            if program in self._compiling:
                self._changed.wait_for(lambda: program not in self._compiling)
            if program.executable is None and program.error is None:
                self._queue.pop(program, None)
                self._compiling.add(program)
            error, program.error = program.error, None
            executable = program.executable
        if error is not None:
            raise error
        return executable or self._build(program)

    def compile_all(self, programs: Sequence[Program], advance: Callable[[], None]) -> None:
        """Compile several at a time, and say each time that one is done.

        Programs are lowered in the calling thread, since lowering is Python's, where threads wait for each other.
        """
        with self._changed:
            missing = [p for p in programs if p.executable is None and p not in self._compiling]
            self._compiling |= set(missing)
            for program in missing:
                self._queue.pop(program, None)
        for _ in range(len(programs) - len(missing)):
            advance()

        def build(program: Program, lowered: jax.stages.Lowered) -> None:
            self._build(program, lowered)
            advance()

        jobs = []
        try:
            with ThreadPoolExecutor(self._at_once) as pool:
                jobs += [pool.submit(build, program, program.lower()) for program in missing]
        finally:
            with self._changed:
                self._compiling -= set(missing)
                self._changed.notify_all()
        for job in jobs:
            job.result()

    def clear(self) -> None:
        """Forget all programs; engines that still use one compile it again."""
        with self._changed:
            self._queue.clear()
            for program in self._programs.values():
                program.executable = None
            self._programs.clear()

    def _most_working(self) -> int:
        return 1 if self.has_streams else WORKERS

    def _submit(self) -> None:
        """Have a worker compile the next program: one job each, so that the end of the process waits for few alone."""
        self._workers = self._workers or ThreadPoolExecutor(WORKERS, "dflash-programs")
        self._compilers = self._compilers or ThreadPoolExecutor(WORKERS, "dflash-compiler", initializer=yield_cores)
        with suppress(RuntimeError):  # the interpreter is ending
            self._workers.submit(self._work)
            self._num_working += 1

    def _work(self) -> None:
        with self._changed:
            program = max(self._queue, key=self._queue.__getitem__, default=None)  # the first of the urgent ones
            if program is not None:
                del self._queue[program]
                self._compiling.add(program)
        if program is not None:
            with suppress(Exception):  # it waits for who needs the program
                self._build(program, is_awaited=False)
        with self._changed:
            self._num_working -= 1
            if self._queue and self._num_working < self._most_working():
                self._submit()
            self._changed.notify_all()

    def _build(
        self, program: Program, lowered: jax.stages.Lowered | None = None, *, is_awaited: bool = True
    ) -> Callable[..., Any]:
        """Compile a program that nobody else compiles; an error is kept for later if nobody waits for it now."""
        began, is_one_of_many = time.perf_counter(), lowered is not None
        try:
            self._make_room()
            if lowered is None:
                with self._lowering, eager_switches():
                    lowered = program.lower()
            # What holds Python's lock must not be of low priority: all threads would wait for it. XLA's work may be.
            compilers = None if is_awaited else self._compilers
            executable = lowered.compile() if compilers is None else compilers.submit(lowered.compile).result()
            if self._rehearses and self.has_streams and not is_awaited:
                program.rehearse(executable)
            program.executable, program.used = executable, time.monotonic()
        except Exception as error:
            if not is_awaited:
                logger.warning("%s could not be compiled: %s", program.label, error)
                program.error = error
            raise
        finally:
            with self._changed:
                self._programs.setdefault(program.key, program)
                self._compiling.discard(program)
                self._changed.notify_all()
        level = logging.DEBUG if is_one_of_many else logging.INFO
        logger.log(level, "compiled %s in %.1f s", program.label, time.perf_counter() - began)
        return executable

    def _make_room(self) -> None:
        """Drop programs until there is room for those being compiled."""
        if self._limit is None:
            return
        room, most = MAPS_OF_ONE * self._at_once, HIGHEST_SHARE * self._limit.most
        count = self._limit.count()
        while count + room > self._limit.most // 2 and self._drop():
            count = self._limit.count()
        if count + room > most:
            jax.clear_caches()  # programs that are not ours
            count = self._limit.count()
        if count + room > most:
            raise ProgramLimitError(
                f"this process has {count} of the {self._limit.most} memory maps that it may have, and compiling takes "
                f"up to {room}; raise the limit (sysctl vm.max_map_count), or run fewer models in a process."
            )

    def _drop(self) -> bool:
        """Drop some of the programs that were not used for longest; whether there were any."""
        with self._changed:
            held = sorted((p for p in self._programs.values() if p.executable is not None), key=lambda p: p.used)
            dropped = held[: max(0, min(DROPPED_AT_ONCE, len(held) - KEPT))]
            for program in dropped:
                program.executable = None
            is_first = not self.num_dropped
            self.num_dropped += len(dropped)
        if dropped and is_first:
            logger.warning(
                "compiled programs take half of the memory maps that a process may have: those unused for longest are "
                "dropped, and compiled again when they are needed (sysctl vm.max_map_count raises the limit)"
            )
        return bool(dropped)


@contextmanager
def eager_switches() -> Iterator[None]:
    """Have Python hand over to other threads sooner: an engine's waits for its turn some forty times a round."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def yield_cores() -> None:
    """Let threads that are not compiling have the cores first, where the system knows priorities of threads."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class CompileCounter:
    """How many programs JAX has compiled in this process since it was first asked."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_attributes: str | int) -> None:
        self.count += event == COMPILED


@cache
def compile_counter() -> CompileCounter:
    """The counter of this process; JAX tells everybody of everything."""
    return CompileCounter()


@cache
def programs() -> Programs:
    """Those of this process: memory maps are the process's, and engines of the same shapes share what is compiled."""
    on_cpu = jax.default_backend() == "cpu"
    return Programs(MapLimit() if on_cpu and Path("/proc/self/maps").exists() else None, rehearses=on_cpu)
