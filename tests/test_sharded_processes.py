"""Sharded programs across processes: JAX's compilation cache, exports, and ``jax.distributed``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flatbuffers")
_PROGRAM = Path(__file__).with_name("sharded_process.py")


def start(*arguments):
    command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def output(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return out


def test_second_process_finds_every_program_in_the_compilation_cache(tmp_path):
    first, second = (json.loads(output(start("cache", tmp_path))) for _ in range(2))
    assert first.keys() == second.keys()
    for name, (hits, results) in second.items():
        assert first[name][0] == 0, f"{name}: two programs share an entry"
        assert hits == 1, name
        assert results == first[name][1], name


# test_second_process_finds_every_program_in_the_compilation_cache runs the same programs.
@pytest.mark.thorough
def test_exported_programs_run_in_another_process(tmp_path):
    assert "saved" in output(start("save", tmp_path))
    assert "loaded" in output(start("load", tmp_path))


@pytest.mark.thorough
def test_two_processes_share_a_program():
    port = free_port()
    processes = [start("distributed", i, port, 2, "cpu") for i in range(2)]
    for process in processes:
        assert "done" in output(process)


@pytest.mark.thorough
def test_processes_with_different_data_are_an_error():
    port = free_port()
    processes = [start("disagree", i, port, 2) for i in range(2)]
    found = "".join(output(process) for process in processes)
    assert "choose kernels by different data of the policy" in found
    assert "'times of process 0'" in found
    assert "Install the same jax_tilekern" in found
