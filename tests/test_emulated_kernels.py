"""CUDA kernels compiled as C++ for the CPU, with emulated threads: values without a GPU."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
KERNELS = ROOT / "ffi" / "cuda"
# The kernels of each program in tests/emulation.
FILES = {
    "blocked_lu": (
        "types", "linalg/blocked_lu_pivots", "linalg/blocked_lu_update",
        "linalg/block_substitution",
    ),
    "row_sums": ("types", "convert", "epilogue", "reduction/reduction", "reduction/row_sums"),
}  # fmt: skip
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


def as_cpp(text):
    """What is not C++ takes the place of what CUDA calls it."""
    text = re.sub(r'#pragma once|#include "[^"]*"', "", text)
    text = text.replace("extern __shared__ float4 shared[];", "static float4 shared[1 << 14];")
    text = text.replace("__shared__", "static")
    text = re.sub(r'asm\("ld\.[^"]*"[^;]*;', "bits = load<kBytes>(address);", text)
    text = re.sub(r'asm\("cvt\.[^"]*"[^;]*;', "std::abort();", text)
    return re.sub(r'asm\("rcp\.approx[^;]*;"[^;]*;', "reciprocal = 1 / value;", text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a program and returns what it printed, a number."""

    @functools.cache
    def built(program):
        folder = tmp_path_factory.mktemp(program)
        texts = ((KERNELS / f"{name}.cuh").read_text() for name in FILES[program])
        (folder / "kernels.h").write_text("#pragma once\n" + "".join(map(as_cpp, texts)))
        command = [COMPILER, "-std=c++20", "-O1", "-w", f"-I{folder}", f"-I{EMULATION}"]
        source = EMULATION / f"{program}.cc"
        subprocess.run([*command, source, "-o", folder / program], check=True)
        return folder / program

    def run(program, *arguments):
        command = [built(program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return float(done.stdout)

    return run


@pytest.mark.parametrize(
    ("dtype", "variant", "rows", "columns", "matrix"),
    [
        ("float32", "4", 300, 0, "normal"),
        ("float64", "8", 300, 33, "normal"),
        ("float32", "4", 600, 1, "reversed"),
        # The elements of the inverse of the lower factor are too large for float32.
        ("float32", "4, 8", 300, 3, "growth"),
        ("float64", "4, 8", 512, 0, "signs"),
        ("float32", "8", 513, 40, "normal"),
    ],
)
@pytest.mark.one_in(3)
def test_blocked_lu(run, dtype, variant, rows, columns, matrix):
    error = run("blocked_lu", dtype, variant, rows, columns, matrix)
    assert error <= rows * np.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    "types", ["int8 int32", "int8 int64", "uint8 uint8", "int32 int64", "float32 float32"]
)
@pytest.mark.parametrize(("rows", "lanes"), [(1, 8), (4, 32), (1, 256), (4, 256)])
@pytest.mark.parametrize("k", [37, 4127])
@pytest.mark.one_in(2)
def test_row_sums(run, types, rows, lanes, k):
    # Sums of integers are exact.
    error = run("row_sums", types, rows, lanes, k)
    assert error <= (k * np.finfo(np.float32).eps / 2 if "float" in types else 0)
