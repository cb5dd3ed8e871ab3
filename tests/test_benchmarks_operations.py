"""What the benchmarks have for operations other than products of matrices."""

import jax
import numpy as np
import pytest

from benchmarks.calls.case import Case, types_enabled
from benchmarks.suites import suite

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


MEMORY_BOUND = ("transpose", "vdot", "sum", "matvec", "add")


def row(operation, **changes):
    entry = {"name": "x", "type": "float32"} | changes
    return suite._row(entry, operation, {"name": "g", "target": 1.0})


# Suites.


@pytest.mark.parametrize(
    "name", [name for operation in MEMORY_BOUND for name in suite.suite_names(operation)]
)
def test_the_package_suites_are_well_formed(name):
    found = suite.load_suite(name)
    assert len(found.rows) >= 8
    for r in found.rows:
        with types_enabled(r):
            case = Case.of(r)
            operands = list(map(jax.ShapeDtypeStruct, map(r.shape, r.operands), r.types))
            for side in (case.ours, case.peer):
                result = jax.eval_shape(side, *operands)
                assert (result.shape, result.dtype) == (r.shape(r.out), r.result_type), r.name


# What is called, and its errors.


@pytest.mark.parametrize(
    ("operation", "lhs", "rhs", "out"),
    [
        ("transpose", "abmn", None, "nbam"),
        ("sum", "amb", None, "ab"),
        ("vdot", "k", "k", ""),
        ("vdot", "abk", "kba", "ba"),
        ("matvec", "mk", "k", "m"),
        ("matvec", "km", "k", "m"),
        ("matvec", "k", "kn", "n"),
        ("matvec", "kmb", "k", "mb"),
        ("matvec", "bk", "bkn", "bn"),
        ("add", "n", "mn", "mn"),
        ("add", "m", "n", "mn"),
        ("add", "mn", "", "mn"),
    ],
)
def test_rows_call_what_their_dimensions_say(operation, lhs, rhs, out):
    sizes = dict(zip("abkmn", (2, 3, 4, 5, 6), strict=True))
    used = {x: sizes[x] for x in lhs + (rhs or "")}
    r = row(
        operation,
        type="int16",
        lhs=lhs,
        out=out,
        **({"rhs": rhs} if rhs is not None else {}),
        **used,
    )
    case = Case.of(r)
    operands = [
        np.random.default_rng(i).integers(-9, 9, r.shape(x), np.int16)
        for i, x in enumerate(r.operands)
    ]
    if operation == "add":
        ones = np.ones(r.shape(out), np.int16)
        expected = sum(
            np.einsum(f"{x},{out}->{out}", y, ones)
            for x, y in zip(r.operands, operands, strict=True)
        )
    else:
        expected = np.einsum(f"{','.join(r.operands)}->{out}", *operands)
    for side in (case.ours, case.peer):
        np.testing.assert_array_equal(side(*operands), expected)
