import copy
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks import latency
from benchmarks.calls.case import Case
from benchmarks.command_line import main
from benchmarks.latency import dispatch, first_result, limits, measure, report
from benchmarks.suites import suite
from jax_tilekern.cli.timing import Pairs

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

TINY = """
operation = "matmul"
about = "For tests"

[[groups]]
name = "dispatch"
target = 0.0
rows = [{ name = "returns", type = "float32", lhs = "mk", rhs = "kn", m = 8, n = 8, k = 8 }]

[[groups]]
name = "first result"
target = 1.0
rows = [{ name = "first", type = "float32", lhs = "km", rhs = "kn", m = 8, n = 8, k = 8 }]
"""


def tiny_rows():
    return suite.parse_suite("tiny", TINY).rows


@pytest.mark.parametrize("name", suite.suite_names("latency"))
def test_the_suites_have_both_groups_and_sound_products(name):
    rows = suite.load_suite(name).rows
    assert {row.group for row in rows} == {limits.DISPATCH, limits.FIRST_RESULT}
    for row in rows:
        shapes = [row.shape(dimensions) for dimensions in row.operands]
        result = jax.eval_shape(Case.of(row).peer, *map(jax.ShapeDtypeStruct, shapes, row.types))
        assert (result.shape, result.dtype) == (row.shape(row.out), row.result_type)


def test_every_backend_has_a_suite():
    defaults = {suite.default_suite("latency", backend) for backend in ("cpu", "gpu")}
    assert defaults == set(suite.suite_names("latency"))


# Until a call returns.


class Late:
    """A result that is there long after the call that makes it."""

    def block_until_ready(self):
        time.sleep(0.05)
        return self


def test_a_call_that_returns_late_costs_and_one_that_computes_long_does_not(monkeypatch):
    monkeypatch.setattr(Case, "kernel", lambda self, operands: "a kernel")
    slow, late = (lambda *_: time.sleep(0.02)), (lambda *_: Late())
    row = tiny_rows()[0]
    found = dispatch.dispatch_cost(Case(row, slow, late), calls=2, seconds=0)
    assert 0.02 <= found["seconds"]["ours"]["median"] < 0.04  # of a call, not of a batch
    assert found["seconds"]["peer"]["median"] < 0.01
    assert 0.01 < found["added_seconds"]["median"] < 0.04
    assert found["waited_seconds"]["peer"]["median"] >= 0.025
    assert found["device_behind"] == ["XLA"]
    assert found["pairs"] >= 5

    found = dispatch.dispatch_cost(Case(row, late, slow), calls=2, seconds=0)
    assert found["added_seconds"]["median"] < -0.01
    assert found["device_behind"] == ["ours"]


def test_the_difference_is_of_pairs():
    # The medians are alike.
    assert dispatch.added(Pairs(ours=(1.0, 5.0, 6.0), peer=(5.0, 2.0, 3.0))).median == 3.0


# First results.


@pytest.fixture
def processes(monkeypatch):
    """Replace processes by a list of what they were asked, and by times that a test may change."""
    asked = []
    times = {
        "cold": {"copy": 1.0, "product": 3.0},
        "warm": {"copy": 1.0, "product": 1.5},
        "XLA": {"copy": 2.0, "product": 6.0},
    }

    def fake(row, side, cache):
        cubin = cache / "jax_tilekern" / "cubin" / "a.cubin"
        kind = "XLA" if side == "peer" else "warm" if cubin.exists() else "cold"
        asked.append((kind, cache))
        if kind == "cold":
            cubin.parent.mkdir(parents=True)
            cubin.touch()
        result = {"kernel": "a kernel", "cache": str(cubin.parent), **times[kind]}
        result |= {"product": result["product"] + 0.1 * len({cache for _, cache in asked})}
        return result

    monkeypatch.setattr(first_result, "in_fresh_process", fake)
    return asked, times


def test_a_round_is_an_empty_cache_a_filled_one_and_xla(processes):
    asked, _ = processes
    found = first_result.first_result(tiny_rows()[1], rounds=3)
    kinds = [kind for kind, _ in asked]
    assert kinds == ["cold", "warm", "XLA", "XLA", "cold", "warm", "cold", "warm", "XLA"]
    assert len({cache for _, cache in asked}) == 3
    assert not any(cache.exists() for _, cache in asked)
    assert found["rounds"] == 3
    assert found["compiled"] == 1
    assert found["kernel"] == "a kernel"
    medians = {kind: found["added_seconds"][kind]["median"] for kind in first_result.KINDS}
    assert medians == pytest.approx({"cold": 2.2, "warm": 0.7, "XLA": 4.2})
    assert found["first_seconds"]["cold"]["median"] == pytest.approx(3.2)
    assert found["copy_seconds"]["XLA"]["median"] == 2.0
    assert found["ratio"]["median"] == pytest.approx(6.2 / 3.2)


def test_a_warm_process_that_compiles_is_no_measurement(processes, monkeypatch):
    fake = first_result.in_fresh_process

    def compiling(row, side, cache):
        result = fake(row, side, cache)
        Path(result["cache"], f"{len(processes[0])}.cubin").touch()
        return result

    monkeypatch.setattr(first_result, "in_fresh_process", compiling)
    with pytest.raises(first_result.CacheUnused, match="compiled kernels nevertheless"):
        first_result.first_result(tiny_rows()[1], rounds=1)


def test_a_cache_that_is_elsewhere_is_no_measurement(processes):
    processes[1]["cold"]["cache"] = "/elsewhere"
    with pytest.raises(first_result.CacheUnused, match="in /elsewhere, not in"):
        first_result.first_result(tiny_rows()[1], rounds=1)


def test_a_process_that_fails_is_quoted(tmp_path):
    broken = replace(tiny_rows()[1], type="float33")
    with pytest.raises(RuntimeError, match=r"status 1 and said .*float33"):
        first_result.in_fresh_process(broken, "ours", tmp_path)


# Limits and tables.

RETURNS = {
    "name": "returns",
    "group": "dispatch",
    "target": 0.0,
    "kernel": "a kernel",
    "failure": None,
    "method": "time until a call returns",
    "seconds": {"ours": {"median": 12e-6}, "peer": {"median": 8e-6}},
    "added_seconds": {"median": 4e-6, "p10": -1e-6, "p90": 5e-6},
    "device_behind": [],
}
FIRST = {
    "name": "first",
    "group": "first result",
    "target": 1.0,
    "kernel": "a kernel",
    "failure": None,
    "rounds": 3,
    "first_seconds": {kind: {"median": 1.0} for kind in first_result.KINDS},
    "added_seconds": {
        "cold": {"median": 1.9}, "warm": {"median": 19e-3}, "XLA": {"median": -1e-3},
    },
    "ratio": {"median": 1.1, "p10": 0.9, "p90": 1.3},
}  # fmt: skip


def changed(row, value, *path):
    row = copy.deepcopy(row)
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return row


@pytest.mark.parametrize(
    ("row", "lost", "marks"),
    [
        (RETURNS, [], []),
        (changed(RETURNS, 6e-6, "added_seconds", "median"), ["dispatch"], ["6 us (above 5 us)"]),
        (FIRST, [], []),
        (changed(FIRST, 2.5, "added_seconds", "cold", "median"), ["cold"], ["2.5 s (above 2 s)"]),
        (
            changed(FIRST, 0.03, "added_seconds", "warm", "median"),
            ["warm"],
            ["30 ms (above 20 ms)"],
        ),
        (changed(FIRST, 0.9, "ratio", "median"), ["XLA"], ["0.900 (below 1)"]),
    ],
)
def test_limits(row, lost, marks):
    assert list(limits.losses(row)) == lost
    shown = report.cells(row)
    assert len(shown) == len(report.HEADINGS[row["group"]])
    assert [cell for cell in shown if "above" in cell or "below" in cell] == marks


def test_differences_have_signs():
    assert report.cells(RETURNS)[4:6] == ("4 us", "-1 us to 5 us")
    assert report.cells(FIRST)[-1] == "-1 ms"


def test_the_summary_names_losers_and_queues():
    code = {"source_digests": {}, "versions": {"jax": "0", "jaxlib": "0"}}
    slow = changed(RETURNS, 6e-6, "added_seconds", "median")
    behind = {**RETURNS, "name": "behind", "device_behind": ["ours"]}
    failed = {"name": "bad", "group": "first result", "failure": "it broke"}

    def summary(*rows):
        rows = [{**row, "run": "today"} for row in rows]
        return report.summary({"date": "today", "earlier_runs": [], **code, "rows": rows})

    assert "No row beyond its limits." in summary(RETURNS, FIRST)
    assert "device is behind" not in summary(RETURNS, FIRST)
    assert "1 of 2 rows beyond their limits: returns." in summary(slow, FIRST)
    assert "device is behind" in summary(behind)
    assert summary(failed) == "FAILED: bad."
    assert report.cells(failed) == ("bad", "it broke")


# The command.


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(latency, "load_suite", lambda name: suite.parse_suite(name, TINY))


def bench(*arguments):
    few = ("--seconds", "0", "--calls", "3", "--rounds", "1")
    return main(["latency", "--suite", "tiny", *few, *map(str, arguments)])


@pytest.mark.thorough
def test_a_run_with_real_processes_writes_a_record_and_tables(tiny, tmp_path, capsys):
    file = tmp_path / "latency.json"
    assert bench("--json", file) == 0
    out = capsys.readouterr().out
    assert "Time until a call returns" in out
    assert "First call to first result" in out

    record = json.loads(file.read_text())
    assert record["kind"] == measure.KIND
    assert record["command"].startswith("python -m benchmarks latency")
    assert {"device", "versions", "source_digests"} <= set(record)
    returns, first = record["rows"]
    assert returns["failure"] is first["failure"] is None
    assert returns["calls"] == 3
    assert 0 < returns["seconds"]["ours"]["median"] < 1
    for kind in first_result.KINDS:
        whole, copied = (first[key][kind]["median"] for key in ("first_seconds", "copy_seconds"))
        assert 1e-4 < copied < 60
        assert first["added_seconds"][kind]["median"] == pytest.approx(whole - copied)
    if record["backend"] == "cpu":
        assert first["compiled"] == 0

    assert main(["report", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("| returns |", "| first |"))]
    assert record["device"] in lines[-1]


def test_a_row_that_fails_is_recorded(tiny, tmp_path, capsys, monkeypatch):
    def broken(row, *, rounds):
        raise first_result.CacheUnused("it compiled")

    monkeypatch.setattr(measure, "first_result", broken)
    file = tmp_path / "latency.json"
    assert bench("--rows", "first", "--json", file) == 1
    assert "FAILED: first." in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["failure"] == "CacheUnused: it compiled"
    assert main(["report", str(file)]) == 0
    assert "it compiled" in capsys.readouterr().out


def test_latencies_have_no_plot_and_other_groups_no_latencies(
    tiny, tmp_path, capsys, monkeypatch, processes
):
    pytest.importorskip("matplotlib")
    file = tmp_path / "latency.json"
    assert bench("--rows", "first", "--json", file) == 0
    assert main(["report", str(file), "--plot", str(tmp_path / "x.png")]) == 2
    assert "no plot" in capsys.readouterr().err
    other = TINY.replace("dispatch", "another")
    monkeypatch.setattr(latency, "load_suite", lambda name: suite.parse_suite(name, other))
    assert bench() == 2
    assert "has no latencies, but another" in capsys.readouterr().err


def test_listing(capsys):
    assert main(["latency", "--list"]) == 0
    out = capsys.readouterr().out
    assert "latency-cpu" in out
    assert "first result: bf16 4096³ first" in out
