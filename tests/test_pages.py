"""The page pool, driven at random: nothing is lost, nothing is shared by mistake, and what is remembered is right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_jax.state.pages import IntegrityError, PagePool, extend_hashes

PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what an owner last wrote to a page

    @rule(number=st.integers(0, PAGES))
    def take(self, number):
        if not self.pool.has_room([], number):
            assert number > self.pool.num_free
            return
        pages = self.pool.take(number)
        assert len(pages) == number
        if pages:
            for page in pages:
                assert all(page not in table for table in self.tables)
                self.content.pop(page, None)
            self.tables.append(pages)

    @rule(data=st.data(), value=st.binary(min_size=1, max_size=1))
    def remember(self, data, value):
        owned = [page for table in self.tables for page in table if page not in self.content]
        if owned:
            page = data.draw(st.sampled_from(owned))
            self.content[page] = value
            self.pool.remember(page, value)

    @rule(chain=st.lists(st.binary(min_size=1, max_size=1), max_size=3, unique=True), more=st.integers(0, 2))
    def share(self, chain, more):
        pages = self.pool.known(chain)
        assert [self.content[page] for page in pages] == chain[: len(pages)]
        if self.pool.has_room(pages, more):
            self.pool.share(pages)
            others = self.pool.take(more)
            assert set(others).isdisjoint(pages)
            for page in others:
                self.content.pop(page, None)
            self.tables.append(pages + others)

    @rule(data=st.data())
    def give_back(self, data):
        if self.tables:
            self.pool.give_back(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def integrity(self):
        self.pool.check_integrity(self.tables)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_pages_are_reused_oldest_first_and_chains_from_their_end():
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    for page, page_hash in zip(first, (b"a", b"b"), strict=True):
        pool.remember(page, page_hash)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take(1) == [first[1]]  # the end of the oldest chain
    assert pool.known([b"a", b"b"]) == [first[0]]


def test_integrity_notices_a_lost_page():
    pool = PagePool(2)
    pages = pool.take(1)
    pool.check_integrity([pages])
    with pytest.raises(IntegrityError, match="owned more or less"):
        pool.check_integrity([])


def test_hashes_stand_for_everything_before():
    first, second, third = [], [], []
    extend_hashes(first, [1, 2, 3, 4, 5], 2)
    extend_hashes(second, [1, 2, 3, 5], 2)
    extend_hashes(third, [9, 2, 3, 4], 2)
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert len({first[1], second[1], third[0], third[1]}) == 4
    again = first[:1]
    extend_hashes(again, [3, 4, 5, 6], 2)
    assert again[:2] == first
    assert len(again) == 3
