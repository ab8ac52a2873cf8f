"""Which combinations of parameters the suite runs."""

import pytest

from tests.conftest import turns


@pytest.mark.parametrize(("sizes", "count"), [((5, 3), 5), ((4, 4, 3), 12), ((4, 4), 8), ((2, 3, 5), 15), ((7,), 7)])
def test_each_value_of_each_axis_has_its_turn(sizes, count):
    chosen = turns(sizes, count)
    assert len(chosen) <= count
    assert [{place[axis] for place in chosen} for axis in range(len(sizes))] == [set(range(size)) for size in sizes]


def test_axes_of_one_size_do_not_go_hand_in_hand():
    assert len({(one - other) % 4 for one, other in turns((4, 4), 8)}) > 1
