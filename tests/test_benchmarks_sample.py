import json

import pytest
from numerics import on_gpu

from benchmarks.calls.operations import flops
from benchmarks.command_line import main
from benchmarks.measurement import measure, suite_run
from benchmarks.samples import sample
from benchmarks.samples.sample import DRAWS, draw_sample
from benchmarks.suites.suite import _malformed

# What is drawn.


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("operation", list(DRAWS))
def test_rows_are_well_formed_and_quick(operation, device):
    limits = sample._LIMITS[device]
    rows = draw_sample(operation, device, 200, 5).rows
    assert not any(map(_malformed, rows))
    assert all(row.lhs != row.out for row in rows if row.operation == "transpose")
    assert len({row.name for row in rows}) == 200
    assert all(row.bytes <= limits.bytes and flops(row) <= limits.operations for row in rows)


# The command.


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Leave out what takes long and says nothing of samples."""
    monkeypatch.setattr(measure, "_LONGEST_CHAIN", 1)
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 1e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)


def run(*arguments, operation="add"):
    return main([operation, "--seed", "2", "--seconds", "0.01", *arguments])


@pytest.mark.skipif(on_gpu(), reason="measures on a CPU")
@pytest.mark.thorough
def test_a_sample_is_measured_and_continued(tmp_path, capsys):
    path = tmp_path / "sample.json"
    assert run("--sample", "3", "--part", "0/2", "--json", str(path)) == 0
    assert run("--sample", "5", "--resume", "--json", str(path)) == 0
    record = json.loads(path.read_text())
    assert record["sample"] == {"seed": 2, "purpose": "fit"}
    assert [row["name"].partition(":")[0] for row in record["rows"]] == [*"01234"]
    # The first run's rows stayed.
    first = {row["run"] for row in record["rows"]}
    assert all(row["failure"] is None and row["seconds"] for row in record["rows"])
    assert len(first) <= 2
    assert "5 calls drawn with seed 2" in capsys.readouterr().out
