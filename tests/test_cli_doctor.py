import copy
import sys
from types import SimpleNamespace

import pytest

from jax_tilekern.cli import machine, main
from jax_tilekern.cli.problems import find_problems

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
    facts = copy.deepcopy(GOOD)
    for name, change in changes.items():
        facts[name] = {**facts[name], **change}
    return find_problems(facts, errors or {})


NO_PLUGIN = {"jax-cuda13-plugin": None}


def test_good_machines_have_no_problem():
    assert problems() == []
    changes = {"driver": NO_DRIVER, "nvrtc": NO_NVRTC, "versions": NO_PLUGIN, "backends": ON_CPU}
    assert problems(**changes, cache={"writable": False}) == []


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
    facts, errors = machine.facts(*machine.PROBES)
    assert errors == {}
    assert {"python", "os", "jax", "jaxlib", "numpy", "jax_tilekern"} <= set(facts["versions"])
    assert set(facts["cache"]) == {"location", "entries", "bytes", "writable"}
    assert set(facts["cpu_kernels"]) == {"float32", "float64", "bfloat16", "float16", "int8"}


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


def test_without_nvml_there_are_no_facts_of_the_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.nvidia_smi() == []
