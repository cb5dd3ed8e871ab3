"""The example runs, and learns."""

import importlib.util
from pathlib import Path

import pytest

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

PATH = Path(__file__).parent.parent / "examples" / "alignment.py"


def test_it_learns(capsys):
    spec = importlib.util.spec_from_file_location("alignment", PATH)
    alignment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alignment)
    alignment.CLOUDS = 100
    before, after = alignment.main(updates=40)
    assert after < before / 5
    printed = capsys.readouterr().out
    assert "matrix_svd float32" in printed
    assert "update  20" in printed
