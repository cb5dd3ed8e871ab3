"""The notebooks of the documentation run from their first cell to their last."""

import json
import os
import subprocess
import sys

import pytest
from guides import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs_and_install_nothing(path):
    first, *others = code_cells(path)
    assert all(line.startswith("#") for line in first["source"])
    assert any(line.startswith("# %pip install") for line in first["source"])
    for cell in (first, *others):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run(path, tmp_path):
    """In a process without this suite's fixtures and flags."""
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in code_cells(path)))
    environment = os.environ | {
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join([str(DOCS.parent), *sys.path]),
    }
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
