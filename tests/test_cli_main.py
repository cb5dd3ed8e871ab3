import argparse
import subprocess
import sys

import pytest

import jax_tilekern
from jax_tilekern import cli
from jax_tilekern.cli import main
from jax_tilekern.cli.console import output_file
from jax_tilekern.compilation import kernel_cache

IMPORT = """
import sys, jax, jax.extend, jax.numpy
from jax.interpreters import ad, batching, mlir, partial_eval, pxla
from jax._src.interpreters import mlir as lowering

def rules():
    primitives = {name: x for name, x in vars(jax.lax).items() if name.endswith("_p")}
    found = {("bind", name): vars(x).get("bind") for name, x in primitives.items()}
    for module in (ad, batching, mlir, partial_eval, pxla, lowering):
        for table in (x for x in vars(module).values() if isinstance(x, dict)):
            for primitive, rule in table.items():
                if isinstance(rule, dict):
                    found.update(((id(rule), x), y) for x, y in rule.items())
                elif isinstance(primitive, jax.extend.core.Primitive):
                    found[id(table), primitive] = rule
    return found

# JAX imports filelock if it is installed.
modules, jaxs = set(sys.modules), rules()
import jax_tilekern
new = set(sys.modules) - modules
bad = [m for m in new if m.split(".")[0] in ("matplotlib", "filelock", "pynvml")]
bad += [m for m in new if m.startswith("jax_tilekern.cli")]
import jax_tilekern.compilation.compiler
bad += ["nvrtc"] * ("nvrtc" in open("/proc/self/maps").read())
now = rules()
bad += [str(which) for which, rule in jaxs.items() if now[which] is not rule]
assert len(jaxs) > 500
sys.exit(str(bad) if bad else 0)
"""


def test_importing_the_package_loads_little_and_changes_no_rule_of_jaxs():
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("demo", "doctor", "explain", "cache"))


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
