"""The programs of ``python -m benchmarks jax_kernel`` run, and both sides agree."""

import argparse

import pytest

from benchmarks.jax_kernel import COMMAND

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


def test_both_sides_agree(capsys):
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    arguments = parser.parse_args(["--seconds", "0.01"])
    arguments.command_line = "jax_kernel"
    assert COMMAND.run(arguments) == 0
    printed = capsys.readouterr().out
    errors = [float(line.split("error ")[1]) for line in printed.splitlines() if "error" in line]
    assert len(errors) == 14
    assert max(errors) < 1e-4
