"""The two rules by which tests are left out of the default selection."""

import pytest
from selection import covering, is_selected


@pytest.mark.parametrize("unused", ["only"])
@pytest.mark.parametrize(("row", "name"), [(0, "a"), (1, "b"), (2, "c")])
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.one_in(2)
def test_positions_add_up(request, row, name, column, unused):
    """A list of several names counts once."""
    assert is_selected(request.node) == ((row + column) % 2 == 0)
    thorough = request.node.get_closest_marker("thorough")
    assert (thorough is None) == is_selected(request.node)


def test_covering_selects_what_is_new():
    cases = [pytest.param(*text, id=text) for text in ("ax", "ay", "bx", "by", "cz")]
    marked = covering(cases, lambda *values: values)
    assert [case.id for case in marked] == [case.id for case in cases]
    assert [case.id for case in marked if not case.marks] == ["ax", "ay", "bx", "cz"]


def test_covering_keeps_the_marks_of_a_case():
    skip = pytest.mark.skip
    marked = covering([pytest.param(1), pytest.param(1, marks=skip)], lambda value: [value])
    assert [[mark.name for mark in case.marks] for case in marked] == [[], ["skip", "thorough"]]
