"""What a run says while it goes on: a progress bar, lines of JSON and TensorBoard events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from dflash_jax.train.objective import Measured


class Logs:
    """Logs of a run in `folder`: `log.jsonl`, a line a time, and events for TensorBoard.

    A run that goes on writes behind what stands there.
    """

    def __init__(self, folder: Path, *, first: int, total: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "log.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), purge_step=first)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self._task = self._bar.add_task("training", total=total, completed=first, said="")
        self._began, self._tokens, self._said = time.perf_counter(), 0, ""

    def __enter__(self) -> Logs:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._lines.close()
        self._events.close()

    def advance(self, step: int, tokens: int) -> None:
        """A step was enqueued with so many tokens."""
        self._tokens += tokens
        self._bar.update(self._task, completed=step)

    def train(self, step: int, measured: Measured, learning_rate: float) -> None:
        """What the batch of a step said; waits for it."""
        seconds = time.perf_counter() - self._began
        accuracy = np.asarray(measured.accuracy)
        values = {
            "loss": float(measured.loss),
            "acceptance_length": float(measured.acceptance_length),
            "learning_rate": learning_rate,
            "tokens_per_second": self._tokens / seconds,
        }
        seen = {f"accuracy/{k}": float(share) for k, share in enumerate(accuracy, start=1)}
        self._write("train", step, values | seen)
        self._said = (
            f"loss {values['loss']:.3f} · accuracy {accuracy[0]:.2f} … {accuracy[-1]:.2f} · "
            f"{values['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, said=self._said)
        self._began, self._tokens = time.perf_counter(), 0

    def eval(self, step: int, values: dict[str, float]) -> None:
        """What the serving engine measured after a step."""
        self._write("eval", step, values)
        self._bar.console.print(
            f"step {step}: the engine accepts {values['acceptance_length']:.2f} tokens a round · {self._said}"
        )
        self._began, self._tokens = time.perf_counter(), 0

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)
