"""The disk cache of compiled kernels: bounded, shared by processes, and never an obstacle."""

import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest

from jax_tilekern.compilation import kernel_cache

ENTRY = bytes(1000 - 32)  # with its digest a thousand bytes


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_cache._warn_unwritable.cache_clear()
    return tmp_path / "jax_tilekern" / "cubin"


def used_long_ago(folder, key, seconds):
    path = folder / f"{key}.cubin"
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_an_entry_is_kept():
    assert not kernel_cache.contains("a")
    assert kernel_cache.read("a") is None
    kernel_cache.write("a", b"content")
    assert kernel_cache.contains("a")
    assert kernel_cache.read("a") == b"content"


def test_what_was_not_used_for_longest_is_deleted(folder, monkeypatch):
    monkeypatch.setattr(kernel_cache, "LIMIT_BYTES", 4000)
    for age, key in enumerate("dcba"):
        kernel_cache.write(key, ENTRY)
        used_long_ago(folder, key, 100 + age)
    assert kernel_cache.info().entries == 4
    kernel_cache.read("a")  # is used again, though it was the oldest
    kernel_cache.write("e", ENTRY)
    left = {path.stem for path in folder.iterdir()}
    assert left == {"a", "e", "d"}
    assert kernel_cache.info().bytes == 3000


def test_files_of_an_ended_process_are_evicted_in_order(folder, monkeypatch):
    monkeypatch.setattr(kernel_cache, "LIMIT_BYTES", 4000)
    kernel_cache.write("a", ENTRY)
    part = folder / "b.part"
    part.write_bytes(bytes(3500))
    os.utime(part, (0, 0))
    assert kernel_cache.info().bytes == 1000
    kernel_cache.write("c", ENTRY)
    assert {path.name for path in folder.iterdir()} == {"a.cubin", "c.cubin"}


def _write_and_read(number):
    kernel_cache.LIMIT_BYTES = 20_000
    for i in range(60):
        key = str((7 * i + number) % 40)
        content = key.encode() * 300
        found = kernel_cache.read(key)
        if found not in (None, content):
            return f"{key} is {found!r}"
        kernel_cache.write(key, content)
    return ""


@pytest.mark.thorough
def test_processes_share_it(folder):
    """All are over the limit all the time, and delete what others read and write."""
    with warnings.catch_warnings(), multiprocessing.get_context("spawn").Pool(2) as pool:
        warnings.simplefilter("error")
        assert pool.map(_write_and_read, range(4)) == [""] * 4
    assert kernel_cache.info().bytes <= 20_000
    assert not list(folder.glob("*.part"))


_NOT_ALLOWED = """
import os, sys, warnings
from jax_tilekern.compilation import kernel_cache
from jax_tilekern.compilation.compiler import Kernel, compile_kernels
locked = os.environ["XDG_CACHE_HOME"]
os.environ["XDG_CACHE_HOME"] = locked + "-open"
# NVRTC and the sources are loaded here: the other user may not be allowed to read them.
compile_kernels(Kernel("add.cuh", "tilekern::add<float, 8>"), arch="sm_80").entries
os.environ["XDG_CACHE_HOME"] = locked
if os.geteuid() == 0:
    os.seteuid(65534)  # root may enter any folder
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    entry = compile_kernels(Kernel("add.cuh", sys.argv[1]), arch="sm_80").entries[0]
assert entry.cubin[:4] == b"\\x7fELF"
assert kernel_cache.info().entries == 0
assert kernel_cache.clear().entries == 0
print([str(warning.message) for warning in warned])
"""


@pytest.mark.parametrize("inner", [False, True], ids=["the parent", "the folder itself"])
@pytest.mark.one_in(2)
def test_a_folder_that_may_not_be_entered_is_a_warning(folder, inner):
    """As in a container of another user."""
    pytest.importorskip("nvidia")
    folder.mkdir(parents=True)
    locked = folder if inner else folder.parent
    locked.chmod(0)
    name = "tilekern::add<float, 4>"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _NOT_ALLOWED, name],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    finally:
        locked.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot cache compiled kernels") == 1
