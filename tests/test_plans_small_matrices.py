"""Plans for small matrices: sizes agree with the kernels', and these compile to what is assumed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.small_matrices import (
    DTYPES,
    Columns,
    SmallMatrices,
    cholesky_kernel,
    columns_at_once,
    columns_per_block,
    inverse_kernel,
    lu_kernel,
    plan_columns,
    plan_matrices,
    solve_kernel,
    triangular_solve_kernel,
)

H100 = known_gpu("sm_90")
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def test_lanes_and_blocks():
    def layout(n, dtype=F32, kernel=inverse_kernel):
        chosen = kernel(SmallMatrices(1000, n, dtype))
        return chosen.lanes, chosen.threads, chosen.blocks, chosen.alignment

    assert layout(1) == (2, 128, 16, 16)
    assert layout(3) == (4, 128, 32, 16)
    assert layout(8) == (8, 128, 63, 16)
    assert layout(31) == (32, 128, 250, 4)
    assert layout(33) == (64, 64, 1000, 4)
    assert layout(34) == (64, 64, 1000, 16)
    assert layout(17, F64) == (32, 128, 250, 8)


def test_lanes_and_blocks_of_cholesky_factors():
    def layout(n, dtype=F32):
        chosen = cholesky_kernel(SmallMatrices(1000, n, dtype), symmetrize=True)
        return chosen.lanes, chosen.threads, chosen.blocks, chosen.alignment

    assert layout(1) == (1, 32, 32, 16)
    assert layout(3) == (1, 32, 32, 16)
    assert layout(5) == (2, 32, 63, 16)
    assert layout(16) == (4, 32, 125, 16)
    assert layout(17) == (16, 32, 500, 8)
    assert layout(33) == (32, 32, 1000, 4)
    assert layout(64) == (32, 32, 1000, 16)
    assert layout(3, F64) == (2, 32, 63, 16)
    assert layout(33, F64) == (32, 32, 1000, 8)


def test_threads_solve_small_systems_with_few_right_hand_sides():
    def lanes(n, m):
        return solve_kernel(SmallMatrices(1000, n, F32), Columns(m), transpose=False).lanes

    assert [lanes(n, 1) for n in (1, 3, 8, 9)] == [1, 1, 1, 16]
    assert [lanes(8, m) for m in (1, 2, 3)] == [1, 1, 8]


def test_columns_are_shared_where_there_are_few_matrices():
    assert columns_per_block(1, Columns(10), H100) == 10
    assert columns_per_block(1, Columns(1000), H100) == 64
    assert columns_per_block(10**5, Columns(1000), H100) == 1000
    huge = columns_per_block(1, Columns(2**30), H100)
    assert huge % 8 == 0
    assert -(-(2**30) // huge) <= 65535
    assert [columns_at_once(Columns(m)) for m in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 8]


def test_plans_that_no_launch_has():
    one, columns = SmallMatrices(1, 4, F32), Columns(2**31)
    too_many = plan_columns(solve_kernel(one, columns, transpose=False), columns, H100)
    assert isinstance(too_many, NoKernel)
    old = plan_matrices(inverse_kernel(one), 1, known_gpu("sm_75"))
    assert old == NoKernel("sm_75 is older than sm_80")
    many = SmallMatrices(2**37, 4, F32)
    assert isinstance(plan_matrices(inverse_kernel(many), 1, H100), NoKernel)


def _has_nvrtc():
    try:
        nvrtc()
    except NvrtcNotFound:
        return False
    return True


with_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="there is no NVRTC")


def _kernels(n, dtype):
    matrices = SmallMatrices(1000, n, dtype)
    yield inverse_kernel(matrices)
    yield lu_kernel(matrices)
    for flag in (False, True):
        yield cholesky_kernel(matrices, symmetrize=flag)
        for m in (1, 9):
            yield solve_kernel(matrices, Columns(m), transpose=flag)
        for lower, transpose in itertools.product((False, True), repeat=2):
            yield triangular_solve_kernel(
                matrices, Columns(1), lower=lower, transpose=transpose, unit_diagonal=flag
            )


@with_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("arch", "n"),
    [("sm_80", 7), ("sm_90a", 2), ("sm_90a", 8), ("sm_90a", 31), ("sm_90a", 64), ("sm_120", 16)],
)
@pytest.mark.one_in(5)
def test_kernels_compile(arch, n, dtype):
    found = list(_kernels(n, dtype))
    compiled = compile_kernels(*(each.kernel for each in found), arch=arch)
    assert compiled.log == ""
    for each in found:
        name = each.kernel.name
        entry = compiled.entry(name)
        # NVRTC 13.0 spills four registers of matrix_solve<float, 31, 8, 0>, which 13.5 does not.
        assert entry.spill_bytes <= (16 if nvrtc().version < (13, 5) else 0), name
        assert entry.max_threads == each.threads
        assert entry.shared_memory_bytes <= 48 << 10


@with_nvrtc
def test_what_is_lowered_for_a_gpu():
    a, b = jnp.ones((50, 6, 6)), jnp.ones((50, 6, 3))
    with jtk.gpu_target("sm_90"):
        for function, args, kernel, lanes in (
            (linalg.inv, (a,), "matrix_inverse", "8 lanes"),
            (linalg.solve, (a, b[..., :2]), "thread_matrix_solve", "a thread"),
            (linalg.cholesky, (a,), "matrix_cholesky", "2 lanes"),
            (linalg.lu_factor, (a,), "matrix_lu", "8 lanes"),
            (linalg.solve_triangular, (a, b), "matrix_triangular_solve", "8 lanes"),
        ):
            (choice,) = jtk.explain(function, *args, platform="cuda")
            assert choice.kernel == f"{kernel} float32 6x6"
            assert choice.reason == f"50 matrices, {lanes} each"
        choices = jtk.explain(
            jax.grad(lambda a, b: linalg.solve(a, b).sum()), a, b, platform="cuda"
        )
        # The value, its transposed solve, and a product.
        assert len(choices) == 3
        assert None not in [choice.kernel for choice in choices]
