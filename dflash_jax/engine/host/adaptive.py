"""How many tokens of its block the next round verifies. Pure host code: no clock, no randomness, no output at stake.

A drafted block is worth verifying as far as its drafts are likely to be accepted and verifying them is cheap; both
change with the batch and its texts. `BlockLengths` measures both, and picks the length that emits most tokens a second.
Length 1 is plain decoding, and two accounts in seconds keep the rest from costing more:

- the lead: what longer blocks have gained on plain decoding, in tokens that were emitted, not hoped for. A length that
  could lose more than the lead is not picked, whatever the estimates promise. Little of it is kept, for it may be lost.
- the allowance: a small share of the time, for trying lengths that looked worse when they were last tried.

What is gained beyond the lead is saved, and makes good what the lead loses at the same batch size, until nothing runs
any more. While nothing is drafted nothing is learnt of the text, which may soon repeat itself again: then some of the
savings pay for trials.

The engine runs one round ahead: a choice does not know how the round before has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

SLACK = 0.012  # of the time: by how much rounds may fall behind plain decoding
LEAD = 4  # of the longest rounds: the most that a batch may lose of what it once gained; luck at batch 1 needs as much
SAVINGS = 6  # of the longest rounds: the most that is kept of what was gained beyond the lead
SAVINGS_RATE = 0.01  # of the savings, for trials in each round of plain decoding
SAVINGS_SHARE = 0.02  # of the time, the most that these trials may take
ALLOWANCE = 0.007  # of the time
LEAST_LOSS = 0.05  # of a round: what trying a length costs at least, so that none is tried all the time
FIRST_TRIES = 4  # of a length that must be measured before any choice
RECENT = 9  # rounds whose median is the cost: it follows growing contexts, and ignores a compilation or a stall
STALL = 1.5  # of the expected time: what more a round takes is not the fault of its length
DECAY = 0.95  # of what is known of a sequence's acceptance, with each round that tells more
PRIOR = 4  # drafts of a sequence's own that outweigh what is known of all
HOPE = 0.8  # acceptance of a draft before any is known


class RoundClock:
    """What a round takes, from the times at which the host has read the tokens of rounds.

    From one read to the next a round has passed while the host waits for the device at each, or at none: then the one
    or the other takes all of the time. Where they change places, as after a stall of the host, one has caught up with
    the other, and the time between two reads is anything: it counts again after three of a kind.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Something else than a round came between."""
        self._last: float | None = None
        self._was_ready, self._of_a_kind = False, 0

    def read(self, now: float, *, was_ready: bool) -> float | None:
        """Seconds that the round took that was read just now, None if there is no telling.

        Args:
            now: seconds.
            was_ready: whether its tokens were there before the host asked.
        """
        self._of_a_kind = self._of_a_kind + 1 if was_ready == self._was_ready else 1
        last, self._last, self._was_ready = self._last, now, was_ready
        return None if last is None or self._of_a_kind < 3 else now - last


class RoundSeconds:
    """What rounds of one batch size cost, by block length.

    Args:
        lengths: ascending.
        like: of the nearest batch size that is known. A length that has not been measured is taken to cost what it does
            there, in proportion to the lengths that have been measured here; without, to lie between these.

    Attributes:
        estimate: seconds by length.
        bound: seconds that they will not exceed: where `like` is all there is, verifying twice the tokens may take
            twice the time, but no longer than even more tokens.
        to_try: indices of the lengths that must come first.
        savings: seconds that longer blocks have gained at this batch size, beyond the lead.
    """

    def __init__(self, lengths: tuple[int, ...], like: RoundSeconds | None):
        self._lengths = np.array(lengths)
        self.has_likeness = like is not None
        self._likeness: np.ndarray = np.ones(len(lengths)) if like is None else like.estimate
        self._recent: list[deque[float]] = [deque(maxlen=RECENT) for _ in lengths]
        self._ratios: dict[int, float] = {}  # of the lengths that have been measured
        self.is_known = self.has_likeness
        self.savings = 0.0
        self.estimate: np.ndarray = self._likeness
        self.bound = self._likeness
        # Plain decoding is what all is compared with. The full block is hoped for; it and the shortest span the rest.
        first = (0,) if like else dict.fromkeys((len(lengths) - 1, 0, 1))
        self.to_try = deque(index for index in first for _ in range(FIRST_TRIES))

    def observe(self, index: int, seconds: float) -> None:
        """Take the duration of a round of the length at `index`."""
        recent = self._recent[index]
        if self.has_likeness and not recent:
            recent.append(self.estimate[index])  # so that a first round, which may hold a compilation, is not believed
        recent.append(seconds)
        self.is_known = True
        self._ratios[index] = median_low(recent) / self._likeness[index]
        measured = sorted(self._ratios)
        ratios = [self._ratios[i] for i in measured]
        estimate = self._likeness * np.interp(self._lengths, self._lengths[measured], ratios)
        self.estimate = not_above_longer(estimate)
        self.bound = self._bound() if self.has_likeness else self.estimate

    def is_hopeless(self, index: int) -> bool:
        """Whether the length at `index` was measured, and is slower than plain decoding if every draft is accepted."""
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
        lengths: the compiled ones, ascending: first 1, last the full block G.
        max_num_seqs: number of slots.
    """

    def __init__(self, lengths: tuple[int, ...], max_num_seqs: int):
        assert list(lengths) == sorted(set(lengths))
        assert lengths[0] == 1 < lengths[-1]
        self.lengths = lengths
        self._drafts = np.arange(1, lengths[-1])
        self._seconds: dict[int, RoundSeconds] = {}  # by rows
        # How often the drafts 1..G-1 were reached, and how often accepted: of each slot, and of all together.
        self._seen = np.zeros((max_num_seqs, 2, lengths[-1] - 1))
        self._seen_of_all = np.zeros((2, lengths[-1] - 1))
        self._prior = np.full(lengths[-1] - 1, HOPE)
        self._lead = 0.0
        self._allowance = 0.0
        self._unpicked = [0] * len(lengths)  # rounds since each was picked

    def choose(self, rows: int, slots: Sequence[int]) -> int:
        """The length of the next round where all are compiled; arguments are those of `choose_ready`."""
        return self.choose_ready(rows, slots, self.lengths, self.lengths)[0]

    def choose_ready(
        self, rows: int, slots: Sequence[int], offered: Sequence[int], ready: Sequence[int], *, is_timed: bool = True
    ) -> tuple[int, int]:
        """The length of the next round, and the one that would be best if all that are offered were ready.

        Args:
            rows: of the round's program.
            slots: of its sequences, one at least.
            offered: lengths that may be compiled for so many rows, ascending.
            ready: those of them that are, one at least, ascending.
            is_timed: whether `observe` will be told what the round takes: else it is no measurement.
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
        """Take what a round has emitted and how long it took.

        Args:
            rows: as given to `choose`.
            length: as `choose` gave it.
            slots: those of the round whose sequence still runs.
            emitted: tokens of each of them, 1..length, as the device counts them.
            seconds: from the end of the step before to its own; None where that held more than the round, or nothing
                tells.
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
            if seconds is not None and length > 1:  # what it took; an estimate that was picked tends to be too low
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
                self._lead = longest  # the first measurements are free, and what they show can be tried
            self._allowance += ALLOWANCE * spent

    def forget(self, slot: int) -> None:
        """Another sequence has got the slot."""
        self._seen[slot] = 0

    def end_batch(self) -> None:
        """Nothing runs any more: what one batch has gained is not for the next to lose."""
        for costs in self._seconds.values():
            costs.savings = 0.0

    def milliseconds(self, rows: int) -> list[float]:
        """What a round of each length is believed to take at so many rows."""
        return [round(1e3 * seconds, 3) for seconds in self._seconds_of(rows).estimate.tolist()]

    def _seconds_of(self, rows: int) -> RoundSeconds:
        if rows not in self._seconds:
            known = [other for other, costs in self._seconds.items() if costs.is_known]
            nearest = min(known, key=lambda other: abs(math.log(other / rows)), default=None)
            self._seconds[rows] = RoundSeconds(self.lengths, None if nearest is None else self._seconds[nearest])
        return self._seconds[rows]

    def _pick(self, costs: RoundSeconds, slots: Sequence[int], among: Sequence[int]) -> tuple[int, float]:
        """The fastest length, or one that has waited for its turn to be tried: the longer, the more it costs.

        Args:
            costs: of the rounds.
            slots: of the sequences.
            among: indices of the lengths to pick from, ascending.

        Returns:
            Its index, and what trying it takes from the allowance.
        """
        tokens, seconds, bound = self._expected_tokens(slots), costs.estimate.tolist(), costs.bound.tolist()
        # Nothing is lost beyond the lead if every draft is rejected, and something is gained if all are accepted.
        safe = [i for i in among if i == among[0] or (bound[i] - bound[0] <= self._lead and not costs.is_hopeless(i))]
        best = max(safe, key=lambda i: tokens[i] / seconds[i])
        best_speed = tokens[best] / seconds[best]
        loss = {i: max(seconds[i] - tokens[i] / best_speed, LEAST_LOSS * seconds[i]) for i in safe if i != best}
        # A length beyond the next says little until the next has shown that its drafts are accepted.
        nearest = min((i for i in loss if i > best), default=best)
        trials = [i for i in loss if i <= nearest]
        if not trials:
            return best, 0.0
        trial = max(trials, key=lambda i: self._unpicked[i] / loss[i])
        return (best, 0.0) if loss[trial] > self._allowance else (trial, loss[trial])

    def _expected_tokens(self, slots: Sequence[int]) -> list[float]:
        """Tokens that a round of each length would emit, of all slots together."""
        seen = self._seen[slots]
        survival = ((seen[:, 1] + PRIOR * self._prior) / (seen[:, 0] + PRIOR)).cumprod(axis=1)
        tokens = [len(slots), *(len(slots) + survival.sum(axis=0).cumsum()).tolist()]
        return [tokens[length - 1] for length in self.lengths]

    def _observe_acceptance(self, length: int, slots: np.ndarray, emitted: np.ndarray) -> None:
        """Count drafts; those after the first rejected one, and after the end of a short block, say nothing."""
        emitted = emitted[:, None]
        reached = self._drafts <= np.minimum(emitted, length - 1)
        seen = np.concatenate([reached[:, None], (self._drafts < emitted)[:, None]], axis=1)
        self._seen[slots] = DECAY * self._seen[slots] + seen
        self._seen_of_all = DECAY * self._seen_of_all + seen.sum(axis=0)
        before = HOPE
        for i, (reached_all, accepted_all) in enumerate(self._seen_of_all.T.tolist()):
            # One draft's worth of the draft before: where few are reached, or none of late, the trend goes on.
            before = self._prior[i] = (accepted_all + before) / (reached_all + 1)


def not_above_longer(seconds: np.ndarray) -> np.ndarray:
    """Seconds by length, where none takes longer than a longer one: stalls are not believed against such evidence."""
    return np.minimum.accumulate(seconds[::-1])[::-1]
