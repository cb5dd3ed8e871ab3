"""CUDA kernels compiled as C++ for the CPU, with emulated threads: values without a GPU."""

import functools

import numpy as np
import pytest
from emulated import COMPILER, as_cpp, build, output_of

from jax_tilekern.plans.segments.map_text import SegmentMap
from jax_tilekern.plans.segments.problem import MapOperand, MapText, SegmentReduction

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
        "types.cuh", "linalg/matrix_copy.cuh", "linalg/matrix_numbers.cuh",
        "linalg/matrix_rows.cuh", "linalg/matrix_inverse.cuh",
    ),
    "row_sums": (
        "types.cuh", "convert.cuh", "reduction/reduction.cuh", "reduction/row_sums.cuh",
    ),
    "segments": (
        "types.cuh", "convert.cuh", "ptx.h", "scalars.h", "reduction/reduction.cuh",
        "segments/segments.cuh", "segments/index_sort.cuh", "segments/sorted_segments.cuh",
        "segments/few_segments.cuh", "segments/scanned_segments.cuh", "segments/top_k.cuh",
    ),
    "expert_rows": (
        "types.cuh", "convert.h", "reduction/reduction.cuh", "grouped_gemm/expert_rows.cuh",
    ),
}  # fmt: skip
# Threads leave their stacks by longjmp, which are not checked therefore.
SANITIZED = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param", "asan-stack=0",
)  # fmt: skip
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a program and returns what it printed, a number."""

    @functools.cache
    def built(program):
        folder = tmp_path_factory.mktemp(program)
        options = SANITIZED if program in ("segments", "expert_rows") else ()
        if program == "segments":
            (folder / "generated_map.h").write_text(as_cpp(_generated_map()))
            options = ("-DGENERATED_MAP", *options)
        return build(program, FILES[program], folder, *options)

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


def _generated_map():
    """The map of a product of rows of 8 columns that edges gather and a number of each edge."""
    int32 = np.dtype(np.int32)
    reduction = SegmentReduction(
        "sum", 1, 1, 1, 8, (MapOperand(int32, 50, 0), MapOperand(int32, 1, None, broadcast=True)),
        1, MapText(("int", "int"), (), "lax::mul(x0, x1)"), int32, int32, ordered=True,
    )  # fmt: skip
    kernel = SegmentMap(reduction, 4).kernel("segments/sorted_segments.cuh", "reduce_sorted")
    return kernel.source.text


@pytest.mark.parametrize("ids", ["random", "equal", "outside"])
@pytest.mark.parametrize(
    ("rows", "segments", "items"), [(3000, 60, 4), (1, 1, 4), (4000, 3000, 12), (7000, 300000, 12)]
)
@pytest.mark.one_in(4)
def test_index_sort(run, ids, rows, segments, items):
    assert run("segments", "sort", ids, rows, segments, items) == 0


@pytest.mark.parametrize("lanes", [1, 4, 16, 32])
@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize(
    ("ids", "edges", "segments", "batches", "columns"),
    [
        ("random", 3000, 40, 1, 5),
        ("random", 3000, 40, 3, 20),
        ("random", 300, 2000, 2, 36),
        ("equal", 3000, 1, 1, 8),
        ("equal", 40, 7, 1, 1),
        ("outside", 500, 7, 1, 3),
        ("random", 1, 1, 1, 1),
    ],
)
@pytest.mark.one_in(4)
def test_reductions_of_sorted_edges(run, ids, edges, segments, batches, columns, lanes, ordered):
    arguments = ids, edges, segments, batches, columns, lanes, ordered
    assert run("segments", "sorted", *arguments) == 0


@pytest.mark.parametrize("lanes", [1, 4, 16, 32])
@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.one_in(2)
def test_orders_and_bounds_that_are_none_access_nothing_out_of_bounds(run, lanes, ordered):
    assert run("segments", "hostile", lanes, ordered) == 0


@pytest.mark.parametrize("ids", ["random", "equal", "outside"])
@pytest.mark.parametrize("kind", ["few", "scanned"])
@pytest.mark.parametrize(("edges", "segments", "columns"), [(3000, 5, 6), (700, 1, 1), (1, 8, 4)])
def test_reductions_of_few_segments_or_edges(run, ids, kind, edges, segments, columns):
    assert run("segments", kind, ids, edges, segments, columns) == 0


def test_generated_maps(run):
    assert run("segments", "map", 3000, 40) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(9, 100, 7), (5, 128, 64), (1, 1, 1), (3, 1000, 20)]
)
def test_top_k(run, rows, columns, k):
    assert run("segments", "top_k", rows, columns, k) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("places", ["permutation", "outside", "dropped"])
@pytest.mark.parametrize(
    ("tokens", "chosen", "columns"), [(300, 3, 40), (37, 2, 520), (50, 9, 7), (1, 1, 1), (0, 2, 8)]
)
@pytest.mark.thorough
def test_rows_of_experts(run, dtype, places, tokens, chosen, columns):
    arguments = dtype, tokens, chosen, columns, places
    assert run("expert_rows", "spread", *arguments) == 0
    for arrays in (1, 2) if dtype != "int8" else ():
        assert run("expert_rows", "combine", *arguments, arrays) == 0
