"""What the benchmarks have for operations other than products of matrices."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import operation_command
from benchmarks.calls.case import Case, Errors, types_enabled
from benchmarks.calls.operations import OPERATIONS, flops
from benchmarks.command_line import main
from benchmarks.measurement import measure, suite_run
from benchmarks.records import ceilings, plot, record, report
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


@pytest.mark.parametrize("operation", MEMORY_BOUND)
def test_every_backend_has_a_suite(operation):
    names = {suite.default_suite(operation, backend) for backend in ("cpu", "gpu")}
    assert names == set(suite.suite_names(operation))


def test_what_a_row_says():
    r = row("matvec", type="int8", result="int32", lhs="bmk", rhs="k", out="bm", b=2, m=3, k=5)
    assert flops(r) == 2 * 2 * 3 * 5
    assert r.bytes == 2 * 3 * 5 + 5 + 4 * 2 * 3
    r = row("transpose", type="complex128", lhs="mn", out="nm", m=3, n=5)
    assert flops(r) == 0
    assert r.bytes == 2 * 16 * 3 * 5
    assert flops(row("sum", lhs="mn", out="n", m=3, n=5)) == 3 * 5


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("transpose", {"lhs": "mn", "m": 2, "n": 3}, "lacks out"),
        ("add", {"lhs": "m", "out": "m", "m": 2}, "lacks rhs"),
        ("sum", {"lhs": "mn", "out": "k", "m": 2, "n": 3}, "result 'k' has dimensions that no"),
        ("sum", {"lhs": "mn", "out": "mm", "m": 2, "n": 3}, "'mm' has a dimension twice"),
        ("matvec", {"lhs": "mn", "rhs": "n", "out": "m", "m": 2, "n": 3}, "operand 'mn'"),
        ("vdot", {"lhs": "k", "rhs": "k", "out": ""}, "need a size each"),
    ],
)
def test_malformed_rows_are_named(operation, fields, message):
    with pytest.raises(suite.SuiteError, match=message):
        row(operation, **fields)


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


@pytest.mark.parametrize("kind", ["float32", "complex64", "bfloat16"])
def test_a_term_that_a_long_sum_lacks_is_found(kind):
    r = row("vdot", type=kind, lhs="k", rhs="k", out="", k=20_000)
    right = Case.of(r)
    operands = right.operands()
    assert wrong(right, operands) is None
    largest = jnp.argmax(jnp.abs(operands[0] * operands[1]))
    short = Case(r, lambda x, y: right.peer(x.at[largest].set(0), y), right.peer)
    assert "relative error" in wrong(short, operands)


def test_errors_are_of_the_terms_and_not_of_what_cancels():
    right = Case.of(row("sum", lhs="k", out="", k=20_000))
    (x,) = right.operands()
    halves = jnp.concatenate([x[:10_000], -x[:10_000] * (1 + 1e-6)])
    errors = right.errors((halves,))
    # The result itself is a millionth of its terms.
    assert abs(float(right.peer(halves))) < 1e-3 * math.sqrt(20_000)
    assert errors.ours < 1e-5
    assert errors.peer < 1e-5


def test_a_single_sum_is_not_held_against_a_lucky_peer():
    r = row("sum", lhs="k", out="", k=20_000)
    assert record._wrong(r, Errors(1e-6, 0.0, 1e-6)) is None
    assert "relative error" in record._wrong(r, Errors(1e-5, 0.0, 1e-5))
    assert "relative error" in record._wrong(r, Errors(math.nan, 0.0, 0.0))


def test_64_bit_types():
    for kind, wide in (("complex128", True), ("float64", True), ("complex64", False)):
        with types_enabled(row("transpose", type=kind, lhs="mn", out="nm", m=2, n=3)):
            assert jax.config.jax_enable_x64 == wide


# Timing.


def test_only_products_are_chained():
    case = Case.of(row("transpose", lhs="mn", out="nm", m=16, n=16))
    assert measure.measure_on_cpu(case, case.operands(), 0, {}).products_per_call == 1


def test_one_operand_rotates_too():
    case = Case.of(row("sum", lhs="mn", out="n", m=16, n=16))
    result = measure.measure_on_gpu(
        case, case.operands(), seconds=0.01, l2_bytes=1 << 10, others={}
    )
    assert "rotated among 4 copies" in result.method


# Records and tables.


def test_bandwidths_are_ceilings():
    bounds = {"read_bytes_per_second": 4e9, "copy_bytes_per_second": 2e9}
    seconds = {"ours": {"median": 1e-3}, "peer": {"median": 2e-3}}
    fields = {"type": "float32", "rhs_type": None, "precision": None, "flops": 1e12}
    timed = fields | {"bytes": 1e6, "seconds": seconds}
    for operation, share in (("transpose", 0.5), ("add", 0.5), ("sum", 0.25), ("matvec", 0.25)):
        found = ceilings.Ceilings.of({"operation": operation, **bounds, "rows": [timed]})
        assert found.operations_per_second == {}
        assert found.share(timed) == share
        assert found.share(timed, "peer") == share / 2


def test_a_row_may_lose_against_the_ceiling():
    found = ceilings.Ceilings(1e9, {})
    spreads = {side: {"median": 1e-3} for side in ("ours", "peer")}
    spreads["ratio"] = {"median": 1.0, "p10": 1.0, "p90": 1.0}
    entry = {"name": "x", "kernel": "k", "target": 1.0, "share": 0.95, "type": "float32"}
    entry |= {"rhs_type": None, "precision": None, "flops": 0, "seconds": spreads}
    entry |= {"error": {"ours": 0.0, "peer": 0.0}, "others": {}, "temporary": None}
    near, far = entry | {"bytes": 0.96e6}, entry | {"bytes": 0.94e6}
    assert not report.loses(near, found)
    assert report.loses(far, found)
    table = {"operation": "sum", "rows": [near, far]}
    assert "96%" in report.cells(table, near, found)
    assert "94% (below 95%)" in report.cells(table, far, found)


# test_benchmarks.py has a run that writes a record.
@pytest.mark.thorough
@pytest.mark.parametrize("operation", MEMORY_BOUND)
@pytest.mark.one_in(5)
def test_a_run_writes_a_record_a_plot_and_tables(operation, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        operation_command, "load_suite", lambda name: suite.parse_suite(name, text(operation))
    )
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)
    file, image = tmp_path / "b.json", tmp_path / "b.png"
    arguments = ["--suite", "tiny", "--seconds", "0", "--json", str(file), "--plot", str(image)]
    assert main([operation, *arguments]) == 0
    assert "2 of 2 rows below their target" in capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")

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


def test_a_plot_without_times(tmp_path):
    pytest.importorskip("matplotlib")
    empty = {"operation": "sum", "suite": "s", "device": "d", "read_bytes_per_second": 1e9}
    plot.plot(empty | {"rows": []}, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_suite_of_another_operation_is_refused(capsys):
    assert main(["sum", "--suite", "transpose-cpu"]) == 2
    assert "suite transpose-cpu is of transpose, not of sum" in capsys.readouterr().err
    assert main(["sum", "--list"]) == 0
    out = capsys.readouterr().out
    assert "sum-h100" in out
    assert "matmul" not in out


def test_there_is_nothing_to_tune_in_other_suites(capsys):
    assert main(["tune", "--suite", "transpose-h100"]) == 2
    assert "has no products, but transpose" in capsys.readouterr().err
