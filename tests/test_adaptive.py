"""Block lengths against a simulated device: seldom slower than plain decoding, and close to the best fixed length."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.engine.host.adaptive import LEAD, SAVINGS, BlockLengths, RoundClock
from tests.pairs import golden_llm, greedy, prompt

LENGTHS = (1, 2, 4, 8, 16)
SLOTS = 64
FIRST_ROUNDS = 20  # in which the lengths are measured
WINDOW = 200
MEMORY_BOUND = 1024  # tokens that a pass verifies in the time that it takes to read the weights
GOOD, BAD = 0.9, 0.05


@dataclass(frozen=True)
class Device:
    """Reading the weights takes 1 second, which the work of `free_tokens` tokens hides."""

    free_tokens: int
    drafting: float = 0.2
    drift: float = 0.0  # by which every round is longer than the one before, of a first round
    noise: float = 0.03
    stalls: float = 0.01  # of the rounds: these seem to take ten times as long
    compilation: float = 0.0  # seconds that the first round of its kind seems to take
    hiccups: float = 0.0  # of the rounds that draft: these do take 1.4 times as long

    def seconds(self, rows: int, length: int, round_index: int = 0) -> float:
        work = max(1, rows * length / self.free_tokens) + 0.002 * rows + self.drafting * (length > 1)
        return work * (1 + self.drift * round_index)


@dataclass(frozen=True)
class Experts(Device):
    """Reading the weights takes 0.2 seconds and all experts 2.2, of which k of `experts` are touched by each token.

    These are about Qwen3.5-35B-A3B's: a plain token reads 5.9 GB, a round of 16 tokens 30.
    """

    experts: int = 256
    per_token: int = 8

    def seconds(self, rows: int, length: int, round_index: int = 0) -> float:
        untouched = (1 - self.per_token / self.experts) ** (rows * length)
        work = 0.2 + 2.2 * (1 - untouched) + 0.002 * rows + self.drafting * (length > 1)
        return work * (1 + self.drift * round_index)


def survival(acceptance: np.ndarray) -> np.ndarray:
    return acceptance[:, None] ** np.arange(LENGTHS[-1])  # of each token that a round may emit


@dataclass
class Run:
    """What rounds took, and what plain decoding would have for the tokens they emitted, or were to be expected to."""

    lengths: np.ndarray
    seconds: np.ndarray
    plain: np.ndarray
    plain_expected: np.ndarray
    longest: np.ndarray

    def slowdown(self, first: int = FIRST_ROUNDS) -> float:
        """The worst of any window, against plain decoding."""
        spent, plain = (np.append(0, x[first:].cumsum()) for x in (self.seconds, self.plain_expected))
        return ((spent[WINDOW:] - spent[:-WINDOW]) / (plain[WINDOW:] - plain[:-WINDOW])).max()

    def speedup(self, first: int = FIRST_ROUNDS, last: int | None = None) -> float:
        return self.plain_expected[first:last].sum() / self.seconds[first:last].sum()


def simulate(
    device: Device,
    batch: Callable[[int], int],
    acceptance: Callable[[int], np.ndarray | float],
    rounds: int = 1500,
    seed: int = 0,
) -> Run:
    """Rounds of a batch of varying size; of each round is told only after the next has been chosen."""
    random = np.random.default_rng(seed)
    chooser = BlockLengths(LENGTHS, SLOTS)
    compiled = set()
    told = None
    columns = []
    for i in range(rounds):
        size = batch(i)
        rows, slots = 1 << (size - 1).bit_length(), list(range(size))
        length = chooser.choose(rows, slots)
        if told:
            chooser.observe(*told)
        likely = np.broadcast_to(acceptance(i), SLOTS)[:size]
        accepted = (random.random((size, length - 1)) < likely[:, None]).cumprod(axis=1).sum(axis=1)
        seconds, plain = device.seconds(rows, length, i), device.seconds(rows, 1, i)
        seconds *= 1.4 if length > 1 and random.random() < device.hiccups else 1
        measured = seconds * (1 + device.noise * random.standard_normal())
        measured *= 10 if random.random() < device.stalls else 1
        measured += device.compilation * ((rows, length) not in compiled)
        compiled.add((rows, length))
        told = (rows, length, slots, (accepted + 1).tolist(), measured)
        expected = survival(likely)[:, :length].sum()
        longest = device.seconds(rows, LENGTHS[-1], i)
        columns.append((length, seconds, plain * (accepted + 1).mean(), plain * expected / size, longest))
    return Run(*np.array(columns).T)


def best_speedup(device: Device, size: int, acceptance: np.ndarray | float) -> float:
    rows = 1 << (size - 1).bit_length()
    tokens = survival(np.broadcast_to(acceptance, SLOTS)[:size]).mean(axis=0).cumsum()
    return max(tokens[k - 1] * device.seconds(rows, 1) / device.seconds(rows, k) for k in LENGTHS)


@pytest.mark.parametrize("acceptance", [0, 0.3, 0.6, GOOD, 1])
@pytest.mark.parametrize(
    ("size", "device"),
    [
        (1, Device(MEMORY_BOUND, drafting=0.1)),
        (1, Device(MEMORY_BOUND, drafting=0.4)),
        (5, Device(16)),
        (32, Device(256)),
        (64, Device(64, drafting=0.1)),
        (64, Device(16, noise=0.05)),
    ],
    ids=str,
)
def test_steady_acceptance_runs_at_the_best_length(size, device, acceptance):
    run = simulate(device, lambda i: size, lambda i: acceptance)
    assert run.slowdown() < 1.03
    assert run.speedup() > 0.95 * best_speedup(device, size, acceptance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("acceptance", [0.25, 0.33, 0.4, 0.5])
def test_luck_neither_starts_nor_stops_speculation_that_pays_little(acceptance, seed):
    device = Device(MEMORY_BOUND, drafting=0.4)
    run = simulate(device, lambda i: 1, lambda i: acceptance, rounds=3000, seed=seed)
    assert run.slowdown() < 1.03
    assert run.speedup() > 0.93 * best_speedup(device, 1, acceptance)


SLOW_DRAFTER = Device(free_tokens=8, drafting=1.2)  # as on CPUs: more than a round of plain decoding


@pytest.mark.parametrize("seed", range(4))
def test_text_that_repeats_itself_at_times_is_drafted_then(seed):
    acceptance = np.where(np.random.default_rng(seed).random(200) < 0.5, 0.95, 0.3)
    run = simulate(SLOW_DRAFTER, lambda i: 1, lambda i: acceptance[i // 20], rounds=4000, seed=seed)
    assert run.speedup() > 1.2
    spent, plain = run.seconds[FIRST_ROUNDS:].cumsum(), run.plain[FIRST_ROUNDS:].cumsum()
    assert (spent <= 1.03 * plain + (LEAD + 1) * run.longest.max()).all()


def test_what_one_batch_has_saved_is_not_for_the_next():
    def lost(is_another):
        chooser, lost = BlockLengths(LENGTHS, SLOTS), 0.0
        for i in range(400):
            if i == 200 and is_another:
                chooser.end_batch()
            length = chooser.choose(1, [0])
            seconds, emitted = SLOW_DRAFTER.seconds(1, length), length if i < 200 else 1
            chooser.observe(1, length, [0], [emitted], seconds)
            lost += seconds - SLOW_DRAFTER.seconds(1, 1) if i >= 200 else 0
        return lost

    longest = SLOW_DRAFTER.seconds(1, LENGTHS[-1])
    assert lost(is_another=True) < (LEAD + 1) * longest + 0.03 * 200
    assert lost(is_another=False) > (LEAD + 2) * longest


def test_a_length_that_cannot_pay_is_left_alone():
    run = simulate(SLOW_DRAFTER, lambda i: 1, lambda i: GOOD)
    assert 2 not in run.lengths[FIRST_ROUNDS:]  # 2.2 seconds for two tokens at most


@pytest.mark.parametrize(("size", "free_tokens"), [(8, 64), (64, 256), (64, MEMORY_BOUND)])
def test_good_and_bad_sequences_share_a_batch(size, free_tokens):
    mixed = np.where(np.arange(SLOTS) % 2, GOOD, 0.1)
    run = simulate(Device(free_tokens), lambda i: size, lambda i: mixed)
    assert run.slowdown() < 1.03
    assert run.speedup() > 0.95 * best_speedup(Device(free_tokens), size, mixed)


@pytest.mark.parametrize("drafting", [0.1, 0.4])
@pytest.mark.parametrize(("size", "free_tokens"), [(1, MEMORY_BOUND), (8, 16), (32, 64), (64, 256)])
def test_acceptance_that_switches_is_followed(size, free_tokens, drafting):
    device = Device(free_tokens, drafting)
    run = simulate(device, lambda i: size, lambda i: BAD if 600 <= i < 1400 else GOOD, rounds=2400)
    assert run.speedup(last=600) > 0.95 * best_speedup(device, size, GOOD)
    assert run.speedup(700, 1400) > 0.97  # good times excuse a hundred rounds
    assert run.speedup(1800) > 0.95 * best_speedup(device, size, GOOD)


@pytest.mark.parametrize("acceptance", [BAD, 0.5, GOOD])
@pytest.mark.parametrize("free_tokens", [16, 64, 256])
@pytest.mark.parametrize(
    "batch",
    [
        lambda i: [1, 64, 7, 33, 2, 16][i // 60 % 6],
        lambda i: min(1 + i // 10, SLOTS),
        lambda i: max(SLOTS - i // 10, 1),
        lambda i: 1 + i * 37 % SLOTS,
    ],
    ids=["steps", "growing", "shrinking", "changing"],
)
def test_batches_that_change(batch, free_tokens, acceptance):
    run = simulate(Device(free_tokens), batch, lambda i: acceptance)
    assert run.speedup() > 0.97
    assert run.slowdown() < 1.05  # a window may meet several sizes for the first time
    best = [best_speedup(Device(free_tokens), batch(i), acceptance) for i in range(500, 1500)]
    assert run.speedup(500) > 0.93 * len(best) / np.reciprocal(best).sum()


@pytest.mark.parametrize("batch", [lambda i: 1, lambda i: 32, lambda i: 1 << i // 100 % 7], ids=["1", "32", "changing"])
def test_compilations_do_not_hide_what_a_length_costs(batch):
    device = Device(256, compilation=100.0)
    run = simulate(device, batch, lambda i: GOOD)
    best = [best_speedup(device, batch(i), GOOD) for i in range(FIRST_ROUNDS, 1500)]
    assert run.speedup() > 0.93 * len(best) / np.reciprocal(best).sum()


@pytest.mark.parametrize("seed", range(4))
def test_the_lead_counts_what_a_median_does_not_see(seed):
    run = simulate(Device(MEMORY_BOUND, drafting=0.1, hiccups=0.4), lambda i: 8, lambda i: 0.15, seed=seed)
    assert run.slowdown() < 1.03


def test_lengths_that_seem_to_cost_the_same_are_left_once_they_have_lost():
    run = simulate(Device(MEMORY_BOUND, drafting=0, noise=0, stalls=0, hiccups=0.4), lambda i: 8, lambda i: 0.05)
    assert run.slowdown() < 1.03


@pytest.mark.parametrize("acceptance", [0, 0.3, 0.6, 0.88])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_lengths_that_touch_more_experts_cost_what_they_do(size, acceptance):
    """Within 3 % of the best fixed length, or of plain decoding where few drafts are right."""
    device = Experts(MEMORY_BOUND, drafting=0.05)
    run = simulate(device, lambda i: size, lambda i: acceptance)
    assert run.speedup(200) > 0.97 * max(1, best_speedup(device, size, acceptance))
    assert run.slowdown() < 1.03


@pytest.mark.parametrize("size", [1, 16])
def test_drafts_that_are_never_right_cost_less_than_a_hundredth(size):
    run = simulate(Device(MEMORY_BOUND), lambda i: size, lambda i: 0)
    assert run.speedup(100) > 0.99
    assert set(run.lengths[100:]) == set(LENGTHS[:2])  # more than the shortest would tell nothing


@settings(deadline=None, max_examples=40)
@given(
    free_tokens=st.sampled_from([8, 32, 128, 512]),
    drafting=st.floats(0.02, 1),
    drift=st.floats(0, 0.0003),
    noise=st.floats(0, 0.05),
    stalls=st.floats(0, 0.02),
    phase=st.integers(10, 300),
    levels=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, SLOTS), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 20),
)
@example(  # the first rounds save more than a lead, which is lost at once
    free_tokens=8, drafting=1.0, drift=0.0, noise=0.0, stalls=0.0, phase=10, levels=[1, 1, 0, 0, 0], sizes=[1], seed=0
)
def test_no_regime_loses_more_than_it_has_gained(
    free_tokens, drafting, drift, noise, stalls, phase, levels, sizes, seed
):
    """Tokens that were emitted, any change of acceptance and batch: 3 %, and the lead that longer blocks have made.

    The first rounds, which measure, are left out, but for what they save.
    """
    run = simulate(
        Device(free_tokens, drafting, drift, noise, stalls),
        lambda i: sizes[i // (2 * phase) % len(sizes)],
        lambda i: levels[i // phase % len(levels)],
        rounds=1200,
        seed=seed,
    )
    spent, plain = run.seconds[FIRST_ROUNDS:].cumsum(), run.plain[FIRST_ROUNDS:].cumsum()
    longest = run.longest.max()
    saved = min(np.maximum(run.plain - run.seconds, 0)[:FIRST_ROUNDS].sum(), SAVINGS * longest)
    lead = (LEAD + 1) * longest  # a round is chosen before the one before is told
    assert (spent <= 1.03 * plain + lead + saved).all()


def test_the_full_block_comes_first_and_stays_without_a_clock():
    chooser = BlockLengths(LENGTHS, SLOTS)
    assert chooser.choose(4, [0, 2]) == LENGTHS[-1]
    chosen = []
    for _ in range(50):
        chosen.append(length := chooser.choose(4, [0, 2]))
        chooser.observe(4, length, [0, 2], [1, length], None)
    assert set(chosen[-30:]) == {LENGTHS[-1]}


def test_a_new_sequence_is_expected_to_do_as_the_others():
    chooser = BlockLengths(LENGTHS, SLOTS)
    device = Device(free_tokens=16)
    slots = list(range(8))
    for _ in range(200):
        length = chooser.choose(8, slots)
        chooser.observe(8, length, slots, [1] + [length] * 7, device.seconds(8, length))
    for _ in range(20):  # measures this size too
        length = chooser.choose(1, [0])
        chooser.observe(1, length, [0], [1], device.seconds(1, length))
    assert chooser.choose(1, [0]) == 1
    assert chooser.choose(1, [1]) == LENGTHS[-1]
    chooser.forget(0)
    assert chooser.choose(1, [0]) > 1


def test_the_clock_counts_rounds_and_nothing_else():
    clock = RoundClock()

    def reads(*times, was_ready):
        return [clock.read(time, was_ready=was_ready) for time in times]

    assert reads(0.0, 6.0, was_ready=False) == [None, None]
    assert reads(12.0, 18.5, was_ready=False) == [6.0, 6.5]
    # the host stalls for 100; the device has long finished two rounds, which are read one dispatch after the other
    assert reads(118.5, 120.5, was_ready=True) == [None, None]
    assert reads(126.5, 132.5, was_ready=False) == [None, None]
    assert reads(138.5, was_ready=False) == [6.0]
    # a host that is slower than the device all the time: rounds take what the host takes
    assert reads(148.5, 158.5, 168.5, was_ready=True) == [None, None, 10.0]
    clock.restart()
    assert reads(200.0, was_ready=True) == [None]


def test_the_first_run_of_a_program_is_no_measurement(monkeypatch):
    llm, prompts, params = golden_llm("qwen3_swa_tied"), [prompt(1, 2, 3)], [greedy(200)]
    engine, push, are_timed = llm.engine, llm.engine._push, []

    def forget_runs_before_the_fourth_round(step):
        if step.length:
            are_timed.append(step.is_timed)
            if len(are_timed) == 3:
                for program in engine.runner._programs.values():
                    program.has_run = False
        push(step)

    llm.compile(prompts, params)
    llm.generate(prompts, params)
    monkeypatch.setattr(engine, "_push", forget_runs_before_the_fourth_round)
    llm.generate(prompts, params)
    assert len(are_timed) > 5
    assert are_timed == [i not in (0, 3) for i in range(len(are_timed))]  # the first one follows a prefill
