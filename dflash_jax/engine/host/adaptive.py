"""How many tokens of its block the next round verifies. Pure host code: no clock, no randomness; outputs do not depend
on the choice.

Verifying a draft pays if it is likely to be accepted and cheap to verify; both change with the batch and its texts.
`BlockLengths` measures both, and picks the length that emits most tokens a second. Length 1 is plain decoding. Two
accounts in seconds keep longer blocks from being slower than plain decoding:

- the lead: seconds that longer blocks have gained on plain decoding, by tokens that were really emitted. A length that
  could lose more than the lead is not picked, whatever the estimates say. The lead is bounded, since it may be lost.
- the allowance: a small share of the time, to try lengths that looked worse when they were last tried.

Gains beyond the lead are saved, and refill the lead at the same batch size until the engine is idle. Plain decoding
tells nothing about acceptance, although the text may soon become predictable: during it, part of the savings pays for
trials.

The engine runs one round ahead: a choice does not know how the previous round has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

SLACK = 0.012  # share of the time by which rounds may fall behind plain decoding
LEAD = 4  # longest rounds, in their seconds: bound of the lead; at batch 1 a run of bad luck costs as much
SAVINGS = 6  # longest rounds, in their seconds: bound of what is kept of gains beyond the lead
SAVINGS_RATE = 0.01  # share of the savings that one plain round may move to the allowance
SAVINGS_SHARE = 0.02  # share of a plain round's time that it may move at most
ALLOWANCE = 0.007  # share of the time that goes to the allowance
LEAST_LOSS = 0.05  # share of a round that a trial is charged at least, so that no length is tried all the time
FIRST_TRIES = 4  # rounds of each length that must be measured before any choice
RECENT = 9  # rounds whose median is the cost: follows growing contexts, ignores single compilations and stalls
STALL = 1.5  # times the expected seconds: what a round takes beyond is not blamed on its length
DECAY = 0.95  # weight that older rounds of a sequence keep in its acceptance, with each new round
PRIOR = 4  # drafts: weight of all sequences' acceptance in the estimate for one sequence
HOPE = 0.8  # acceptance of a draft that is assumed before any is measured


class RoundClock:
    """Seconds of a round, from the times at which the host reads the tokens of rounds.

    The time from one read to the next is that of a round if the host had to wait for the device at both reads (the
    device is the bottleneck) or at neither (the host is). When the bottleneck changes, as after a stall of the host,
    the one catches up with the other and the time between reads means nothing; it counts again after three reads alike.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the last read: something else than a round ran since."""
        self._last: float | None = None
        self._was_ready, self._num_alike = False, 0

    def read(self, now: float, *, was_ready: bool) -> float | None:
        """Seconds of the round that was just read; None if they cannot be told.

        Args:
            now: seconds, as `time.perf_counter` counts.
            was_ready: whether the tokens were there before the host asked for them.
        """
        self._num_alike = self._num_alike + 1 if was_ready == self._was_ready else 1
        last, self._last, self._was_ready = self._last, now, was_ready
        return None if last is None or self._num_alike < 3 else now - last


class RoundSeconds:
    """Seconds of rounds of one batch size, by block length.

    Args:
        lengths: block lengths, ascending.
        like: the nearest batch size that has been measured; None if there is none. A length that has not been measured
            here is assumed to cost what it costs there, in proportion to the lengths measured here; without `like`, it
            is interpolated.

    Attributes:
        estimate: expected seconds by length.
        bound: seconds that they should not exceed: a length known from `like` alone may cost as much more than the next
            shorter one as it has more tokens, but no more than a longer one.
        to_try: indices of the lengths that must be measured first.
        savings: seconds that longer blocks have gained at this batch size, beyond the lead.
    """

    def __init__(self, lengths: tuple[int, ...], like: RoundSeconds | None):
        self._lengths = np.array(lengths)
        self.has_likeness = like is not None
        self._likeness: np.ndarray = np.ones(len(lengths)) if like is None else like.estimate
        self._recent: list[deque[float]] = [deque(maxlen=RECENT) for _ in lengths]
        self._ratios: dict[int, float] = {}  # seconds relative to `like`, by index of the measured lengths
        self.is_known = self.has_likeness
        self.savings = 0.0
        self.estimate: np.ndarray = self._likeness
        self.bound = self._likeness
        # Plain decoding is the baseline. The full block is the hope; it and the shortest block bracket the others.
        first = (0,) if like else dict.fromkeys((len(lengths) - 1, 0, 1))
        self.to_try = deque(index for index in first for _ in range(FIRST_TRIES))

    def observe(self, index: int, seconds: float) -> None:
        """Record the seconds of a round of the length at `index`."""
        recent = self._recent[index]
        if self.has_likeness and not recent:
            recent.append(self.estimate[index])  # outweighs the first round, which may hold a compilation
        recent.append(seconds)
        self.is_known = True
        self._ratios[index] = median_low(recent) / self._likeness[index]
        measured = sorted(self._ratios)
        ratios = [self._ratios[i] for i in measured]
        estimate = self._likeness * np.interp(self._lengths, self._lengths[measured], ratios)
        self.estimate = not_above_longer(estimate)
        self.bound = self._bound() if self.has_likeness else self.estimate

    def is_hopeless(self, index: int) -> bool:
        """Whether the length at `index` was measured, and is slower than plain decoding if all drafts are accepted."""
        is_measured = len(self._recent[index]) > 2
        return bool(is_measured and self.estimate[index] > self._lengths[index] * self.estimate[0])

    def _bound(self) -> np.ndarray:
        is_measured = np.array([len(recent) > 2 for recent in self._recent])
        longer = not_above_longer(np.where(is_measured, self.estimate, np.inf))
        bound = self.estimate.copy()
        for i in np.flatnonzero(~is_measured[1:]) + 1:
            proportional = bound[i - 1] * self._lengths[i] / self._lengths[i - 1]
            bound[i] = max(bound[i], min(proportional, longer[i]))
        return bound


class BlockLengths:
    """Picks the block length of each round.

    Args:
        lengths: block lengths that may be compiled, ascending, from 1 to the full block G.
        max_num_seqs: number of slots.
    """

    def __init__(self, lengths: tuple[int, ...], max_num_seqs: int):
        assert list(lengths) == sorted(set(lengths))
        assert lengths[0] == 1 < lengths[-1]
        self.lengths = lengths
        self._drafts = np.arange(1, lengths[-1])
        self._seconds: dict[int, RoundSeconds] = {}  # by rows
        # How often drafts 1..G-1 were reached, and how often accepted: by slot, and for all slots together.
        self._seen = np.zeros((max_num_seqs, 2, lengths[-1] - 1))
        self._seen_of_all = np.zeros((2, lengths[-1] - 1))
        self._prior = np.full(lengths[-1] - 1, HOPE)
        self._lead = 0.0
        self._allowance = 0.0
        self._unpicked = [0] * len(lengths)  # rounds since each length was picked

    def choose(self, rows: int, slots: Sequence[int]) -> int:
        """The length of the next round if all lengths are compiled; arguments as for `choose_ready`."""
        return self.choose_ready(rows, slots, self.lengths, self.lengths)[0]

    def choose_ready(
        self, rows: int, slots: Sequence[int], offered: Sequence[int], ready: Sequence[int], *, is_timed: bool = True
    ) -> tuple[int, int]:
        """The length of the next round, and the length that would be best if all offered ones were compiled.

        Args:
            rows: rows of the round's program.
            slots: slots of its sequences; at least one.
            offered: lengths that may be compiled for so many rows, ascending.
            ready: those of them that are compiled, ascending; at least one.
            is_timed: whether `observe` will be told the seconds of the round; if not, it is no measurement.
        """
        costs = self._seconds_of(rows)
        may, now = ([self.lengths.index(length) for length in some] for some in (offered, ready))
        costs.to_try = deque(index for index in costs.to_try if index in may)
        wanted, price = (costs.to_try[0], 0.0) if costs.to_try else self._pick(costs, slots, may)
        index = wanted
        if wanted not in now:
            first = next((i for i in costs.to_try if i in now), None)
            index, price = self._pick(costs, slots, now) if first is None else (first, 0.0)
        if is_timed and index in costs.to_try:
            costs.to_try.remove(index)
        self._allowance -= price
        self._unpicked = [rounds + 1 for rounds in self._unpicked]
        self._unpicked[index] = 0
        return self.lengths[index], self.lengths[wanted]

    def observe(
        self, rows: int, length: int, slots: Sequence[int], emitted: Sequence[int], seconds: float | None
    ) -> None:
        """Record how many tokens a round has emitted and how long it took.

        Args:
            rows: as for `choose`.
            length: as `choose` returned it.
            slots: slots of the round whose sequence still runs.
            emitted: tokens of each of these slots, 1..length, as the device counts them.
            seconds: from the end of the previous step to the end of this one; None if something else ran between, or if
                it is unknown.
        """
        costs, index = self._seconds_of(rows), self.lengths.index(length)
        if seconds is not None:
            costs.observe(index, seconds)
        if not slots:
            return
        if length > 1:
            self._observe_acceptance(length, np.asarray(slots), np.asarray(emitted))
        if costs.is_known:
            spent, longest = costs.estimate[index], costs.estimate.max()
            if seconds is not None and length > 1:  # measured, since a length is picked where its estimate is too low
                spent = min(seconds, STALL * costs.bound[index])
            gained = costs.estimate[0] * sum(emitted) / len(slots) - spent
            ahead = self._lead + costs.savings + gained + SLACK * spent
            self._lead = min(ahead, LEAD * longest)
            costs.savings = min(ahead - self._lead, SAVINGS * longest)
            if length == 1:
                paid = min(SAVINGS_RATE * costs.savings, SAVINGS_SHARE * spent)
                costs.savings -= paid
                self._allowance += paid
            if costs.to_try and not costs.has_likeness:
                self._lead = longest  # the first measurements cost nothing, and leave enough to try their outcome
            self._allowance += ALLOWANCE * spent

    def forget(self, slot: int) -> None:
        """Forget the acceptance of a slot that another sequence has taken."""
        self._seen[slot] = 0

    def end_batch(self) -> None:
        """Drop all savings when the engine is idle: what one batch has gained, the next must not lose."""
        for costs in self._seconds.values():
            costs.savings = 0.0

    def milliseconds(self, rows: int) -> list[float]:
        """Estimated milliseconds of a round of each length at so many rows."""
        return [round(1e3 * seconds, 3) for seconds in self._seconds_of(rows).estimate.tolist()]

    def _seconds_of(self, rows: int) -> RoundSeconds:
        if rows not in self._seconds:
            known = [other for other, costs in self._seconds.items() if costs.is_known]
            nearest = min(known, key=lambda other: abs(math.log(other / rows)), default=None)
            self._seconds[rows] = RoundSeconds(self.lengths, None if nearest is None else self._seconds[nearest])
        return self._seconds[rows]

    def _pick(self, costs: RoundSeconds, slots: Sequence[int], among: Sequence[int]) -> tuple[int, float]:
        """The fastest length, or one whose turn it is to be tried; expensive lengths are tried less often.

        Args:
            costs: seconds of the rounds.
            slots: slots of the sequences.
            among: indices of the lengths to pick from, ascending.

        Returns:
            The index of the length, and the seconds that trying it takes from the allowance.
        """
        tokens, seconds, bound = self._expected_tokens(slots), costs.estimate.tolist(), costs.bound.tolist()
        # A safe length loses no more than the lead if all drafts are rejected, and gains if all are accepted.
        safe = [i for i in among if i == among[0] or (bound[i] - bound[0] <= self._lead and not costs.is_hopeless(i))]
        best = max(safe, key=lambda i: tokens[i] / seconds[i])
        best_speed = tokens[best] / seconds[best]
        loss = {i: max(seconds[i] - tokens[i] / best_speed, LEAST_LOSS * seconds[i]) for i in safe if i != best}
        # Among longer lengths only the next one is tried: it shows first whether more drafts are accepted.
        nearest = min((i for i in loss if i > best), default=best)
        trials = [i for i in loss if i <= nearest]
        if not trials:
            return best, 0.0
        trial = max(trials, key=lambda i: self._unpicked[i] / loss[i])
        return (best, 0.0) if loss[trial] > self._allowance else (trial, loss[trial])

    def _expected_tokens(self, slots: Sequence[int]) -> list[float]:
        """Expected tokens of a round of each length, for all slots together."""
        seen = self._seen[slots]
        survival = ((seen[:, 1] + PRIOR * self._prior) / (seen[:, 0] + PRIOR)).cumprod(axis=1)
        tokens = [len(slots), *(len(slots) + survival.sum(axis=0).cumsum()).tolist()]
        return [tokens[length - 1] for length in self.lengths]

    def _observe_acceptance(self, length: int, slots: np.ndarray, emitted: np.ndarray) -> None:
        """Count reached and accepted drafts; those behind the first rejected one or the block's end are not reached."""
        emitted = emitted[:, None]
        reached = self._drafts <= np.minimum(emitted, length - 1)
        seen = np.concatenate([reached[:, None], (self._drafts < emitted)[:, None]], axis=1)
        self._seen[slots] = DECAY * self._seen[slots] + seen
        self._seen_of_all = DECAY * self._seen_of_all + seen.sum(axis=0)
        before = HOPE
        for i, (reached_all, accepted_all) in enumerate(self._seen_of_all.T.tolist()):
            # One draft's weight of the previous position: where few drafts are reached, the trend goes on.
            before = self._prior[i] = (accepted_all + before) / (reached_all + 1)


def not_above_longer(seconds: np.ndarray) -> np.ndarray:
    """Seconds by length, lowered so that no length takes longer than a longer one: what was above held a stall."""
    return np.minimum.accumulate(seconds[::-1])[::-1]
