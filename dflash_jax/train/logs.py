"""Logs of a run: its progress, lines of JSON, and TensorBoard events."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from dflash_jax.progress import Phase
from dflash_jax.train.objective import Measured


class Logs:
    """Logs in a folder: `log.jsonl`, one object a line, and events for TensorBoard. A resumed run appends to them.

    Args:
        folder: of the logs.
        now: the phase of training, whose parts are steps.
    """

    def __init__(self, folder: Path, now: Phase):
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "log.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), purge_step=now.first)
        self._phase = now
        self._began, self._tokens = time.perf_counter(), 0

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._events.close()

    def advance(self, tokens: int) -> None:
        """Count a step that was enqueued, and its tokens."""
        self._tokens += tokens
        self._phase.advance()

    def train(self, step: int, measured: Measured, learning_rate: float) -> None:
        """Log what a batch measured; waits for its step.

        Args:
            step: its number.
            measured: by `block_loss`.
            learning_rate: of the step.
        """
        seconds = time.perf_counter() - self._began
        accuracy = np.asarray(measured.accuracy)
        values = {
            "loss": float(measured.loss),
            "acceptance_length": float(measured.acceptance_length),
            "learning_rate": learning_rate,
            "tokens_per_second": self._tokens / seconds,
        }
        by_position = {f"accuracy/{k}": float(share) for k, share in enumerate(accuracy, start=1)}
        self._write("train", step, values | by_position)
        self._phase.note = (
            f"loss {values['loss']:.3f}, accuracy {accuracy[0]:.2f} to {accuracy[-1]:.2f}, "
            f"{values['tokens_per_second']:,.0f} tokens/s"
        )
        self._began, self._tokens = time.perf_counter(), 0

    def eval(self, step: int, values: dict[str, float]) -> None:
        """Log what the serving engine measured.

        Args:
            step: after which it was.
            values: figures by name, as `Evaluator` returns them.
        """
        self._write("eval", step, values)
        accepted = f"the engine accepts {values['acceptance_length']:.2f} tokens a round"
        self._phase.say(f"step {step}: {', '.join([accepted, self._phase.note])}")
        self._began, self._tokens = time.perf_counter(), 0

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)
