"""What the benchmarks have for operations other than products of matrices."""

import json

import jax
import numpy as np
import pytest

from benchmarks import operation_command
from benchmarks.calls.case import Case, types_enabled
from benchmarks.calls.operations import OPERATIONS
from benchmarks.command_line import main
from benchmarks.measurement import suite_run
from benchmarks.records import record
from benchmarks.suites import suite

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

MEMORY_BOUND = ("transpose", "vdot", "sum", "matvec", "add")

TINY = {
    "transpose": """
  { name = "heads", type = "bfloat16", lhs = "bshd", out = "bhsd", b = 2, s = 5, h = 3, d = 8 },
  { name = "double", type = "complex128", lhs = "abc", out = "cab", a = 4, b = 5, c = 6 },
""",
    "vdot": """
  { name = "complex", type = "complex64", lhs = "k", rhs = "k", out = "", k = 100 },
  { name = "columns", type = "bfloat16", lhs = "kb", rhs = "kb", out = "b", b = 3, k = 100 },
""",
    "sum": """
  { name = "integers", type = "int8", result = "int32", lhs = "mn", out = "m", m = 9, n = 99 },
  { name = "double", type = "float64", lhs = "abc", out = "ac", a = 4, b = 5, c = 6 },
""",
    "matvec": """
  { name = "integers", type = "int8", result = "int32", lhs = "k", rhs = "kn", out = "n", n=9, k=9},
  { name = "vectors", type = "bfloat16", lhs = "km", rhs = "bk", out = "bm", b = 3, m = 9, k = 8 },
""",
    "add": """
  { name = "integers", type = "int8", lhs = "mn", rhs = "m", out = "mn", m = 9, n = 99 },
  { name = "outer", type = "bfloat16", lhs = "m", rhs = "n", out = "mn", m = 9, n = 8 },
""",
}


def text(operation):
    group = '[[groups]]\nname = "small"\ntarget = 0.0\nshare = 1e9\nrows = ['
    return f'operation = "{operation}"\nabout = "For tests"\n{group}{TINY[operation]}]'


def row(operation, **changes):
    entry = {"name": "x", "type": "float32"} | changes
    return suite._row(entry, operation, {"name": "g", "target": 1.0})


def wrong(case, operands):
    return record._wrong(case.row, case.errors(operands))


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
        ("transpose", "mn", None, "nm"),
        ("transpose", "abmn", None, "nbam"),
        ("sum", "mn", None, ""),
        ("sum", "amb", None, "ab"),
        ("sum", "abm", None, "b"),
        ("vdot", "k", "k", ""),
        ("vdot", "mn", "mn", ""),
        ("vdot", "bk", "bk", "b"),
        ("vdot", "abk", "kba", "ba"),
        ("matvec", "mk", "k", "m"),
        ("matvec", "km", "k", "m"),
        ("matvec", "k", "kn", "n"),
        ("matvec", "k", "nk", "n"),
        ("matvec", "bmk", "bk", "bm"),
        ("matvec", "kmb", "k", "mb"),
        ("matvec", "mk", "kb", "bm"),
        ("matvec", "bk", "bkn", "bn"),
        ("add", "mn", "mn", "mn"),
        ("add", "n", "mn", "mn"),
        ("add", "mn", "m", "mn"),
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


ROWS = {
    "transpose": {"lhs": "mn", "out": "nm", "m": 90, "n": 130},
    "vdot": {"lhs": "bk", "rhs": "bk", "out": "b", "b": 130, "k": 90},
    "sum": {"lhs": "mn", "out": "m", "m": 130, "n": 90},
    "matvec": {"lhs": "mk", "rhs": "k", "out": "m", "m": 130, "k": 90},
    "add": {"lhs": "mn", "rhs": "n", "out": "mn", "m": 130, "n": 90},
}


@pytest.mark.parametrize(
    ("operation", "kind"),
    [(operation, "float32") for operation in MEMORY_BOUND]
    + [("transpose", "int8"), ("vdot", "bfloat16"), ("sum", "float64"), ("sum", "int8")]
    + [("matvec", "int8"), ("add", "int8")],
)
@pytest.mark.one_in(6)
def test_right_results_are_right_and_one_wrong_element_is_found(operation, kind):
    r = row(operation, type=kind, **ROWS[operation])
    if operation == "sum" and kind == "int8":
        r = row(operation, type=kind, result="int32", **ROWS[operation])
    with types_enabled(r):
        right = Case.of(r)
        operands = right.operands()
        assert wrong(right, operands) is None
        # This row of the result is not in the sample.
        off = Case(r, lambda *x: right.peer(*x).at[-2].add(10), right.peer)
        assert "an element" in wrong(off, operands)
        off = Case(r, lambda *x: right.peer(*x).at[-1].add(100), right.peer)
        assert "relative error" in wrong(off, operands)


# Timing.


# Records and tables.


# test_benchmarks.py has a run that writes a record.
@pytest.mark.thorough
@pytest.mark.parametrize("operation", MEMORY_BOUND)
@pytest.mark.one_in(5)
def test_a_run_writes_a_record_and_tables(operation, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        operation_command, "load_suite", lambda name: suite.parse_suite(name, text(operation))
    )
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)
    file = tmp_path / "b.json"
    arguments = ["--suite", "tiny", "--seconds", "0", "--json", str(file)]
    assert main([operation, *arguments]) == 0
    assert "2 of 2 rows below their target" in capsys.readouterr().out

    result = json.loads(file.read_text())
    assert result["operation"] == operation
    assert [r["failure"] for r in result["rows"]] == [None] * 2
    assert all(r["products_per_call"] == 1 for r in result["rows"])

    assert main(["report", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ours moves" in lines[0]
    assert "ours does" not in lines[0]
    assert len({line.count("|") for line in lines[:4]}) == 1
    most = "20 GB/s" if "copy" in OPERATIONS[operation].bandwidths else "10 GB/s"
    assert any(line.startswith("Ceilings") and most in line for line in lines)
