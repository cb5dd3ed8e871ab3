"""The example runs, and learns."""

import importlib.util
from pathlib import Path

import pytest

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

PATH = Path(__file__).parent.parent / "examples" / "springs.py"


def test_it_learns(capsys):
    spec = importlib.util.spec_from_file_location("springs", PATH)
    springs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(springs)
    springs.BODIES = 50
    first, last = springs.main(updates=30)
    assert last < first / 4
    printed = capsys.readouterr().out
    assert "solve transposed" in printed
    assert "update  20" in printed
