"""How much of a run is done: by its steps, or by the clock (`minutes`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from dflash_jax.base.errors import ConfigError


def deadline_of(minutes: float | None, began: float | None) -> float | None:
    """When a run must end, as `time.monotonic` counts.

    Args:
        minutes: its budget; None sets no limit.
        began: when it began; None is now.
    """
    if minutes is None:
        return None
    return (time.monotonic() if began is None else began) + 60 * minutes


def make_pace(steps: int | None, deadline: float | None, before: float) -> Callable[[int], float]:
    """The share of a run that is done when a step begins, by number of the step; 1 and more ends the run.

    Args:
        steps: of the whole run; None if time decides.
        deadline: when training ends, as `time.monotonic` counts; None if steps decide.
        before: share of the run that earlier starts had done; the remaining share is spread over the time from now to
            the deadline.
    """
    if steps is not None:
        return lambda step: (step - 1) / steps
    assert deadline is not None
    began, ends = time.monotonic(), deadline
    return lambda step: before + (1 - before) * (time.monotonic() - began) / max(ends - began, 1e-9)


def refuse_too_few_minutes(minutes: float, deadline: float, reserved: float) -> None:
    """Refuse a budget that was used up before the first step.

    Args:
        minutes: the budget.
        deadline: when it is used up, as `time.monotonic` counts.
        reserved: seconds of it kept for the evaluation at the end.

    Raises:
        ConfigError: nothing is left to train in.
    """
    left = deadline - time.monotonic()
    if left <= reserved:
        needs = f" and the evaluation at the end needs {reserved / 60:.1f}" if reserved else ""
        raise ConfigError(
            f"minutes={minutes:g} leaves no time to train: loading and compilation took {minutes - left / 60:.1f} "
            f"minutes{needs}; raise minutes, or lower max_length, eval_samples or eval_max_tokens."
        )
