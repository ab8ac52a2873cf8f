"""Snapshots by themselves: which moves are asked for when, and which of them a prefix hit may use."""

import pytest

from dflash_jax.engine.host import snapshots as module
from dflash_jax.engine.host.scheduler import Scheduler
from dflash_jax.engine.host.snapshots import Snapshots
from dflash_jax.state.group import PageGroup, SnapshotGroup
from dflash_jax.state.layout import Layout
from tests.test_scheduler import BLOCK, PAGE, WIDTH, admit, prefill, sequence_of

SLOTS = 4


def books(snapshots=4):
    groups = PageGroup(64, PAGE), PageGroup(0, PAGE), SnapshotGroup(snapshots)
    scheduler = Scheduler(Layout(PAGE, BLOCK, WIDTH, groups, snapshots=2), SLOTS)
    return scheduler, Snapshots(scheduler, SLOTS)


def start(scheduler, snapshots, *token_ids):
    """A sequence whose prompt is processed, and which has emitted its first token."""
    (running,) = admit(scheduler, sequence_of(*token_ids))
    moves = snapshots.at_start(running)
    prefill(scheduler, running)
    running.sequence.output.token_ids.append(1)
    return running, moves


def enqueue(snapshots, running):
    moves = snapshots.before_round(running)
    running.in_flight += 1
    return moves


def read(scheduler, snapshots, running, *token_ids):
    running.in_flight -= 1
    running.num_rounds += 1
    running.sequence.output.token_ids += token_ids
    scheduler.remember(running)
    return snapshots.after_read(running)


def test_a_boundary_is_copied_before_the_round_that_may_pass_it():
    scheduler, snapshots = books()
    running, _ = start(scheduler, snapshots, 5, 6, 7, 8, 9, 2)  # 6 tokens: the boundary is at 8
    assert enqueue(snapshots, running) == []  # nothing in flight can have reached it
    assert enqueue(snapshots, running) == [(running.slot, SLOTS, 8)]  # the round in flight may have
    assert read(scheduler, snapshots, running, 3) == []  # it has not: 7 tokens
    assert enqueue(snapshots, running) == [(running.slot, SLOTS, 8)]
    assert read(scheduler, snapshots, running, 3, 3, 3) == []
    assert snapshots.num_kept == 1
    _, moves = start(scheduler, snapshots, 5, 6, 7, 8, 9, 2, 1, 3, 4)
    assert moves == [(SLOTS, 1, 8)]


def test_prompts_are_cut_where_pages_end(monkeypatch):
    """Also on a grid that pages do not divide: the state after 10 tokens is found under no hash of whole pages."""
    monkeypatch.setattr(module, "GRID", 10)
    scheduler, snapshots = books()
    (running,) = admit(scheduler, sequence_of(*range(30)))
    snapshots.at_start(running)
    assert running.stops == [8, 16, 24, 28]


def test_the_last_round_of_an_answer_leaves_its_boundary():
    scheduler, snapshots = books()
    running, _ = start(scheduler, snapshots, 5, 6, 7, 8, 9, 2)
    enqueue(snapshots, running)
    assert read(scheduler, snapshots, running, 3, 3, 3) == [(running.slot, SLOTS, 8)]  # no round follows
    assert snapshots.num_kept == 1


@pytest.mark.parametrize("follows", [True, False])
def test_nothing_is_published_that_was_not_copied(follows):
    """Others own the only snapshot while a round passes the boundary: the state has gone on."""
    scheduler, snapshots = books(snapshots=1)
    first, _ = start(scheduler, snapshots, 1, 2, 3, 4, 5, 6)
    second, _ = start(scheduler, snapshots, 5, 6, 7, 8, 9, 2)
    for running in (first, second):
        enqueue(snapshots, running)
    assert len(enqueue(snapshots, first)) == 1
    if follows:
        assert enqueue(snapshots, second) == []
    assert read(scheduler, snapshots, second, 3, 3, 3) == []
    assert snapshots.num_kept == 0
    scheduler.release(first)
    assert read(scheduler, snapshots, second, 3) == [] if follows else True
    assert snapshots.num_kept == 0
    scheduler.check_integrity()
