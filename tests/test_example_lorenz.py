"""The example runs, and finds the parameters."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

PATH = Path(__file__).parent.parent / "examples" / "lorenz.py"


def test_it_finds_the_parameters(capsys):
    spec = importlib.util.spec_from_file_location("lorenz", PATH)
    lorenz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lorenz)
    lorenz.MEMBERS, lorenz.STEPS = 100, 30
    parameters, losses = lorenz.main(updates=120)
    np.testing.assert_allclose(parameters, lorenz.TRUTH, 0.03)
    assert losses[-1] < losses[0] / 100
    printed = capsys.readouterr().out
    assert "kernel transposed_" in printed
    assert "update 100" in printed
