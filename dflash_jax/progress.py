"""Progress of a command on standard error: the current phase, how much of it is done, and how long it has run.

On a terminal one line is redrawn in place; elsewhere, as in a log, new lines are written. Standard output is for
results. This module does not import JAX, so that a command can show that it has started before it imports JAX.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

STARTED = time.monotonic()  # about when the process began
DRAWS_PER_SECOND = 2  # on a terminal; drawing slows down what is measured
TOLD_EVERY, TOLD_AT_LEAST_EVERY = 10.0, 60.0  # seconds between two lines of a phase in a log, growing with its age
BAR_WIDTH = 20  # characters
Part = TypeVar("Part")
Begin = Callable[[str, int], AbstractContextManager["Phase"]]  # begins a phase of so many parts


@dataclass(eq=False)
class Phase:
    """One phase of a command, whose parts may be counted. Counting is cheap: another thread draws.

    Attributes:
        display: where it is shown.
        description: what the command does.
        total: number of parts; None if unknown.
        first: parts that were done before it began.
        done: parts that are done, `first` included.
        tokens: tokens so far, of which the speed is shown.
        note: text to show as well.
        began: `time.monotonic` when it began.
    """

    display: Display
    description: str
    total: int | None
    first: int
    done: int = field(init=False)
    tokens: int = 0
    note: str = ""
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.done = self.first

    def advance(self, parts: int = 1, tokens: int = 0) -> None:
        """Count finished parts, and tokens."""
        self.done += parts
        self.tokens += tokens

    def over(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Iterate over parts; each is done when the next is asked for."""
        for part in parts:
            yield part
            self.advance()

    def within(self, description: str, total: int | None = None) -> AbstractContextManager[Phase]:
        """Begin a phase that is shown in place of this one until it ends."""
        return self.display.phase(description, total)

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self.display.write(text)

    def tqdm(self, **_options: Any) -> Counter:
        """Stand in for `tqdm.tqdm` in `LLM.generate(use_tqdm=...)`: each finished prompt is a part."""
        return Counter(self)

    @property
    def seconds(self) -> float:
        """Seconds that it has run."""
        return time.monotonic() - self.began

    @property
    def is_counted(self) -> bool:
        """Whether its parts are counted."""
        return self.total is not None or self.done > 0

    def sentence(self, *, is_over: bool = False) -> str:
        """What the command does, how much is done, how fast, and the time left or taken."""
        facts = []
        if self.is_counted:
            facts.append(f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}")
        if self.tokens:
            facts.append(f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s")
        if self.note:
            facts.append(self.note)
        if is_over:
            facts.append(f"in {_clock(self.seconds)}")
        elif self.total is not None and self.first < self.done < self.total:
            facts.append(f"{_clock(self.seconds * (self.total - self.done) / (self.done - self.first))} left")
        return f"{self.description}: {', '.join(facts)}" if facts else self.description


@dataclass(frozen=True)
class Counter:
    """The part of tqdm's interface that `LLM.generate` uses."""

    phase: Phase

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def update(self, prompts: int = 1) -> None:
        """Count finished prompts."""
        self.phase.advance(prompts)


class Display:
    """Shows the innermost current phase. This base class shows nothing: it serves processes without standard error."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    @contextmanager
    def phase(self, description: str, total: int | None = None, first: int = 0) -> Iterator[Phase]:
        """Begin a phase that ends with the context."""
        now = Phase(self, description, total, first)
        self.phases.append(now)
        self.began()
        try:
            yield now
        finally:
            if now.is_counted:  # leave a line with the final count and speed
                self.write(now.sentence(is_over=True))
            self.phases.pop()
            self.ended()

    def began(self) -> None:
        """Show a phase that has just begun."""

    def ended(self) -> None:
        """Show the display after a phase has ended."""

    def write(self, text: str) -> None:
        """Write a line that stays."""


class Lines(Display):
    """Writes a line when a phase begins and every few seconds until it ends, each with the age of the process."""

    def __init__(self, stream: TextIO):
        super().__init__()
        self._stream, self._over = stream, threading.Event()
        self._thread = threading.Thread(target=self._show_again, daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def began(self) -> None:
        """Write a line of the innermost phase."""
        for now in self.phases[-1:]:  # there may be none: another thread may have ended the phase
            self.write(now.sentence())

    def write(self, text: str) -> None:
        """Write a line; ignore errors, since the reader may be gone."""
        with suppress(OSError, ValueError):
            print(f"[{_clock(time.monotonic() - STARTED)}] {text}", file=self._stream, flush=True)

    def _show_again(self) -> None:
        began = time.monotonic()
        while not self._over.wait(max(TOLD_EVERY, min((time.monotonic() - began) / 20, TOLD_AT_LEAST_EVERY))):
            self.began()


class Terminal(Display):
    """Redraws one line in place."""

    def __init__(self, console: Console):
        super().__init__()
        self._live = Live(
            console=console,
            get_renderable=self._line,
            refresh_per_second=DRAWS_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # redirected output would go to standard error
        )
        self._spinner = Spinner("dots")

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def began(self) -> None:
        """Draw the line."""
        self._live.refresh()

    ended = began

    def write(self, text: str) -> None:
        """Write a line above the one that is drawn."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        for now in self.phases[-1:]:
            mark = self._spinner if now.total is None else ProgressBar(max(now.total, 1), now.done, BAR_WIDTH)
            line.add_row(mark, Text(f"{_clock(now.seconds)} {now.sentence()}"))
        return line


@contextmanager
def phase(description: str, total: int | None = None, *, first: int = 0) -> Iterator[Phase]:
    """Show a phase on standard error until the context ends.

    Only one phase may be shown at a time; `Phase.within` has others inside it.

    Args:
        description: what it does.
        total: number of parts; None if unknown.
        first: parts that are done already.
    """
    with _display() as display, display.phase(description, total, first) as now:
        yield now


def announce(text: str) -> None:
    """Write one line, for work that shows its own progress."""
    _display().write(text)


@contextmanager
def importing(arguments: Sequence[str] | None) -> Iterator[None]:
    """A phase for the imports of a command, which take seconds; none where help is asked for.

    Args:
        arguments: arguments of the command line; None takes those of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if any(word == "-h" or (len(word) > 2 and "--help".startswith(word)) for word in words):
        yield
        return
    with phase("importing modules"):
        yield


def _display() -> Display:
    """The display that suits standard error."""
    stream: TextIO | None = sys.stderr
    if stream is None:  # the process began without one
        return Display()
    console = Console(file=stream)
    is_drawn_on = stream.isatty() and console.is_terminal and not console.is_dumb_terminal
    return Terminal(console) if is_drawn_on else Lines(stream)


def _clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(timedelta(seconds=int(seconds)))
