"""Which combinations of parameters the suite runs."""

import pytest

from tests.conftest import turns


@pytest.mark.parametrize(("sizes", "count"), [((5, 3), 5), ((4, 4, 3), 12), ((4, 4), 8), ((2, 3, 5), 15), ((7,), 7)])
def test_each_value_of_each_axis_has_its_turn(sizes, count):
    chosen = turns(sizes, count)
    assert len(chosen) <= count
    assert [{place[axis] for place in chosen} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]


def test_as_many_pairs_have_theirs_as_there_is_room_for():
    chosen = turns((4, 2, 2), 8)
    for one, other, pairs in ((0, 1, 8), (0, 2, 8), (1, 2, 4)):
        assert len({(place[one], place[other]) for place in chosen}) == pairs
