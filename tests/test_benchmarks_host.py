"""``host``: eager calls, tracing, and the program of a model."""

import json

import pytest

from benchmarks.command_line import main
from benchmarks.host import calls, measure
from benchmarks.host.report import CALLS, PROGRAMS, cells


@pytest.fixture
def record(tmp_path, monkeypatch, capsys):
    """Of a small model, and of two operations."""
    few = {name: calls.calls()[name] for name in ("matmul", "sum")}
    monkeypatch.setattr(measure, "calls", lambda: few)
    file = tmp_path / "host.json"
    small = ["--layers", "1", "--rounds", "1", "--seconds", "0.01"]
    assert main(["host", *small, "--json", str(file)]) == 0
    assert "Making the program of a model" in capsys.readouterr().out
    return file


@pytest.mark.thorough
def test_a_record_and_its_tables(record, capsys):
    rows = json.loads(record.read_text())["rows"]
    assert [row["name"] for row in rows if row["group"] == CALLS] == ["matmul", "sum"]
    programs = [row for row in rows if row["group"] == PROGRAMS]
    assert {row["name"] for row in programs} == {"inference, 1 layers", "gradients, 1 layers"}
    for row in programs:
        assert min(row["hlo_bytes"].values()) > 1000
        steps = ["trace", "lower", "compile"]
        assert list(row["steps"]) in (steps, steps[:2])
        assert row["total"]["ours"]["median"] >= row["steps"]["lower"]["ours"]["median"] > 0
        assert len(cells(row)) == 12
    assert any("compile" in row["steps"] for row in programs)

    assert main(["report", str(record)]) == 0
    out = capsys.readouterr().out
    assert "| matmul |" in out
    assert "Limits, as ours / JAX: eager 3, trace 2, hlo 1.5, total 1.3." in out
    assert main(["report", str(record), "--plot", str(record.with_suffix(".png"))]) == 2


def test_what_is_above_its_limit_is_marked():
    compared = {"ours": {"median": 4e-5}, "peer": {"median": 1e-5}, "ratio": {"median": 4.0}}
    row = {"group": CALLS, "name": "matmul", "eager": compared, "trace": compared}
    assert cells(row) == (
        "matmul", "40 us", "10 us", "4.00 (above 3)", "40 us", "10 us", "4.00 (above 2)",
    )  # fmt: skip
