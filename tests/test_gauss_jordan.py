"""Inverses by Gauss-Jordan elimination: which matrices, the plan, and values on a Hopper GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import UNIT_ROUNDOFF, on_gpu, random

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.plans.gpu import gpu_target, known_gpu
from jax_tilekern.plans.launch import Buffer, NoKernel, TensorMap
from jax_tilekern.plans.linalg.gauss_jordan import covers, plan_inverse

try:
    nvrtc()
    has_nvrtc = True
except NvrtcNotFound:
    has_nvrtc = False
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason="there is no NVRTC")
needs_hopper = pytest.mark.skipif(
    not on_gpu() or jax.devices()[0].compute_capability != "9.0", reason="there is no Hopper GPU"
)

F32 = np.dtype(np.float32)
ROUNDOFF = UNIT_ROUNDOFF[F32]


def lowered(size):
    a = jax.ShapeDtypeStruct((size, size), F32)
    with gpu_target("sm_90"):
        return jax.jit(linalg.inv).trace(a).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("count", "size", "dtype", "covered"),
    [
        (1, 4096, np.float32, True),
        (1, 5120, np.float32, True),
        (1, 8192, np.float32, True),
        (2, 4096, np.float32, False),
        (1, 4000, np.float32, False),
        (1, 3840, np.float32, False),
        (1, 8448, np.float32, False),
        (1, 4096, np.float64, False),
    ],
)
def test_the_matrices_that_have_a_plan(count, size, dtype, covered):
    assert covers(count, size, np.dtype(dtype)) == covered


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_the_kernels_are_for_hopper(arch):
    found = plan_inverse(4096, known_gpu(arch))
    assert isinstance(found, NoKernel)
    assert arch in found.reason


@needs_nvrtc
def test_the_choice_is_explained():
    with gpu_target("sm_90"):
        (found,) = jtk.explain(linalg.inv, jax.ShapeDtypeStruct((4096, 4096), F32), platform="cuda")
        others = [
            jtk.explain(linalg.inv, jax.ShapeDtypeStruct(shape, F32), platform="cuda")
            for shape in [(4000, 4000), (2, 4096, 4096)]
        ]
    assert found.kernel == "gauss_jordan float32 4096x4096"
    assert "16 products of 256 columns" in found.reason
    assert not any("gauss_jordan" in str(choice.kernel) for choices in others for choice in choices)


@needs_nvrtc
def test_the_kernel_works_on_a_copy_of_the_operand():
    text = lowered(4096)
    assert text.count("stablehlo.custom_call @jax_tilekern_cuda_launch") == 1
    assert "output_tuple_indices = [1], operand_index = 0" in text
    assert "-> (tensor<4096x4096xf32> {" in text or "-> tensor<4096x4096xf32>" in text


@needs_nvrtc
@pytest.mark.parametrize("size", [4096, 4352, 8192])
def test_kernels_compile_without_spills(size):
    plan = plan_inverse(size, known_gpu("sm_90a"))
    entries = {launch.entry.name: launch.entry for launch in plan.launches}
    own = [name for name in entries if "gauss_jordan" in name]
    assert len(own) == 4
    for name in own:
        assert entries[name].spill_bytes == 0
    # A thread of the panel's kernel holds two to four rows of 32 columns.
    (panel,) = (entries[name] for name in own if "panel" in name)
    assert panel.max_threads == 256
    assert 32 * math.ceil(size / 2048) < panel.registers <= 255


@needs_nvrtc
@pytest.mark.parametrize("size", [4096, 4352, 8192])
def test_the_plan_stays_in_its_buffers(size):
    plan = plan_inverse(size, known_gpu("sm_90a"))
    sizes = (*[4 * size * size] * 3, *plan.workspace_bytes)
    used = set()
    for launch in plan.launches:
        for parameter in launch.parameters:
            if isinstance(parameter, TensorMap):
                used.add(parameter.buffer)
                assert parameter.offset_bytes + parameter.extent_bytes <= sizes[parameter.buffer]
            elif isinstance(parameter, Buffer):
                used.add(parameter.index)
                assert parameter.offset_bytes < sizes[parameter.index]
    # The operand itself is neither read nor written.
    assert used == set(range(1, len(sizes)))
    panels = [launch for launch in plan.launches if "panel" in launch.entry.name]
    assert len(panels) == size // 32
    assert {launch.cluster for launch in panels} == {(8, 1, 1)}
    # Kernels of the elimination do not wait for prerequisites, so none may start early.
    assert not any(
        launch.overlaps for launch in plan.launches if "gauss_jordan" in launch.entry.name
    )


# On a Hopper GPU.


def rows_of(n):
    return np.unique(np.append(np.arange(0, n, n // 32), n - 1))


def assert_inverse(a, x):
    """Rows of ``a @ x`` are those of an identity, up to the rounding of sums of n products."""
    a, x = np.asarray(a, np.float64), np.asarray(x, np.float64)
    rows = rows_of(len(a))
    error = np.abs(a[rows] @ x - np.eye(len(a))[rows]).max()
    assert error <= len(a) * ROUNDOFF * (np.abs(a[rows]) @ np.abs(x)).max()


def permuted_triangle(rng, n):
    """Without pivoting, the first pivots would be 0."""
    triangle = np.tril(rng.standard_normal((n, n)), -1) / n**0.5 + 2 * np.eye(n)
    return triangle[rng.permutation(n)]


MATRICES = {
    "random": lambda rng, n: rng.standard_normal((n, n)),
    "permuted triangle": permuted_triangle,
    "reversed identity": lambda _, n: np.eye(n)[::-1],
    "ties": lambda rng, n: rng.choice([-1.0, 1.0], (n, n)),
}


@needs_hopper
@pytest.mark.parametrize("size", [4096, 4352, 8192])
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.one_in(3)
def test_values(rng, kind, size):
    a = jnp.asarray(MATRICES[kind](rng, size), F32)
    with jtk.strict():
        x = jax.jit(linalg.inv)(a)
    assert_inverse(a, x)


@needs_hopper
def test_the_operand_keeps_its_values(rng):
    a = random(rng, (4096, 4096), F32)
    before = np.array(a)
    x = linalg.inv(a)
    assert_inverse(before, x)
    np.testing.assert_array_equal(a, before)


@needs_hopper
@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.at[:, 300].set(0),
        lambda a: jnp.zeros_like(a),
        lambda a: a.at[70, 4000].set(jnp.nan),
        lambda a: a.at[:, 257].set(jnp.inf),
        lambda a: jnp.full_like(a, jnp.nan),
    ],
    ids=["column of zeros", "zeros", "NaN", "column of infinities", "all NaN"],
)
def test_what_has_no_inverse_is_not_finite(rng, damage):
    """And the kernels end: their loops do not depend on values."""
    a = damage(random(rng, (4096, 4096), F32))
    x = np.asarray(linalg.inv(a))
    assert not np.isfinite(x).all()
    if np.isnan(a).any():
        assert np.isnan(x).any()


@needs_hopper
def test_gradient(rng):
    """The gradient of ``u @ inv(a) @ v`` is ``-outer(u @ x, x @ v)``."""
    n = 4096
    a = random(rng, (n, n), F32)
    u, v = random(rng, (n,), F32), random(rng, (n,), F32)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(u[:, None] * linalg.inv(a) * v)))(a)
    x, u, v = (np.asarray(value, np.float64) for value in (linalg.inv(a), u, v))
    expected = -np.outer(u @ x, x @ v)
    # Two products of sums of n, and the rounding of u * v.
    bound = 3 * n * ROUNDOFF * np.outer(np.abs(u) @ np.abs(x), np.abs(x) @ np.abs(v))
    assert np.all(np.abs(np.asarray(gradient, np.float64) - expected) <= bound)
