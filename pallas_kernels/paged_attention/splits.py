"""Into how many splits the keys of a call go: chosen at trace time, from shapes alone."""

from __future__ import annotations

_START = 8  # what starting a program costs, in steps (a step is one page)
_MERGE = 0.25  # what merging one more split costs, in steps
_MOST = 128


def best_splits(programs: int, steps: int, slots: int) -> int:
    """The number of splits that finishes soonest.

    Args:
      programs: programs of an unsplit call (sequence, kv head, row block).
      steps: most steps of one of them; a page table wider than the sequences only adds empty splits.
      slots: programs that the device runs at a time.

    The time of a choice is modelled as waves x (start + steps of a split) + merging, in units of one step.
    """

    def time(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * (_START + -(-steps // splits)) + _MERGE * splits * (splits > 1)

    return min(range(1, max(1, min(_MOST, steps)) + 1), key=time)
