import argparse
import subprocess
import sys

import pytest

import jax_tilekern
from jax_tilekern import cli
from jax_tilekern.cli import main
from jax_tilekern.cli.console import output_file
from jax_tilekern.compilation import kernel_cache


def test_importing_the_package_loads_neither_the_command_line_nor_nvrtc():
    program = (
        "import sys, jax, jax.extend\n"
        "before = set(sys.modules)\n"  # JAX imports filelock if it is installed.
        "import jax_tilekern\n"
        "new = set(sys.modules) - before\n"
        "lazy = 'rich', 'matplotlib', 'filelock', 'pynvml'\n"
        "bad = [m for m in new if m.split('.')[0] in lazy]\n"
        "bad += [m for m in new if m.startswith('jax_tilekern.cli')]\n"
        "import jax_tilekern.compilation.compiler\n"
        "bad += ['nvrtc'] * ('nvrtc' in open('/proc/self/maps').read())\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("demo", "doctor", "tune", "explain", "cache"))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jax_tilekern {jax_tilekern.__version__}\n"


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_an_interrupt_is_one_line(name, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._COMMANDS[name], "run", interrupted)
    assert main([name]) == 130
    assert capsys.readouterr().err == f"{name}: interrupted\n"


def test_a_record_in_no_folder_is_refused(tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match="there is no folder"):
        output_file(str(tmp_path / "absent" / "x.json"))


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cache"]) == 0
    assert "entries      0" in capsys.readouterr().out
    kernel_cache.write("a", b"first")
    kernel_cache.write("b", b"second")
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path) in out
    assert "entries      2" in out
    assert "size         75 B of at most 256 MiB" in out
    assert "oldest use   20" in out
    assert main(["cache", "--clear"]) == 0
    assert "2 kernels, 75 B deleted" in capsys.readouterr().out
    assert kernel_cache.info().entries == 0
