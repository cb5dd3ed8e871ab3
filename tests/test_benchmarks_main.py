import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command_line, errors
from benchmarks.command_line import main

ROOT = Path(__file__).parent.parent
PREFIX = ["python", "-m", "benchmarks"]


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
    more |= {"xla_cost": ["x.json"], "before_after": ["--old", "x"]}
    for error, status, message in [
        (KeyboardInterrupt(), 130, f"{command}: interrupted\n"),
        (errors.BenchmarkError("no such row"), 2, "no such row\n"),
    ]:

        def raises(arguments, error=error):
            raise error

        monkeypatch.setattr(command_line._COMMANDS[command], "run", raises)
        assert main([command, *more.get(command, [])]) == status
        assert capsys.readouterr().err == message


@pytest.mark.parametrize("command", [["matmul"], ["ladder", "matmul"], ["linalg"]])
def test_a_record_in_no_folder_is_refused_before_anything_is_measured(command, tmp_path, capsys):
    folder = tmp_path / "absent"
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--json", str(folder / "x.json")])
    assert f"there is no folder {folder}" in capsys.readouterr().err
    assert not folder.exists()


def documented_commands():
    """The commands of the code blocks of the documentation, without their comments."""
    for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if (words := shlex.split(line, comments=True))[:3] == PREFIX:
                    yield pytest.param(words[3:], id=f"{page.name}: {' '.join(words[3:])}")


@pytest.mark.parametrize("arguments", list(documented_commands()))
def test_documented_commands_parse(arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(command_line._COMMANDS[arguments[0]], "run", lambda a: ran.append(a) or 0)
    assert main(arguments) == 0
    assert ran
