"""Plans of decompositions: emulated values without a GPU, and what their kernels compile to."""

import json
from pathlib import Path

import emulated_plans
import jax
import numpy as np
import pytest
from nvrtc_mark import needs_emulator

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.decompositions import Decomposition, plan_decomposition

try:
    nvrtc()
except NvrtcNotFound as error:
    pytest.skip(str(error), allow_module_level=True)

H100 = known_gpu("sm_90")
TYPES = (np.dtype(np.float32), np.dtype(np.float64))
# A full CTA, one that is partly filled, and no multiple of what a CTA has.
COUNT = 43
NOT_FINITE = 7
RANDOM = [0, 15, 20, 35, 40]
TIMES = Path(__file__).parents[1] / "benchmarks" / "results" / "h200" / "times.jsonl"
# Microseconds of the kernel and of XLA: of an operation, rows, a count, columns of others than
# square matrices, and a type.
MEASURED = {
    tuple(x["matrices"]): (x["microseconds"]["first"], x["microseconds"]["xla"])
    for x in map(json.loads, TIMES.read_text().splitlines())
    if "first" in x.get("microseconds", ()) and "matrices" in x
}


def matrices(rng, m, n, dtype):
    """Random ones, graded, of rank 1, zero, huge and identities; one is not finite."""
    a = rng.standard_normal((COUNT, m, n))
    a[1::5] = 1
    a[2::5] = 0
    a[3::5] *= 1e30
    a[4::5] = np.eye(m, n)
    # Graded from either end.
    a[5::20] *= 10.0 ** -np.arange(m)[:, None]
    a[10::20] *= 10.0 ** -np.arange(m)[::-1, None]
    a[NOT_FINITE, -1, -1] = np.nan
    return a.astype(dtype)


def problem_of(name, a, *flags):
    return Decomposition(name, *a.shape, a.dtype, flags)


def run(problem, a, shapes, *options, **how):
    vectors = problem.flags[0]
    written = tuple(range(len(shapes))) if vectors else (0,) * (3 if problem.name == "svd" else 2)
    with emulated_plans.record() as recorded:
        plan = plan_decomposition(problem, written, H100)
    assert not isinstance(plan, NoKernel), plan
    results = [((len(a), *shape), a.dtype) for shape in shapes]
    return emulated_plans.run_plan(plan, recorded, [a], results, options=options, **how)


def check(found, a, *bases):
    """Compare products of factors with the matrices, and the bases' columns with orthonormal."""
    finite = np.arange(COUNT) != NOT_FINITE
    bound = 6 * max(a.shape[1:]) * np.finfo(a.dtype).eps
    norms = np.linalg.norm(a[finite].astype(np.float64), axis=(-2, -1))
    assert np.all(np.linalg.norm(found - a, axis=(-2, -1))[finite] <= bound * norms)
    for basis in bases:
        difference = basis.mT @ basis - np.eye(basis.shape[-1])
        assert np.abs(difference[finite]).max() <= bound


@needs_emulator
@pytest.mark.parametrize(
    ("m", "n", "full", "dtype"),
    [
        (1, 1, False, np.float32), (3, 3, True, np.float64), (4, 2, True, np.float32),
        (7, 7, False, np.float32), (6, 16, False, np.float64), (20, 5, True, np.float32),
        (33, 33, False, np.float64),
    ],
)  # fmt: skip
@pytest.mark.one_in(60)
def test_svd_and_qr(rng, m, n, full, dtype):
    k = min(m, n)
    a = matrices(rng, m, n, dtype)
    shapes = [(k,), (m, m if full else k), (n if full else k, n)]
    s, u, vt = run(problem_of("svd", a, True, full), a, shapes)
    assert np.isnan(s[NOT_FINITE]).all()
    assert np.isnan(u[NOT_FINITE]).all()
    assert np.isnan(vt[NOT_FINITE]).all()
    finite = np.arange(COUNT) != NOT_FINITE
    assert np.all(s[finite] >= 0)
    assert np.all(np.diff(s[finite]) <= 0)
    wide = [x.astype(np.float64) for x in (s, u, vt)]
    product = wide[1][..., :k] * wide[0][:, None] @ wide[2][:, :k]
    check(product, a, wide[1], wide[2].mT)
    (alone,) = run(problem_of("svd", a, False, full), a, shapes[:1], backwards=True)
    np.testing.assert_array_equal(alone, s)

    shapes = [(m, m if full else k), (m if full else k, n)]
    q, r = run(problem_of("qr", a, True, full), a, shapes)
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    check(q.astype(np.float64) @ r, a, q.astype(np.float64))
    signs = np.sign(np.diagonal(np.linalg.qr(a[RANDOM].astype(np.float64)).R, axis1=1, axis2=2))
    found = np.sign(np.diagonal(r, axis1=1, axis2=2))[RANDOM]
    np.testing.assert_array_equal(found, signs)
    (alone,) = run(problem_of("qr", a, False, full), a, shapes[1:])
    np.testing.assert_array_equal(alone, r)


@needs_emulator
@pytest.mark.parametrize(
    ("n", "flags", "dtype"),
    [
        (3, (True, True), np.float32), (1, (True, True), np.float64),
        (4, (False, False), np.float64), (7, (True, False), np.float64),
        (16, (True, True), np.float32), (33, (False, True), np.float32),
    ],
)  # fmt: skip
@pytest.mark.one_in(6)
def test_eigh(rng, n, flags, dtype):
    a = matrices(rng, n, n, dtype)
    a[NOT_FINITE] = np.nan
    w, v = run(problem_of("eigh", a, True, *flags), a, [(n,), (n, n)])
    assert np.isnan(w[NOT_FINITE]).all()
    assert np.isnan(v[NOT_FINITE]).all()
    finite = np.arange(COUNT) != NOT_FINITE
    assert np.all(np.diff(w[finite]) >= 0)
    lower, symmetrize = flags
    if symmetrize:
        symmetric = a / 2 + a.mT / 2
    else:
        kept = np.tril(a) if lower else np.triu(a)
        symmetric = kept + np.triu(kept.mT, 1) if lower else kept + np.tril(kept.mT, -1)
    wide = v.astype(np.float64)
    check(wide * w[:, None] @ wide.mT, symmetric, wide)
    (alone,) = run(problem_of("eigh", a, False, *flags), a, [(n,)], backwards=True)
    np.testing.assert_array_equal(alone, w)


@needs_emulator
@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.thorough
def test_memory_under_sanitizers(rng, n):
    a = matrices(rng, n + 1, n, np.float32)
    run(
        problem_of("svd", a, True, True),
        a,
        [(n,), (n + 1, n + 1), (n, n)],
        *emulated_plans.SANITIZED,
    )
    run(problem_of("qr", a, True, True), a, [(n + 1, n + 1), (n + 1, n)], *emulated_plans.SANITIZED)
    square = matrices(rng, n, n, np.float32)
    run(
        problem_of("eigh", square, True, True, True),
        square,
        [(n,), (n, n)],
        *emulated_plans.SANITIZED,
    )


def problems(m, n, dtype):
    for vectors in (False, True):
        for full in (False, True):
            yield Decomposition("svd", 1000, m, n, dtype, (vectors, full))
            yield Decomposition("qr", 1000, m, n, dtype, (vectors, full))
        if m == n:
            for flags in ((True, True), (False, False)):
                yield Decomposition("eigh", 1000, n, n, dtype, (vectors, *flags))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("arch", "shape"),
    [("sm_80", (3, 3)), ("sm_80", (17, 9)), ("sm_90a", (4, 4)), ("sm_90a", (2, 4)),
     ("sm_90a", (8, 8)), ("sm_90a", (64, 64)), ("sm_90a", (5, 64))],
    ids=str,
)  # fmt: skip
@pytest.mark.one_in(7)
def test_kernels_compile(arch, shape, dtype):
    found = list(problems(*shape, dtype))
    compiled = compile_kernels(*(each.kernel for each in found), arch=arch)
    assert compiled.log == ""
    for each in found:
        entry = compiled.entry(each.kernel.name)
        assert entry.spill_bytes == 0, each.kernel.name
        # A matrix of one thread is in registers.
        assert entry.stack_bytes == 0, each.kernel.name
        assert entry.max_threads == 32


def test_what_is_lowered_for_a_gpu():
    calls = [
        (linalg.svd, (50, 3, 3), "matrix_svd float32 3x3", "50 matrices, a thread each"),
        (linalg.svdvals, (50, 9, 64), "matrix_svd float32 9x64", "50 matrices, 8 lanes each"),
        (linalg.eigh, (50, 32, 32), "matrix_eigh float32 32x32", "50 matrices, 8 lanes each"),
        (linalg.qr, (50, 8, 5), "matrix_qr float32 8x5", "50 matrices, 8 lanes each"),
    ]
    for function, shape, kernel, reason in calls:
        a = jax.ShapeDtypeStruct(shape, np.float32)
        with jtk.gpu_target("sm_90"):
            (choice,) = jtk.explain(function, a, platform="cuda")
        assert choice.kernel == kernel
        assert choice.reason == f'{reason}; jax_tilekern.policy("kernels")'


@pytest.mark.parametrize("gpu", ["H200", "H100"])
def test_what_is_measured_to_be_faster_is_the_default(gpu):
    # Calls that an H200 has measured.
    for name, rows, columns, dtype, count in (
        ("svd", 32, 32, np.float32, 1),
        ("svd", 32, 32, np.float32, 30),
        ("svd", 32, 32, np.float32, 1000),
        ("svd", 64, 64, np.float32, 30),
        ("svd", 64, 64, np.float64, 1),
        ("eigh", 4, 4, np.float32, 10),
        ("eigh", 16, 16, np.float32, 300),
        ("eigh", 16, 16, np.float32, 10_000),
        ("eigh", 32, 32, np.float64, 1),
        ("eigh", 64, 64, np.float64, 1000),
        ("qr", 32, 32, np.float64, 1),
        ("qr", 64, 64, np.float64, 1),
        ("qr", 64, 64, np.float32, 30),
        ("qr", 64, 16, np.float32, 1),
    ):
        flags = (True, True, True)[: 3 if name == "eigh" else 2]
        problem = Decomposition(name, count, rows, columns, np.dtype(dtype), flags)
        with jtk.policy("auto"):
            plan = plan_decomposition(problem, (0,) * (3 if name == "svd" else 2), known_gpu(gpu))
        # The times that are kept, within what the nearest others change them by.
        ours, xla = plan.predicted_us
        assert isinstance(plan, NoKernel) == (ours > xla)
        measured = MEASURED[name, rows, count, columns % rows, np.dtype(dtype).name]
        np.testing.assert_allclose((ours, xla), measured, rtol=0.1)
        assert "data of NVIDIA H200" in plan.reason


def test_plans_that_no_launch_has():
    dtype = np.dtype(np.float64)
    problem = Decomposition("svd", 100, 64, 63, dtype, (True, True))
    small = plan_decomposition(problem, (0, 1, 2), known_gpu("sm_89"))
    assert "bytes of shared memory" in small.reason
    many = Decomposition("qr", 2**37, 4, 4, dtype, (True, True))
    assert isinstance(plan_decomposition(many, (0, 1), H100), NoKernel)
