"""How far compiling is, for who waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

LOG_SECONDS = 10.0
logger = logging.getLogger("dflash_jax")


@contextmanager
def compiling(total: int) -> Iterator[Callable[[], None]]:
    """Show how many of so many programs are compiled; what comes of it is to be called for each."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Compiling", total=total)
        done, last = 0, time.monotonic()

        def advance() -> None:
            nonlocal done, last
            done += 1
            bar.advance(task)
            if not console.is_terminal and time.monotonic() - last > LOG_SECONDS:
                last = time.monotonic()
                logger.info("compiled %d of %d programs", done, total)

        yield advance
