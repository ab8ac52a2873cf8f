"""The number of splits of a call's keys, chosen at trace time from shapes alone."""

from __future__ import annotations

_START = 8  # cost of starting a program, in steps (a step is one page)
_MERGE = 0.25  # cost of merging one more split, in steps
_MAX_SPLITS = 128


def best_splits(programs: int, steps: int, slots: int) -> int:
    """The number of splits that finishes soonest.

    Args:
      programs: programs of an unsplit call (sequence, kv head, row block).
      steps: of the longest of them; a page table wider than the sequences only adds empty splits.
      slots: programs that the device runs at once.

    The time of a choice is modelled as waves x (start + steps of a split) + merging, in units of one step.
    """

    def time(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * (_START + -(-steps // splits)) + _MERGE * splits * (splits > 1)

    return min(range(1, max(1, min(_MAX_SPLITS, steps)) + 1), key=time)
