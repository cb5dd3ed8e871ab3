"""The compiler: what NVRTC makes of text, and what the caches keep of it. No GPU is needed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_text import compile_source

from jax_tilekern.compilation import compiler, headers, kernel_cache, nvrtc
from jax_tilekern.compilation.compiler import (
    CompileError,
    Kernel,
    NvrtcNotFound,
    cache_info,
    compile_kernels,
)
from jax_tilekern.compilation.library_identity import file_identity

SCALE = """
struct Sizes { long long m, n; int k; };
template <int N>
__global__ void __launch_bounds__(128) scale(const float* x, float* y, Sizes s) {
  __shared__ float tile[N];
  tile[threadIdx.x % N] = x[threadIdx.x] * s.k;
  __syncthreads();
  y[threadIdx.x] = tile[(threadIdx.x + 1) % N];
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test empty caches of its own; return the folder on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", compiler._Memory())
    kernel_cache._warn_unwritable.cache_clear()
    return tmp_path / "jax_tilekern" / "cubin"


def forget() -> None:
    """Empty the cache in memory, as in a new process."""
    compiler._memory.clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of each text that NVRTC compiles."""
    done: list[str] = []
    real = nvrtc.Nvrtc.compile

    def compile(self: nvrtc.Nvrtc, source: str, **rest: object) -> nvrtc.Output:
        done.append(str(rest["file"]))
        return real(self, source, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile)
    return done


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_compiles(arch: str) -> None:
    compiled = compile_source(SCALE, ["scale<64>", "scale<32>"], arch=arch)
    assert compiled.arch == arch
    assert compiled.log == ""
    entry = compiled.entry("scale<32>")
    assert entry.cubin[:4] == b"\x7fELF"
    assert entry.symbol == "_Z5scaleILi32EEvPKfPf5Sizes"
    assert entry.shared_memory_bytes == 32 * 4
    assert entry.max_threads == 128
    assert entry.parameter_bytes == (8, 8, 24)
    assert entry.spill_bytes == 0
    assert 4 <= entry.registers <= 255
    with pytest.raises(KeyError, match="scale<16> was not compiled"):
        compiled.entry("scale<16>")


def test_spills_are_reported() -> None:
    source = """
__global__ void __launch_bounds__(1024) spill(float* y, int n) {
  float a[128];
  for (int i = 0; i < 128; ++i) a[i] = y[i * n];
  for (int j = 0; j < n; ++j)
    #pragma unroll
    for (int i = 0; i < 128; ++i) a[i] = a[i] * a[(i + 7) % 128] + 1.f;
  for (int i = 0; i < 128; ++i) y[i] = a[i];
}"""
    entry = compile_source(source, ["spill"], arch="sm_90a").entry("spill")
    assert entry.spill_bytes > 0
    assert entry.stack_bytes > 0


def test_warnings_are_kept() -> None:
    source = "__global__ void k() { int unused; }"
    for _ in range(2):
        log = compile_source(source, ["k"], arch="sm_90a").log
        assert "unused" in log
        assert "ptxas" not in log
        forget()


# -- Headers


def test_headers_given(compilations: list[str]) -> None:
    source = '#include "a/outer.cuh"\n__global__ void k(int* x) { *x = answer(); }'
    given = {
        "a/outer.cuh": "#pragma once\n#include <inner.cuh>",
        "inner.cuh": "inline int answer() { return 42; }",
        "other.cuh": "not compiled",
    }
    compile_source(source, ["k"], arch="sm_90a", headers=given)
    # A header that is not included is not part of the key, and one that is includes others.
    compile_source(source, ["k"], arch="sm_90a", headers={**given, "other.cuh": "changed"})
    assert len(compilations) == 1
    changed = {**given, "inner.cuh": "inline int answer() { return 43; }"}
    compile_source(source, ["k"], arch="sm_90a", headers=changed)
    assert len(compilations) == 2


@pytest.fixture
def device_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the package's folder of device code."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    monkeypatch.setattr(headers, "cuda_folder", lambda: folder)
    return folder


def test_package_headers(device_code: Path, compilations: list[str]) -> None:
    (device_code / "one.cuh").write_text('#pragma once\n#include "two.cuh"\n')
    (device_code / "two.cuh").write_text("#pragma once\nconstexpr int two = 2;\n")
    source = """
#include <tilekern/one.cuh>
#include "two.cuh"
__global__ void k(int* x) { *x = two; }"""
    compile_source(source, ["k"], arch="sm_90a")
    (device_code / "two.cuh").write_text("#pragma once\nconstexpr int two = 3;\n")
    compile_source(source, ["k"], arch="sm_90a")
    assert len(compilations) == 1  # until the next process
    headers._read_once.cache_clear()
    compile_source(source, ["k"], arch="sm_90a")
    assert len(compilations) == 2


def test_errors_name_the_real_file(device_code: Path) -> None:
    path = device_code / "bad.cuh"
    path.write_text("#pragma once\n\nint f() { return nothing; }\n")
    with pytest.raises(CompileError) as caught:
        compile_source('#include "bad.cuh"\n', ["k"], arch="sm_90a")
    assert f"{path}(3): error" in caught.value.log


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CompileError("the message", "the log")))
    assert (type(error), str(error), error.log) == (CompileError, "the message", "the log")


def test_kernels_of_the_package(device_code: Path, compilations: list[str]) -> None:
    (device_code / "a.cuh").write_text("template <int N> __global__ void a(int* x) { *x = N; }")
    (device_code / "b.cuh").write_text("__global__ void b() {}")
    one, two, b = Kernel("a.cuh", "a<1>"), Kernel("a.cuh", "a<2>", ("-DX",)), Kernel("b.cuh", "b")
    compiled = compile_kernels(one, two, b, two, arch="sm_80")
    assert [entry.name for entry in compiled.entries] == ["a<1>", "a<2>", "b"]
    assert sorted(compilations) == ["a.cu", "a.cu", "b.cu"]
    # Another plan shares what it has in common with this one.
    assert compile_kernels(b, arch="sm_80").entry("b") is compiled.entry("b")
    assert len(compilations) == 3
    with pytest.raises(ValueError, match="no kernel"):
        compile_kernels(arch="sm_80")


def test_error_of_any_kernel_is_raised(device_code: Path) -> None:
    (device_code / "good.cuh").write_text("__global__ void good() {}")
    (device_code / "bad.cuh").write_text("__global__ void bad() { oops; }")
    good, bad = Kernel("good.cuh", "good"), Kernel("bad.cuh", "bad")
    for kernels in ((good, bad), (bad, good)):
        with pytest.raises(CompileError, match="oops"):
            compile_kernels(*kernels, arch="sm_80")


# -- Caches


def test_memory_and_disk(compilations: list[str], cache: Path) -> None:
    first = compile_source(SCALE, ["scale<64>"], arch="sm_90a")
    again = compile_source(SCALE, ["scale<64>"], arch="sm_90a")
    assert again.entries[0] is first.entries[0]
    forget()
    assert compile_source(SCALE, ["scale<64>"], arch="sm_90a") == first
    assert len(compilations) == 1
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize(
    "change",
    [
        {"source": SCALE + "\n"},
        {"names": ["scale<65>"]},
        {"arch": "sm_80"},
        {"options": ["-DX"]},
        {"file": "other.cu"},
    ],
)
def test_everything_is_in_the_key(change: dict[str, object], compilations: list[str]) -> None:
    base: dict[str, object] = {"source": SCALE, "names": ["scale<64>"], "arch": "sm_90a"}
    compile_source(**base)  # type: ignore[arg-type]
    compile_source(**{**base, **change})  # type: ignore[arg-type]
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_entry_is_rebuilt(damage: str, cache: Path, compilations: list[str]) -> None:
    first = compile_source(SCALE, ["scale<64>"], arch="sm_90a")
    (path,) = cache.glob("*.cubin")
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        del data[-100:]
    elif damage == "flip":
        data[len(data) // 2] ^= 1
    else:
        data.clear()
    path.write_bytes(data)
    forget()
    assert compile_source(SCALE, ["scale<64>"], arch="sm_90a") == first
    forget()
    assert compile_source(SCALE, ["scale<64>"], arch="sm_90a") == first
    assert len(compilations) == 2


def test_unwritable_cache_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where the folder should be: permissions would not stop a test that runs as root.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot cache compiled kernels in .*file/jax_tilekern"):
        compile_source(SCALE, ["scale<64>"], arch="sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_source(SCALE, ["scale<32>"], arch="sm_90a")


def test_include_path_is_not_cached(tmp_path: Path, compilations: list[str]) -> None:
    header = tmp_path / "on_disk.h"
    source = '#include "on_disk.h"\n__global__ void k(int* x) { *x = N; }'
    for text in ("constexpr int N = 1;", "constexpr int N = 2;"):
        header.write_text(text)
        compile_source(source, ["k"], arch="sm_90a", options=[f"-I{tmp_path}"])
    assert len(compilations) == 2
    assert cache_info().entries == 0


def test_threads_share_one_build(compilations: list[str]) -> None:
    results: list[compiler.Compiled] = []

    def work() -> None:
        results.append(compile_source(SCALE, ["scale<64>"], arch="sm_90a"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert all(result.entries[0] is results[0].entries[0] for result in results)
    assert len(results) == 8


def test_kernels_of_a_plan_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until all have begun, which they would not one after the other."""
    names = [f"scale<{number}>" for number in range(1, 5)]
    barrier = threading.Barrier(len(names))
    real = nvrtc.Nvrtc.compile

    def compile(self: nvrtc.Nvrtc, source: str, **rest: object) -> nvrtc.Output:
        barrier.wait(timeout=30)
        return real(self, source, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile)
    compiled = compile_source(SCALE, names, arch="sm_90a")
    assert [entry.name for entry in compiled.entries] == names


# -- Finding NVRTC


def test_not_found_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([(13, "libnone.so.1")]))
    for installed, wheel in (("jax_cuda12_plugin", "nvidia-cuda-nvrtc-cu12"), ("", "-nvrtc>=13")):
        monkeypatch.setattr(nvrtc, "_is_installed", lambda name, it=installed: name == it)
        nvrtc._load.cache_clear()
        with pytest.raises(NvrtcNotFound, match=f"(?s)pip install '.*{wheel}.*libnone.so.1"):
            nvrtc.nvrtc()
    nvrtc._load.cache_clear()


def test_nvrtc_of_a_conda_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after a wheel's and before the system's, with the headers beside it."""
    wheels, conda = tmp_path / "nvidia", tmp_path / "conda"
    in_wheel = wheels / "cu13" / "lib" / "libnvrtc.so.13"
    in_conda = conda / "lib" / "libnvrtc.so.13"
    headers = conda / "targets" / "x86_64-linux" / "include"
    for file in (in_wheel, in_conda, headers / "cuda_fp16.h"):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(nvrtc, "cuda_majors", lambda: [13])
    monkeypatch.setattr(nvrtc, "_wheel_folders", lambda: [str(wheels)])
    monkeypatch.setenv("CONDA_PREFIX", str(conda))

    def found() -> list[str]:
        return [path for _, path in nvrtc._candidates()]

    assert found() == [str(in_wheel), str(in_conda), "libnvrtc.so.13"]
    in_wheel.unlink()
    assert found() == [str(in_conda), "libnvrtc.so.13"]
    assert nvrtc.toolkit_folders.__wrapped__() == [str(headers)]
    monkeypatch.delenv("CONDA_PREFIX")
    assert found() == ["libnvrtc.so.13"]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in for the wheel's library; return its file, which is none that loads."""
    path = tmp_path / "libnvrtc.so.13"
    path.write_text("not a library")
    loads = nvrtc.nvrtc().path
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([(13, str(path)), (13, loads)]))
    nvrtc._load.cache_clear()
    yield path
    nvrtc._load.cache_clear()
    nvrtc.nvrtc_identity.cache_clear()


def test_copies_of_a_library_are_the_same(tmp_path: Path) -> None:
    """Its build ID identifies it; a file that has none is identified by its place."""
    # A note of another kind, and the one of the build ID, in the second of two segments.
    notes = struct.pack("<3I8s", 4, 2, 1, b"GNU\0ab") + struct.pack("<3I8s", 4, 3, 3, b"GNU\0abc")
    table = b"".join(
        struct.pack("<II6Q", kind, 4, at, 0, 0, len(notes), 0, 4) for kind, at in ((1, 0), (4, 176))
    )
    header = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<QQIHHH", 64, 0, 0, 64, 56, 2)
    library = header.ljust(64, b"\0") + table + notes
    contents = {
        "library": library,
        "copy": library,
        "other": library.replace(b"abc", b"abd"),
        "truncated header": header[:50],
        "truncated table": library[:100],
        "truncated notes": library[:-3],
        "text": b"not a library",
    }
    found = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        found[name] = file_identity(str(tmp_path / name))
    assert found.pop("library") == found.pop("copy") == b"abc".hex()
    assert found.pop("other") == b"abd".hex()
    assert all(str(tmp_path / name) in identity for name, identity in found.items())


@pytest.mark.thorough
def test_cached_kernels_need_no_nvrtc(cache: Path) -> None:
    program = f"""
from jax_tilekern.compilation.compiler import Kernel, Source, compile_kernels
compile_kernels(Kernel(Source({SCALE!r}), "scale<64>"), arch="sm_90a")
print("nvrtc" in open("/proc/self/maps").read())
"""
    for loaded in ("True\n", "False\n"):
        outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert outcome.stdout == loaded, outcome.stderr


# -- Generated kernels. ----------------------------------------------------------------------------


# The cache on disk is bounded, shared by processes, and never an obstacle.

ENTRY = bytes(1000 - 32)  # with its digest a thousand bytes


def used_long_ago(cache, key, seconds):
    path = cache / f"{key}.cubin"
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_an_entry_is_kept():
    assert not kernel_cache.contains("a")
    assert kernel_cache.read("a") is None
    kernel_cache.write("a", b"content")
    assert kernel_cache.contains("a")
    assert kernel_cache.read("a") == b"content"


def test_what_was_not_used_for_longest_is_deleted(cache, monkeypatch):
    monkeypatch.setattr(kernel_cache, "LIMIT_BYTES", 4000)
    for age, key in enumerate("dcba"):
        kernel_cache.write(key, ENTRY)
        used_long_ago(cache, key, 100 + age)
    assert kernel_cache.info().entries == 4
    kernel_cache.read("a")  # is used again, though it was the oldest
    kernel_cache.write("e", ENTRY)
    left = {path.stem for path in cache.iterdir()}
    assert left == {"a", "e", "d"}
    assert kernel_cache.info().bytes == 3000


def test_files_of_an_ended_process_are_evicted_in_order(cache, monkeypatch):
    monkeypatch.setattr(kernel_cache, "LIMIT_BYTES", 4000)
    kernel_cache.write("a", ENTRY)
    part = cache / "b.part"
    part.write_bytes(bytes(3500))
    os.utime(part, (0, 0))
    assert kernel_cache.info().bytes == 1000
    kernel_cache.write("c", ENTRY)
    assert {path.name for path in cache.iterdir()} == {"a.cubin", "c.cubin"}


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
def test_processes_share_it(cache):
    """All are over the limit all the time, and delete what others read and write."""
    with warnings.catch_warnings(), multiprocessing.get_context("spawn").Pool(2) as pool:
        warnings.simplefilter("error")
        assert pool.map(_write_and_read, range(4)) == [""] * 4
    assert kernel_cache.info().bytes <= 20_000
    assert not list(cache.glob("*.part"))


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
def test_a_folder_that_may_not_be_entered_is_a_warning(cache, inner):
    """As in a container of another user."""
    pytest.importorskip("nvidia")
    cache.mkdir(parents=True)
    locked = cache if inner else cache.parent
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
