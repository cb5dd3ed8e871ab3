"""CUDA kernels compiled as C++ for the CPU, with emulated threads: values without a GPU."""

import functools

import numpy as np
import pytest
from emulated import COMPILER, build, output_of

# The kernels of each program in tests/emulation.
FILES = {
    "blocked_lu": (
        "types.cuh", "ptx.h", "linalg/blocked_lu_pivots.cuh", "linalg/blocked_lu_update.cuh",
        "linalg/block_substitution.cuh",
    ),
    "blocked_cholesky": (
        "types.cuh", "ptx.h", "linalg/matrix_copy.cuh", "linalg/blocked_cholesky_panel.cuh",
        "linalg/blocked_cholesky.cuh",
    ),
    "small_inverse": (
        "types.cuh", "linalg/matrix_copy.cuh", "linalg/matrix_rows.cuh",
        "linalg/matrix_inverse.cuh",
    ),
    "row_sums": (
        "types.cuh", "convert.cuh", "reduction/reduction.cuh", "reduction/row_sums.cuh",
    ),
}  # fmt: skip
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a program and returns what it printed, a number."""

    @functools.cache
    def built(program):
        return build(program, FILES[program], tmp_path_factory.mktemp(program))

    return lambda program, *arguments: output_of(built(program), *arguments)


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
@pytest.mark.one_in(6)
def test_blocked_lu(run, dtype, variant, rows, columns, matrix):
    error = run("blocked_lu", dtype, variant, rows, columns, matrix)
    assert error <= rows * np.finfo(dtype).eps / 2


@pytest.mark.parametrize("rows", [64, 300, 401, 130])
@pytest.mark.parametrize("symmetrize", [0, 1])
@pytest.mark.parametrize("matrix", ["normal", "graded"])
@pytest.mark.one_in(5)
def test_blocked_cholesky(run, rows, symmetrize, matrix):
    error = run("blocked_cholesky", rows, symmetrize, matrix)
    assert error <= rows * np.finfo(np.float32).eps / 2


@pytest.mark.parametrize("matrix", ["indefinite", "nearly", "zero", "infinite"])
@pytest.mark.one_in(4)
def test_blocked_cholesky_of_what_is_not_positive_definite(run, matrix):
    assert run("blocked_cholesky", 200, 1, matrix) == -1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 3, 17, 33])
@pytest.mark.one_in(4)
def test_inverses_of_small_matrices(run, dtype, size):
    error = run("small_inverse", dtype, size)
    assert error <= 8 * size * np.finfo(dtype).eps


@pytest.mark.parametrize("types", ["uint32 int32", "float32 float32"])
@pytest.mark.parametrize(("rows", "lanes"), [(1, 8), (4, 32), (1, 256), (4, 256)])
@pytest.mark.parametrize("k", [37, 4127])
@pytest.mark.one_in(2)
def test_row_sums(run, types, rows, lanes, k):
    # Sums of integers are exact.
    error = run("row_sums", types, rows, lanes, k)
    assert error <= (k * np.finfo(np.float32).eps / 2 if "float" in types else 0)
