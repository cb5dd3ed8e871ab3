"""``python -m benchmarks xla_cost``: a fit to a recorded sample."""

import json
from pathlib import Path

from benchmarks import xla_cost
from benchmarks.command_line import main
from jax_tilekern.plans.gemm.xla_cost import load_costs

RECORD = Path(xla_cost.__file__).parent / "results" / "h100" / "samples" / "matmul-2.0.json"


def test_a_fit_is_reported_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(xla_cost, "_STEPS", 20)
    file = tmp_path / "costs.json"
    assert main(["xla_cost", str(RECORD), "--json", str(file)]) == 0
    report = capsys.readouterr().out
    for part in ("as shipped", "fitted to the other half", "fitted to all"):
        assert f"{part}: error of " in report
    # What is written has the fields of what is shipped, and its constants are others.
    found = json.loads(file.read_text())
    shipped = load_costs()
    assert found["arithmetics"].keys() == shipped.arithmetics.keys()
    assert found["launch"] != shipped.launch or found["memory"] != shipped.memory
    assert "xla_cost" in found["command"]


def test_a_record_without_products_is_refused(capsys):
    vectors = RECORD.with_name("matvec-3.json")
    assert main(["xla_cost", str(vectors)]) == 2
    assert "no products of matrices" in capsys.readouterr().err
