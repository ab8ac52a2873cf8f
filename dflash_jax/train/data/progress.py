"""A progress bar on standard error with tokens/s."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

DRAWN_EVERY = 0.5  # seconds: drawing takes time from the engine's host loop

Advance = Callable[[int, int], None]  # told how many requests have ended, and how many tokens have come


@contextmanager
def progress(description: str, total: int) -> Iterator[Advance]:
    """Shows how many requests of a total have ended; gives what to call when there is more to tell."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2, redirect_stdout=False) as bar:
        task = bar.add_task(description, total=total, rate=0.0)
        ended = tokens = 0
        started = drawn = time.perf_counter()

        def advance(more_ended: int, more_tokens: int) -> None:
            nonlocal ended, tokens, drawn
            ended, tokens, now = ended + more_ended, tokens + more_tokens, time.perf_counter()
            if now - drawn > DRAWN_EVERY or ended == total:
                bar.update(task, completed=ended, rate=tokens / (now - started))
                drawn = now

        yield advance
