"""CUDA kernels compiled as C++ for the CPU, with emulated threads: values without a GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
KERNELS = ROOT / "ffi" / "cuda"
FILES = (
    "types",
    "linalg/blocked_lu_pivots",
    "linalg/blocked_lu_update",
    "linalg/block_substitution",
)
COMPILER = shutil.which("g++")


def as_cpp(text):
    """What is not C++ takes the place of what CUDA calls it."""
    text = re.sub(r'#pragma once|#include "[^"]*"', "", text)
    text = text.replace("extern __shared__ float4 shared[];", "static float4 shared[1 << 14];")
    text = text.replace("__shared__", "static")
    return re.sub(r'asm\("rcp\.approx[^;]*;"[^;]*;', "reciprocal = 1 / value;", text)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    texts = ((KERNELS / f"{name}.cuh").read_text() for name in FILES)
    (folder / "kernels.h").write_text("#pragma once\n" + "".join(map(as_cpp, texts)))
    built = folder / "blocked_lu"
    command = [COMPILER, "-std=c++20", "-O1", "-w", f"-I{folder}", f"-I{EMULATION}"]
    subprocess.run([*command, EMULATION / "blocked_lu.cc", "-o", built], check=True)
    return built


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
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
def test_blocked_lu(program, dtype, variant, rows, columns, matrix):
    done = subprocess.run(
        [program, dtype, variant, str(rows), str(columns), matrix],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert float(done.stdout) <= rows * np.finfo(dtype).eps / 2
