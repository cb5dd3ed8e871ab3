import os
import subprocess
import sys

import pytest

from jax_tilekern.cli import main
from jax_tilekern.cli.console import duration, rate


def test_importing_the_package_imports_nothing_of_the_command_line():
    program = (
        "import sys, jax_tilekern\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('rich', 'matplotlib')]\n"
        "bad += [m for m in sys.modules if m.startswith('jax_tilekern.cli')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_output_that_takes_only_ascii_is_no_error():
    command = [sys.executable, "-m", "jax_tilekern", "bench", "matmul", "--list"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert "f32 64?" in done.stdout


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("demo", "doctor", "bench"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.0123456, "12.3 ms"), (4.2e-5, "42 us"), (3e-9, "3 ns"), (1234.0, "1234 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rates():
    assert rate(7.61e14, "FLOP") == "761 TFLOP/s"
    assert rate(1.58e15, "OP") == "1.58 POP/s"
    assert rate(24.5e9, "B") == "24.5 GB/s"
