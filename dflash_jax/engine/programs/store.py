"""The compiled programs of a process: compiled when they are needed or before, dropped when memory maps run short.

A program is compiled from the shapes of its arguments alone, so any thread can compile it while an engine runs others.
Where programs are saved, one that another process has compiled is loaded.
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
from dflash_jax.engine.programs.saved import SavedPrograms
from dflash_jax.parallel.platform import folder_of_programs

COMPILED = "/jax/core/compile/backend_compile_duration"  # event of jax.monitoring, one for each program
MAPS_OF_ONE = 1024  # memory maps that compiling one program may take; the embedded pair's take up to 600
AT_ONCE = 8  # programs that are compiled at a time where maps are few
# XLA compiles a program for CPUs in two threads. On two cores all 41 programs of the embedded pair took 81 s one at
# a time, 91 s two at a time, and a third more of the cores' time.
CORES_OF_ONE = 2
DROPPED_AT_ONCE = 8  # programs, before the maps are counted again
WORKERS = 2  # threads that compile beside an engine
NICENESS = 19  # of these threads: running streams come first
SWITCH_SECONDS = 0.0005  # Python's switch interval while a thread lowers; the default is ten times as long
KEPT = 8  # programs that are never dropped: a round and a prefill need theirs at the same time
HIGHEST_SHARE = 0.9  # of the limit of maps; above it XLA may be refused a map, and aborts

logger = logging.getLogger(__name__)


class MapLimit:
    """How many memory maps Linux lets a process have. XLA aborts the process when it is refused one.

    Args:
        most: the limit; None reads the system's.
    """

    def __init__(self, most: int | None = None):
        self.most = most or int(Path("/proc/sys/vm/max_map_count").read_text())

    def count(self) -> int:
        """Memory maps of this process; takes 0.3 ms for each thousand."""
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)


class Programs:
    """The programs of a process, found by `Program.key`.

    Args:
        limit: of memory maps; programs may take half of them. None where programs take none.
        rehearses: whether programs that are compiled while sequences run are run once before they count as ready.
        saved: files of programs, which are asked before a program is compiled; None for none.

    Attributes:
        num_dropped: programs that were dropped for the room that they took.
        has_streams: whether sequences run; compiling then leaves a core to them.
    """

    def __init__(self, limit: MapLimit | None = None, *, rehearses: bool = False, saved: SavedPrograms | None = None):
        self._limit, self._rehearses, self._saved = limit, rehearses, saved
        self._programs: dict[tuple, Program] = {}
        self._changed = threading.Condition()  # guards every attribute below
        self._queue: dict[Program, bool] = {}  # whether each is urgent, in the order of requests
        self._compiling: set[Program] = set()
        self._num_working = 0
        self._lowering = threading.Lock()  # lowering holds Python's lock: threads would only slow each other down
        self._workers: ThreadPoolExecutor | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._at_once = os.cpu_count() or 1
        if limit is not None:
            self._at_once = max(1, min(self._at_once // CORES_OF_ONE, AT_ONCE))
        self.num_dropped = 0
        self.has_streams = False

    def find(self, program: Program) -> Program:
        """The stored program with the same key, which may be compiled already; else store and return this one."""
        with self._changed:
            return self._programs.setdefault(program.key, program)

    @property
    def is_compiling(self) -> bool:
        """Whether any program is being compiled or waits to be."""
        return bool(self._queue or self._compiling)

    @property
    def num_compiled(self) -> int:
        """How many programs are compiled now."""
        with self._changed:
            return sum(program.executable is not None for program in self._programs.values())

    def request(self, programs: Sequence[Program], *, is_urgent: bool) -> None:
        """Compile programs in the background, unless they are compiled; urgent ones come before all others."""
        with self._changed:
            for program in programs:
                if program.executable is None and program not in self._compiling:
                    self._queue[program] = self._queue.get(program, False) or is_urgent
            for _ in range(min(len(self._queue), self._most_working() - self._num_working)):
                self._submit()

    def wait(self, timeout: float) -> None:
        """Wait until another program is compiled or has failed, or for so many seconds."""
        with self._changed:
            self._changed.wait(timeout)

    def join(self) -> None:
        """Wait until nothing is left to compile."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_compiling)

    def compile(self, program: Program) -> Callable[..., Any]:
        """The executable of a program; compiles it, or waits if another thread is compiling it.

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

    def compile_all(self, programs: Sequence[Program], advance: Callable[[], None]) -> int:
        """Compile several programs at a time, or load them; call `advance` after each, and return how many were loaded.

        Programs are lowered in the calling thread, since lowering holds Python's lock.
        """
        with self._changed:
            missing = [p for p in programs if p.executable is None and p not in self._compiling]
            self._compiling |= set(missing)
            for program in missing:
                self._queue.pop(program, None)
        for _ in range(len(programs) - len(missing)):
            advance()

        def load(program: Program) -> bool:
            self._make_room()
            executable = self._load(program)
            if executable is not None:
                self._publish(program, executable)
                self._unclaim(program)
                advance()
            return executable is not None

        def build(program: Program, lowered: jax.stages.Lowered) -> None:
            self._build(program, lowered)
            advance()

        jobs, are_loaded = [], list[bool]()
        try:
            with ThreadPoolExecutor(self._at_once) as pool:
                are_loaded += pool.map(load, missing)
                others = [p for p, is_loaded in zip(missing, are_loaded, strict=True) if not is_loaded]
                jobs += [pool.submit(build, program, program.lower()) for program in others]
        finally:
            with self._changed:
                self._compiling -= set(missing)
                self._changed.notify_all()
        for job in jobs:
            job.result()
        return sum(are_loaded)

    def clear(self) -> None:
        """Drop all programs; engines that still use one compile it again."""
        with self._changed:
            self._queue.clear()
            for program in self._programs.values():
                program.executable = None
            self._programs.clear()

    def _most_working(self) -> int:
        return 1 if self.has_streams else min(WORKERS, self._at_once)

    def _submit(self) -> None:
        """Have a worker compile the next program; with one job a program, the process's exit waits for few."""
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
            with suppress(Exception):  # kept in `program.error` for its next caller
                self._build(program, is_awaited=False)
        with self._changed:
            self._num_working -= 1
            if self._queue and self._num_working < self._most_working():
                self._submit()
            self._changed.notify_all()

    def _build(
        self, program: Program, lowered: jax.stages.Lowered | None = None, *, is_awaited: bool = True
    ) -> Callable[..., Any]:
        """Compile a program that this thread has claimed; if no caller waits, keep an error for the next one."""
        began, is_one_of_many = time.perf_counter(), lowered is not None
        try:
            self._make_room()
            executable = None if is_one_of_many else self._load(program)
            is_loaded = executable is not None
            if executable is None:
                if lowered is None:
                    with self._lowering, eager_switches():
                        lowered = program.lower()
                # Threads of low priority must not hold Python's lock, or all others would wait: they only run XLA.
                compilers = None if is_awaited else self._compilers
                executable = lowered.compile() if compilers is None else compiled_by(compilers, lowered)
                if self._saved is not None:
                    self._saved.save(program, executable)
            if self._rehearses and self.has_streams and not is_awaited:
                program.rehearse(executable)
            self._publish(program, executable)
        except Exception as error:
            if not is_awaited and not isinstance(error, InterpreterEndsError):
                logger.warning("%s could not be compiled: %s", program.label, error)
                program.error = error
            raise
        finally:
            self._unclaim(program)
        level = logging.DEBUG if is_one_of_many else logging.INFO
        seconds, memory = time.perf_counter() - began, executable.memory_analysis()
        taken = "" if memory is None else f"; its temporaries take {memory.temp_size_in_bytes / 2**20:.0f} MiB"
        logger.log(level, "%s %s in %.1f s%s", "loaded" if is_loaded else "compiled", program.label, seconds, taken)
        return executable

    def _load(self, program: Program) -> Any:
        """The executable that another process has saved; None without one."""
        return None if self._saved is None else self._saved.load(program)

    def _publish(self, program: Program, executable: Callable[..., Any]) -> None:
        """Let calls run a program."""
        program.executable, program.used = executable, time.monotonic()

    def _unclaim(self, program: Program) -> None:
        """Say that no thread compiles a program any more."""
        with self._changed:
            self._programs.setdefault(program.key, program)
            self._compiling.discard(program)
            self._changed.notify_all()

    def _make_room(self) -> None:
        """Drop programs until there is room for those being compiled."""
        if self._limit is None:
            return
        room, most = MAPS_OF_ONE * self._at_once, HIGHEST_SHARE * self._limit.most
        count = self._limit.count()
        while count + room > self._limit.most // 2 and self._drop():
            count = self._limit.count()
        if count + room > most:
            jax.clear_caches()  # drops programs that were compiled outside this store
            count = self._limit.count()
        if count + room > most:
            raise ProgramLimitError(
                f"this process has {count} of the {self._limit.most} memory maps that it may have, and compiling takes "
                f"up to {room}; raise the limit (sysctl vm.max_map_count), or run fewer models in a process."
            )

    def _drop(self) -> bool:
        """Drop some of the programs that were not used for longest; return whether there were any."""
        with self._changed:
            compiled = sorted((p for p in self._programs.values() if p.executable is not None), key=lambda p: p.used)
            dropped = compiled[: max(0, min(DROPPED_AT_ONCE, len(compiled) - KEPT))]
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


class InterpreterEndsError(Exception):
    """Nothing is compiled any more."""


def compiled_by(compilers: ThreadPoolExecutor, lowered: jax.stages.Lowered) -> Any:
    """The executable of a program that other threads compile."""
    try:
        job = compilers.submit(lowered.compile)
    except RuntimeError as error:
        raise InterpreterEndsError from error
    return job.result()


@contextmanager
def eager_switches() -> Iterator[None]:
    """Let Python switch threads sooner: the engine's thread waits for Python's lock some forty times a round."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def yield_cores() -> None:
    """Lower the priority of this thread, where the system has priorities of threads."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class CompileCounter:
    """Counts the programs that JAX compiles in this process from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_attributes: str | int) -> None:
        if event == COMPILED:
            self.count += 1


@cache
def compile_counter() -> CompileCounter:
    """The one counter of this process: JAX's listeners are process-wide."""
    return CompileCounter()


@cache
def programs() -> Programs:
    """The store of this process: memory maps belong to the process, and engines of the same shapes share programs."""
    on_cpu, folder = jax.default_backend() == "cpu", folder_of_programs()
    limit = MapLimit() if on_cpu and Path("/proc/self/maps").exists() else None
    return Programs(limit, rehearses=on_cpu, saved=SavedPrograms(folder) if folder else None)
