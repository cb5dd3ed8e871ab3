"""Which cases of a test with many parameters run by default; the others are marked ``thorough``.

``pytest`` leaves those out, and ``pytest -m ""`` runs all of them. There are two rules, each
written next to the test, and neither is random:

- ``@pytest.mark.one_in(n)`` selects the cases whose positions in the lists of parameters add up to
  a multiple of n. Where the other lists have at least n values each value of a list is selected,
  and with n of the size of the smallest of three lists so is each pair of values.
- ``covering(cases, features)`` selects a case that has a feature which no earlier case has.

``--thorough N`` draws one in N of those that both leave out, by ``--seed``, and ``--emulated N``
one in N of those that emulate kernels.
"""

import operator
import zlib

import pytest


def is_selected(item):
    """Whether ``one_in`` selects an item of pytest's."""
    mark = item.get_closest_marker("one_in")
    if mark is None:
        return True
    (count,) = mark.args
    return sum(_positions(item)) % count == 0


def is_in_sample(name, seed, count):
    """Whether a test is in a random sample of one in ``count``, which follows from the seed."""
    return zlib.crc32(f"{seed} {name}".encode()) % count == 0


_Param = type(pytest.param())


def _positions(item):
    """The position of the item's values in each list of parameters."""
    for mark in item.iter_markers("parametrize"):
        names, cases = mark.args[:2]
        if isinstance(names, str):
            names = names.replace(",", " ").split()
            cases = cases if len(names) > 1 else [_values_of_one(case) for case in cases]
        found = [item.callspec.params[name] for name in names]
        yield [
            # The very objects, because equality of arrays has no truth value.
            all(map(operator.is_, found, case.values if type(case) is _Param else case))
            for case in cases
        ].index(True)


def _values_of_one(case):
    return case if type(case) is _Param else (case,)


def covering(cases, features):
    """Return the ``pytest.param`` cases, all but one for each new feature marked as thorough.

    ``features`` takes the values of a case and returns its features, which are hashable.
    """
    seen, marked = set(), []
    for case in cases:
        found = set(features(*case.values))
        marks = () if found - seen else (pytest.mark.thorough,)
        seen |= found
        marked.append(pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id))
    return marked
