"""Checkpoints of a run through orbax: the newest ones and the best, each whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.train.state import TrainState

RUN = "run.json"


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint is written under a temporary name and renamed when it is complete. Two newest ones are kept, and the
    one with the best score.

    Args:
        folder: of the checkpoints; made if absent.
    """

    def __init__(self, folder: Path):
        policies = ocp.checkpoint_managers
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(2),
                        policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False),
                    ]
                ),
                best_fn=_score,
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        """Save the state after a step, in the background.

        Args:
            step: its number.
            state: to save.
            score: the acceptance length; None takes no part in choosing the best.
        """
        metrics = None if score is None else {"acceptance_length": score}
        self._manager.save(step, args=ocp.args.StandardSave(state._asdict()), metrics=metrics, force=True)

    @property
    def latest(self) -> int | None:
        """The newest step that was saved completely; None before the first."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step with the best score; the newest one where none has a score."""
        return self._manager.best_step() or self.latest

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Read the state after a step.

        Args:
            step: its number.
            like: a state of the same shapes, dtypes and shardings.

        Raises:
            CheckpointError: the checkpoint does not fit or is damaged.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like._asdict())
        try:
            return TrainState(**self._manager.restore(step, args=ocp.args.StandardRestore(shapes)))
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{self._manager.directory}: the checkpoint of step {step} cannot be restored ({reason}); remove its "
                "folder to go on from the one before."
            ) from error

    def wait(self) -> Checkpoints:
        """Wait until everything is on disk; returns self."""
        self._manager.wait_until_finished()
        return self

    def close(self) -> None:
        """Wait until everything is on disk, and release the folder."""
        self.wait()._manager.close()


def _score(metrics: dict[str, Any]) -> float:
    return float(metrics["acceptance_length"])


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Write down the options of a run, or check that the folder holds a run with the same ones.

    Args:
        folder: of the run.
        identity: what a resumed run must have in common with the run that began.

    Raises:
        ConfigError: the folder holds a run with other options.
    """
    path, stated = folder / RUN, json.loads(json.dumps(identity))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted(stated.keys() | there.keys()):
        if stated.get(name) != there.get(name):
            raise ConfigError(
                f"{folder} holds a run with {name}={there.get(name)!r}, not {stated.get(name)!r}; go on with its "
                "options or give another --out."
            )
