import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command_line, errors
from benchmarks.command_line import main
from jax_tilekern.plans.gpu import NoGpu

ROOT = Path(__file__).parent.parent


def test_an_output_that_takes_only_ascii_is_no_error():
    command = [sys.executable, "-m", "benchmarks", "matmul", "--list"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, env=environment, capture_output=True, check=True, text=True, cwd=ROOT
    )
    assert "f32 64?" in done.stdout


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    commands = "matmul", "ragged_dot", "linalg", "latency", "ladder", "report", "machine_code"
    assert all(command in out for command in commands)


@pytest.mark.parametrize("command", command_line._COMMANDS)
def test_an_interrupt_is_one_line_and_a_bad_argument_another(command, monkeypatch, capsys):
    more = {"ladder": ["matmul"], "report": ["x.json"], "machine_code": ["record", "x.json"]}
    more |= {"fit_policy": ["NVIDIA H100 80GB HBM3", "x.json"], "regret": ["matmul"]}
    for error, status, message in [
        (KeyboardInterrupt(), 130, f"{command}: interrupted\n"),
        (errors.BenchmarkError("no such row"), 2, "no such row\n"),
        (NoGpu("no GPU"), 2, "no GPU\n"),
    ]:

        def raises(arguments, error=error):
            raise error

        monkeypatch.setattr(command_line._COMMANDS[command], "run", raises)
        assert main([command, *more.get(command, [])]) == status
        assert capsys.readouterr().err == message
