"""The command line: its commands, their reports, and what importing costs."""

import argparse
import copy
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jax_tilekern
import jax_tilekern as jtk
from jax_tilekern import cli
from jax_tilekern.cli import demo, explain, machine, main
from jax_tilekern.cli.console import output_file
from jax_tilekern.cli.digits import load_digits
from jax_tilekern.cli.problems import find_problems
from jax_tilekern.cli.product_call import ProductCallError, parse_product
from jax_tilekern.compilation import kernel_cache
from jax_tilekern.compilation.nvrtc import NvrtcNotFound

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


@pytest.mark.parametrize(
    ("text", "shapes", "result"),
    [
        ("matmul bf16 40x16x512", ["bfloat16[40,512]", "bfloat16[512,16]"], "bfloat16[40,16]"),
        ("matmul f32 40x16x512 NT", ["float32[40,512]", "float32[16,512]"], "float32[40,16]"),
        ("matmul int8 8x32x16x64 TN", ["int8[8,64,32]", "int8[8,64,16]"], "int32[8,32,16]"),
        ("matmul e4m3 8x9x10 TT", ["float8_e4m3fn[10,8]", "float8_e4m3fn[9,10]"], "bfloat16[8,9]"),
        ("matmul f64 8x8x8", ["float64[8,8]", "float64[8,8]"], "float64[8,8]"),
    ],
)
def test_a_product_has_the_shapes_that_its_text_names(text, shapes, result):
    call = parse_product(text)
    assert [shape(operand) for operand in call.operands] == shapes
    with call.types_enabled():
        assert shape(jax.eval_shape(call.function, *call.operands)) == result


def shape(array):
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


@pytest.mark.parametrize(
    "text",
    ["", "matmul bf16 8x8", "matmul bf16 8x0x8", "matmul bf16 8x8x8 XX", "sum bf16 8x8x8"],
)
def test_malformed_products(text):
    with pytest.raises(ProductCallError, match="is not matmul TYPE MxNxK"):
        parse_product(text)


def test_explains_for_a_named_gpu(capsys):
    # Products need no quotes.
    words = ["matmul", "bf16", "4096x4096x4096", "NT", "matmul int16 8x8x8"]
    assert main(["explain", *words, "--gpu", "sm_90"]) == 0
    printed = capsys.readouterr().out
    call = parse_product("matmul bf16 4096x4096x4096 NT")
    with jtk.gpu_target("sm_90"):
        (choice,) = jtk.explain(call.function, *call.operands)
    assert choice.kernel in printed
    assert "wgmma" in printed
    assert "no kernel for int16" in printed
    assert "\nkernels for 1 of 2 calls" in printed


def test_a_named_gpu_takes_a_compiler(capsys, monkeypatch):
    def none():
        raise NvrtcNotFound("no NVRTC here")

    monkeypatch.setattr(explain, "nvrtc", none)
    assert main(["explain", "matmul", "bf16", "64x64x64", "--gpu", "h100"]) == 2
    assert capsys.readouterr().err == "no NVRTC here\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a product"),
        (["matmul bf16"], "is not matmul"),
        (["matmul f33 8x8x8"], "f33"),
        (["matmul f32 8x8x8", "--gpu", "sm_1"], "sm_1"),
        (["matmul f32 8x8x8", "--precision", "sharp"], "sharp"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_digits_are_those_of_uci():
    train, test = load_digits()
    assert (train.images.shape, test.images.shape) == ((1437, 64), (360, 64))
    # The number of images of each digit in UCI's test set.
    counts = np.bincount(np.concatenate([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (train.images.min(), train.images.max()) == (0, 1)


def test_it_trains_and_agrees_with_jnp_dot(capsys, monkeypatch):
    monkeypatch.setattr(demo, "_TIMING_SECONDS", 0)
    assert main(["demo", "--steps", "150"]) == 0
    out = capsys.readouterr().out
    # Forward, and the gradients of both operands.
    assert all(product in out for product in ("mk,kn->mn", "mk,nk->mn", "km,kn->mn"))
    assert "jnp.dot / jax_tilekern.matmul" in out
    assert out.endswith("OK\n")


@pytest.mark.parametrize(
    ("steps", "accuracy", "difference", "failure"),
    [
        (150, 0.97, 1e-6, None),
        (149, 0.5, 1e-6, None),
        (150, 0.95, 1e-6, "accuracy 95.0% is not above 95%"),
        (150, 0.97, 0.1, "gradients differ by 1.0e-01"),
        (150, 0.97, float("nan"), "gradients differ by nan"),
    ],
)
def test_what_fails(steps, accuracy, difference, failure):
    found = demo.failures(steps, accuracy, difference)
    assert found == [] if failure is None else failure in found[0]


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_steps_are_checked(steps, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "--steps" in capsys.readouterr().err


H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "compute_capability": [9, 0],
    "sm_count": 132,
    "l2_bytes": 50 << 20,
}
T4 = {**H100, "name": "Tesla T4", "compute_capability": [7, 5]}

# A machine with an H100 on which all is well.
GOOD = {
    "versions": {
        "python": "3.12.1",
        "jax": "0.11.2",
        "jax-cuda12-plugin": None,
        "jax-cuda13-plugin": "0.11.2",
    },
    "backends": {
        "default": "gpu",
        "devices": {"cuda": [H100["name"]], "cpu": ["cpu"]},
        "restricted_to": None,
    },
    "driver": {"cuda": "13.0", "gpus": [H100], "why_none": None},
    "nvrtc": {"path": "libnvrtc.so.13", "version": "13.0", "why_none": None},
    "cache": {"location": "/home/me/.cache/jax_tilekern/cubin", "writable": True},
    "registered_targets": {"cpu": ["matmul"], "CUDA": ["launch"]},
    "installation": {"from": "git+https://example.org/jax_tilekern"},
    "trial_product": {"kernel": "a kernel", "error": 3e-4},
}
NO_DRIVER = {"cuda": None, "gpus": [], "why_none": "no NVIDIA driver"}
NO_NVRTC = {"path": None, "version": None, "why_none": "no NVRTC"}
ON_CPU = {"default": "cpu", "devices": {"cpu": ["cpu"]}, "restricted_to": None}


def problems(errors=None, **changes):
    results = copy.deepcopy(GOOD)
    for name, change in changes.items():
        results[name] = {**results[name], **change}
    return find_problems(results, errors or {})


NO_PLUGIN = {"jax-cuda13-plugin": None}


def test_good_machines_have_no_problem():
    assert problems() == []
    changes = {"driver": NO_DRIVER, "nvrtc": NO_NVRTC, "versions": NO_PLUGIN, "backends": ON_CPU}
    assert problems(**changes, cache={"writable": False}) == []
    on_purpose = {**ON_CPU, "restricted_to": "cpu"}
    assert problems(driver=NO_DRIVER, backends=on_purpose) == []


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            {"backends": ON_CPU, "versions": NO_PLUGIN},
            "no CUDA plugin",
            "pip install 'jax[cuda13]'",
        ),
        (
            {"backends": {**ON_CPU, "restricted_to": "cpu"}},
            "JAX_PLATFORMS=cpu keeps JAX from it",
            "unset JAX_PLATFORMS",
        ),
        ({"backends": ON_CPU}, "JAX cannot use it", "JAX_PLATFORMS=cuda python"),
        (
            {"backends": ON_CPU, "driver": NO_DRIVER},
            "there is no GPU here, so JAX computes on the CPU: no NVIDIA driver",
            "nvidia-smi",
        ),
        (
            {"driver": {"cuda": "12.8"}},
            "the driver supports CUDA 12.8 at most",
            "pip install 'jax[cuda12]'",
        ),
        ({"nvrtc": NO_NVRTC}, "no NVRTC", "pip install 'nvidia-cuda-nvrtc>=13,<14'"),
        (
            {"cache": {"writable": False}},
            "cannot be cached in /home/me/.cache",
            "chown -R \"$USER\" '/home/me/.cache/jax_tilekern/cubin'",
        ),
        (
            {"driver": {"gpus": [T4]}},
            "compute capability 7.5",
            "none: the kernels need a newer GPU",
        ),
        ({"versions": {"jax": "0.9.1"}}, "older than 0.10", "pip install 'jax>=0.10"),
        ({"versions": {"jax": "1.0.0"}}, "newer than 0.12", "pip install 'jax>=0.10"),
        (
            {"registered_targets": {"CUDA": []}},
            "no FFI handler for CUDA",
            "--force-reinstall --no-deps 'git+https://example.org/jax_tilekern'",
        ),
        ({"trial_product": {"error": 0.5}}, "relative error of 5.0e-01", "--force-reinstall"),
        ({"trial_product": {"error": float("nan")}}, "relative error of nan", "--force-reinstall"),
    ],
)
def test_each_problem_has_its_fix(changes, what, fix):
    (problem,) = problems(**changes)
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("changes", "why", "fix"),
    [
        ({"driver": NO_DRIVER}, ", and there is no GPU here", "unset JAX_PLATFORMS"),
        ({}, "", "pip install 'jax[cuda13]'"),
    ],
)
def test_no_backend_is_one_problem(changes, why, fix):
    errors = {"cpu_kernels": "NoBackend: no plugin", "trial_product": "NoBackend: no plugin"}
    backends = {"default": None, "devices": {}, "why_none": "no plugin", "restricted_to": "cuda"}
    (problem,) = problems(errors, backends=backends, versions=NO_PLUGIN, **changes)
    start = "JAX starts no backend for JAX_PLATFORMS=cuda (no plugin)"
    assert problem.what.startswith(start + why)
    assert problem.fix == fix


def test_what_is_told_without_a_backend(capsys, monkeypatch):
    def no_devices():
        raise AssertionError

    monkeypatch.setattr(machine.jax, "devices", no_devices)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "AssertionError" not in out
    assert "trial product     unknown: no installed plugin serves it" in out
    assert out.count("Problem:") == 1
    assert max(map(len, out.splitlines())) <= 80


def test_the_package_is_installed_again_from_where_it_came(monkeypatch):
    records = {
        None: "jax_tilekern",
        '{"url": "file:///d/w.whl"}': "file:///d/w.whl",
        '{"url": "https://e.org/r", "vcs_info": {"vcs": "git"}}': "git+https://e.org/r",
    }
    for record, source in records.items():
        found = SimpleNamespace(read_text=lambda _, record=record: record)
        monkeypatch.setattr(
            machine.importlib.metadata, "distribution", lambda _, found=found: found
        )
        assert machine.installation() == {"from": source}


def test_gpus_of_two_architectures():
    old, several = problems(driver={"gpus": [T4, H100]})
    assert "Tesla T4" in old.what
    assert "several architectures" in several.what
    assert old.fix == several.fix == "export CUDA_VISIBLE_DEVICES=1"


def test_every_probe_succeeds():
    results, errors = machine.probe_results(*machine.PROBES)
    assert errors == {}
    assert {"python", "os", "jax", "jaxlib", "numpy", "jax_tilekern"} <= set(results["versions"])
    assert set(results["cache"]) == {"location", "entries", "bytes", "writable"}
    assert set(results["cpu_kernels"]) == {"float32", "float64", "bfloat16", "float16", "int8"}


def test_a_failing_probe_is_reported_and_the_rest_still_told(capsys, monkeypatch):
    def broken():
        raise OSError("the disk is on fire")

    monkeypatch.setitem(machine.PROBES, "cache", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "unknown: OSError: the disk is on fire" in out
    assert "doctor could not find out about cache" in out
    assert "machine.cache()" in out
    assert "trial product" in out
    assert "\x1b" not in out


def test_a_report_has_no_paths(capsys, monkeypatch):
    def broken():
        raise OSError("[Errno 13] Permission denied: '/home/me/.cache/jax_tilekern'")

    monkeypatch.setitem(machine.PROBES, "registered_targets", broken)
    monkeypatch.setitem(machine.PROBES, "installation", lambda: {"from": "file:///home/me/clone"})
    nvrtc = {"path": "/home/me/env/lib/libnvrtc.so.13", "version": "13.0", "why_none": None}
    monkeypatch.setitem(machine.PROBES, "nvrtc", lambda: nvrtc)
    cache = {"location": "/home/me/c", "entries": 3, "bytes": 0, "writable": False}
    monkeypatch.setitem(machine.PROBES, "cache", lambda: cache)
    assert main(["doctor", "--report"]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("```text", "```")
    assert "FFI handlers: unknown: OSError: [Errno 13] Permission denied: '<path>'" in lines
    assert "kernel cache: entries: 3" in lines
    assert "NVRTC (compiler): version: 13.0" in lines
    assert any(line.startswith("versions: jax: ") for line in lines)
    assert any("compiled kernels cannot be cached in <path>" in line for line in lines)
    assert not any("home" in line for line in lines)


def test_without_nvml_there_is_no_result_of_the_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.nvidia_smi() == []
