"""Plans for small matrices: sizes agree with the kernels', and these compile to what is assumed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.small_matrices import (
    DTYPES,
    Columns,
    SmallMatrices,
    cholesky_kernel,
    columns_per_block,
    inverse_kernel,
    lu_kernel,
    plan_columns,
    plan_matrices,
    solve_kernel,
    triangular_solve_kernel,
)

H100 = known_gpu("sm_90")
F32 = np.dtype(np.float32)


def test_plans_that_no_launch_has():
    one, columns = SmallMatrices(1, 4, F32), Columns(2**31)
    too_many = plan_columns(solve_kernel(one, columns, transpose=False), columns, H100)
    assert isinstance(too_many, NoKernel)
    many = SmallMatrices(2**37, 4, F32)
    assert isinstance(plan_matrices(inverse_kernel(many), 1, H100), NoKernel)


@pytest.mark.parametrize(
    ("count", "size", "sides", "at_once", "of_cta"),
    [(104, 3, 10, 1, 1), (1, 64, 1000, 4, 4), (500, 64, 64, 8, 64), (100_000, 4, 3, 4, 3)],
)
def test_few_triangular_systems_have_ctas_of_few_sides(count, size, sides, at_once, of_cta):
    matrices, columns = SmallMatrices(count, size, F32), Columns(sides)
    kernel = triangular_solve_kernel(
        matrices, columns, lower=True, transpose=False, unit_diagonal=False
    )
    assert (kernel.columns, columns_per_block(kernel, columns, H100)) == (at_once, of_cta)


def _kernels(matrices):
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


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("arch", "n"),
    [("sm_80", 7), ("sm_90a", 2), ("sm_90a", 8), ("sm_90a", 31), ("sm_90a", 64), ("sm_120", 16)],
)
@pytest.mark.one_in(15)
def test_kernels_compile(arch, n, dtype):
    found = list(_kernels(SmallMatrices(1000, n, dtype)))
    compiled = compile_kernels(*(each.kernel for each in found), arch=arch)
    assert compiled.log == ""
    for each in found:
        name = each.kernel.name
        entry = compiled.entry(name)
        # NVRTC 13.0 spills four registers of matrix_solve<float, 31, 8, 0>, which 13.5 does not.
        assert entry.spill_bytes <= (16 if nvrtc().version < (13, 5) else 0), name
        assert entry.max_threads == each.threads
        assert entry.shared_memory_bytes <= 48 << 10


@needs_nvrtc
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
            assert choice.reason == f'50 matrices, {lanes} each; jax_tilekern.policy("kernels")'
        choices = jtk.explain(
            jax.grad(lambda a, b: linalg.solve(a, b).sum()), a, b, platform="cuda"
        )
        # The value, its transposed solve, and a product.
        assert len(choices) == 3
        assert None not in [choice.kernel for choice in choices]
