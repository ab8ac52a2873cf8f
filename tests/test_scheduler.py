"""The scheduler by itself: who is admitted, what a prefix hit takes over, who gives way, and what a step costs it."""

import pytest

from dflash_jax import QueueFullError, SamplingParams
from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.engine.host import scheduler as module
from dflash_jax.engine.host.scheduler import Scheduler
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.state.group import UNLIMITED, PageGroup, Shared, StateGroup
from dflash_jax.state.layout import Layout
from dflash_jax.state.pages import NO_PAGE

PAGE, BLOCK, WINDOW, WIDTH = 4, 4, 8, 32


def scheduler_of(*, pages=64, sliding_pages=0, slots=4):
    window = WINDOW if sliding_pages else None
    groups = PageGroup(pages, PAGE), PageGroup(sliding_pages, PAGE, window)
    return Scheduler(Layout(PAGE, BLOCK, WIDTH, groups), slots)


def sequence_of(*token_ids, max_new_tokens=40, salt=b"", first=None, index=0, **params):
    return Sequence(
        prompt_token_ids=list(token_ids),
        params=SamplingParams(max_tokens=max_new_tokens, detokenize=False, **params),
        seed=0,
        eos_token_ids=(),
        max_new_tokens=max_new_tokens,
        tokenizer=None,
        output=CompletionOutput(index=index),
        first=first,
        cache_salt=salt,
    )


def admit(scheduler, *sequences):
    scheduler.waiting.extend(sequences)
    admitted = scheduler.admit()
    scheduler.check_integrity()
    return admitted


def prefill(scheduler, running):
    running.prefilled = len(running.text)
    scheduler.remember(running)


def emit(scheduler, running, *token_ids):
    running.sequence.output.token_ids += token_ids
    scheduler.remember(running)
    scheduler.check_integrity()


def pages_of(scheduler):
    """Free pages of every pool, those free for longest first."""
    return [list(pool._free) for pool in scheduler.pools]


@pytest.fixture
def hashed(monkeypatch):
    """Tokens of each call that hashes some."""
    counts, extend = [], module.extend_hashes

    def counted(hashes, token_ids, *options):
        counts.append(len(token_ids))
        extend(hashes, token_ids, *options)

    monkeypatch.setattr(module, "extend_hashes", counted)
    return counts


# --- who is admitted


def test_first_come_first_served_by_slots_and_pages():
    scheduler = scheduler_of(pages=8, slots=2)
    first, large, small = sequence_of(*range(8)), sequence_of(*range(100, 120)), sequence_of(1)
    admitted = admit(scheduler, first, large, small)
    assert [r.sequence for r in admitted] == [first]  # 3 pages; the next needs 6 of the 5 that are left
    assert list(scheduler.waiting) == [large, small]  # and nobody overtakes
    scheduler.release(admitted[0])
    assert [r.sequence for r in scheduler.admit()] == [large, small]
    assert [r.slot for r in scheduler.running] == [0, 1]


def test_no_slot_no_start():
    scheduler = scheduler_of(slots=1)
    assert len(admit(scheduler, sequence_of(1), sequence_of(2))) == 1
    assert len(scheduler.waiting) == 1


def test_newcomers_find_slots_open_unless_others_wait_already():
    scheduler = scheduler_of(slots=3)
    first, second, third, fourth = (sequence_of(token) for token in range(4))
    scheduler.waiting += [first, second]  # between two steps: both get slots, and one is left
    assert scheduler.num_open_slots == 3
    scheduler.admit()
    assert scheduler.num_open_slots == 1
    scheduler.waiting += [third, fourth]
    scheduler.admit()
    scheduler.drop(first)
    assert scheduler.num_open_slots == 0  # the slot is the fourth's
    scheduler.drop(fourth)
    assert scheduler.num_open_slots == 1


def test_other_completions_wait_for_the_pages_of_the_first():
    scheduler = scheduler_of()
    first = sequence_of(*range(10))
    second = sequence_of(*range(10), first=first, index=1)
    (running,) = admit(scheduler, first, second)
    assert scheduler.admit() == []
    prefill(scheduler, running)
    (other,) = scheduler.admit()
    assert other.units[0].ids[:2] == running.units[0].ids[:2]
    assert other.prefilled == 8


def test_other_completions_that_wait_for_pages_close_no_slot():
    scheduler = scheduler_of()
    first = sequence_of(*range(10))
    admit(scheduler, first, sequence_of(*range(10), first=first, index=1))
    assert len(scheduler.waiting) == 1
    scheduler.queue([sequence_of(1), sequence_of(2), sequence_of(3)], 1)  # two have slots beside that of the other
    with pytest.raises(QueueFullError, match="4 sequences wait, 1 more have come"):
        scheduler.queue([sequence_of(4)], 1)


def test_prompts_are_counted_once_however_often_they_start():
    scheduler = scheduler_of()
    sequence = sequence_of(*range(10))
    admit(scheduler, sequence)
    sequence.started = 1.0
    scheduler.preempt_last()
    admit(scheduler)
    assert scheduler.num_prompt_tokens == 10


def test_who_has_proved_right_alone_waits_behind_other_suspects():
    scheduler = scheduler_of()
    first, second, after = (sequence_of(token) for token in range(3))
    first.suspect = second.suspect = True
    assert len(admit(scheduler, first, second, after)) == 1
    assert not scheduler.has_suspects_behind
    first.suspect = False  # it has completed a round
    assert scheduler.has_suspects_behind
    scheduler.set_aside()
    assert list(scheduler.waiting) == [second, first, after]
    assert [r.sequence for r in scheduler.admit()] == [second]
    second.suspect = False
    assert not scheduler.has_suspects_behind
    assert [r.sequence for r in scheduler.admit()] == [first, after]


def test_a_suspect_runs_alone():
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(1))
    suspect, after = sequence_of(2), sequence_of(3)
    suspect.suspect = True
    assert admit(scheduler, suspect, after) == []
    scheduler.release(running)
    assert [r.sequence for r in scheduler.admit()] == [suspect]
    assert scheduler.admit() == []  # nobody joins it
    suspect.suspect = False
    assert [r.sequence for r in scheduler.admit()] == [after]


# --- prefix hits


def test_a_hit_shares_whole_pages_of_the_same_beginning_and_salt():
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(*range(12)))
    prefill(scheduler, running)
    hit, other, salted = admit(
        scheduler, sequence_of(*range(9), 99, 98), sequence_of(50, *range(1, 12)), sequence_of(*range(12), salt=b"x")
    )
    assert hit.units[0].ids[:2] == running.units[0].ids[:2]
    assert hit.units[0].ids[2] != running.units[0].ids[2]
    assert (hit.prefilled, other.prefilled, salted.prefilled) == (8, 0, 0)
    assert hit.sequence.num_cached_tokens == 8
    assert scheduler.num_prefix_hits == 8
    assert scheduler.tables[0][hit.slot, :2].tolist() == hit.units[0].ids[:2]


def test_the_last_token_of_a_prompt_is_never_a_hit():
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(*range(8)))
    prefill(scheduler, running)
    (again,) = admit(scheduler, sequence_of(*range(8)))
    assert again.prefilled == 4


def test_without_salt_nothing_is_shared(hashed):
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(*range(12), salt=None))
    prefill(scheduler, running)
    (again,) = admit(scheduler, sequence_of(*range(12), salt=None))
    assert again.prefilled == 0
    assert not hashed


def test_a_hit_takes_over_the_window_and_no_more():
    scheduler = scheduler_of(sliding_pages=40)
    (running,) = admit(scheduler, sequence_of(*range(24)))
    prefill(scheduler, running)
    (hit,) = admit(scheduler, sequence_of(*range(24), 99))
    assert hit.prefilled == 24
    assert hit.units[1].start == (25 - WINDOW + 1) // PAGE == 4  # the first page that position 25 sees
    assert hit.units[1].ids[:2] == running.units[1].ids[4 - running.units[1].start : 6 - running.units[1].start]
    assert scheduler.valid_from[1][hit.slot] == 4 * PAGE


def test_a_hit_whose_window_is_gone_is_masked_where_it_ended():
    scheduler = scheduler_of(sliding_pages=40)
    (running,) = admit(scheduler, sequence_of(*range(24)))
    prefill(scheduler, running)
    scheduler.pools[1].forget_all()
    (hit,) = admit(scheduler, sequence_of(*range(24), 99))
    assert hit.prefilled == 24
    assert hit.units[1].start == 6
    assert scheduler.valid_from[1][hit.slot] == 24


def test_what_was_emitted_before_a_preemption_is_taken_over():
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(*range(6)))
    prefill(scheduler, running)
    assert scheduler.reserve_round(running)
    emit(scheduler, running, 90, 91, 92, 93)
    assert scheduler.preempt_last() is running
    (again,) = scheduler.admit()
    assert again.text == [*range(6), 90, 91, 92]  # the last token is the anchor
    assert again.prefilled == 8
    assert again.remembered == 2


def test_a_flushed_cache_knows_nothing():
    scheduler = scheduler_of(sliding_pages=40)
    (running,) = admit(scheduler, sequence_of(*range(12)))
    prefill(scheduler, running)
    scheduler.flush_cache()
    (again,) = admit(scheduler, sequence_of(*range(12)))
    assert again.prefilled == 0


# --- rounds, and who gives way


def test_a_round_has_pages_ahead_and_sliding_ones_come_back():
    scheduler = scheduler_of(sliding_pages=10)
    (running,) = admit(scheduler, sequence_of(*range(16), max_new_tokens=100))
    prefill(scheduler, running)
    most = 0
    for token in range(60):
        assert scheduler.reserve_round(running)
        assert len(running.units[0].ids) * PAGE >= running.length + BLOCK
        assert running.units[1].start <= max(running.length - WINDOW + 1, 0) // PAGE
        most = max(most, len(running.units[1].ids))
        emit(scheduler, running, token)
    assert most <= (WINDOW + 3 * BLOCK) // PAGE + 1
    scheduler.release(running)
    assert scheduler.pools[1].num_free == 10
    assert scheduler.pools[0].num_free == 64


def test_rounds_in_flight_reserve_a_block_each():
    scheduler = scheduler_of()
    (running,) = admit(scheduler, sequence_of(*range(8)))
    prefill(scheduler, running)
    running.in_flight = 1
    assert scheduler.reserve_round(running)
    assert len(running.units[0].ids) * PAGE == 8 + 2 * BLOCK


def test_who_came_last_waits_in_front_of_all_others():
    scheduler = scheduler_of(slots=2)
    first, last = admit(scheduler, sequence_of(1), sequence_of(2), sequence_of(3))
    assert scheduler.preempt_last() is last
    assert scheduler.running == [first]
    assert [s.prompt_token_ids for s in scheduler.waiting] == [[2], [3]]
    assert last.released
    assert scheduler.num_preemptions == 1


def test_after_a_failed_step_all_wait_in_their_order():
    scheduler = scheduler_of(slots=2)
    admit(scheduler, sequence_of(1), sequence_of(2), sequence_of(3))
    assert [s.prompt_token_ids for s in scheduler.requeue()] == [[1], [2]]
    assert [s.prompt_token_ids for s in scheduler.waiting] == [[1], [2], [3]]
    assert scheduler.pools[0].num_free == 64
    scheduler.check_integrity()


# --- what waiting costs


def test_while_pages_are_short_nothing_is_hashed_twice_and_no_page_moves(hashed):
    scheduler = scheduler_of(pages=14, sliding_pages=40)
    done, running = admit(scheduler, sequence_of(*range(12)), sequence_of(*range(50, 74)))
    prefill(scheduler, done)
    prefill(scheduler, running)
    scheduler.release(done)  # 4 pages, of which 3 are known
    scheduler.waiting.append(sequence_of(*range(12), *range(80, 100)))
    before = pages_of(scheduler)
    hashed.clear()
    for _ in range(5):
        assert scheduler.admit() == []
        assert pages_of(scheduler) == before
    assert sum(hashed) <= 32
    scheduler.release(running)
    (started,) = scheduler.admit()
    assert started.prefilled == 12
    prefill(scheduler, started)
    assert sum(hashed) == 32


def test_a_round_that_gets_no_pages_changes_nothing():
    scheduler = scheduler_of(pages=64, sliding_pages=4)
    (running,) = admit(scheduler, sequence_of(*range(16)))
    prefill(scheduler, running)
    running.in_flight = 2
    before, tables = pages_of(scheduler), scheduler.tables[0].copy()
    assert not scheduler.reserve_round(running)
    assert pages_of(scheduler) == before
    assert (scheduler.tables[0] == tables).all()


# --- groups of other kinds


class OneState:
    """A group that keeps one state of a sequence, of whatever length, and has no snapshots to share."""

    def __init__(self, num_units):
        self.num_units = num_units

    def units_for(self, length):
        return 1

    def holds(self, units):
        return UNLIMITED if units else 0

    def first_kept(self, length):
        return 0

    def longest_hit(self, pool, hashes):
        return 0

    def shared(self, pool, hashes, length):
        return Shared([], 0, 0)

    def whole_pages(self, units, first, last):
        return first, []


def test_a_group_may_keep_one_state_of_each_sequence():
    """The scheduler knows no kinds: a state is taken at the start, lasts to the end, and bounds who starts and hits."""
    groups: tuple[StateGroup, ...] = PageGroup(64, PAGE), PageGroup(40, PAGE, WINDOW), OneState(2)
    scheduler = Scheduler(Layout(PAGE, BLOCK, WIDTH, groups), 4)
    first, second = admit(scheduler, *(sequence_of(*range(12), max_new_tokens=100) for _ in range(3)))
    assert [r.units[2].ids for r in (first, second)] == [[0], [1]]
    assert scheduler.tables[2][:2, :2].tolist() == [[0, NO_PAGE], [1, NO_PAGE]]
    prefill(scheduler, first)
    for token in range(40):
        assert scheduler.reserve_round(first)
        emit(scheduler, first, token)
    assert first.units[2].ids == [0]
    scheduler.release(first)
    (third,) = scheduler.admit()
    assert third.units[2].ids == [0]
    assert third.prefilled == 0  # its pages are known, and the state at their end is not
    scheduler.check_integrity()
