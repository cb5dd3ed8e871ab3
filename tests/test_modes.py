"""Modes of JAX, ``strict()`` and ``policy()``, what a failed compilation does, and the logger."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import call_of
from numerics import assert_close, on_gpu

import jax_tilekern as jtk
from jax_tilekern.compilation import nvrtc
from jax_tilekern.interop import outcomes
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops import planned_kernel
from jax_tilekern.ops.products import contraction_lowering
from jax_tilekern.plans.launch import PlanError

X = jax.ShapeDtypeStruct((24, 40), jnp.float32)
INT16 = jax.ShapeDtypeStruct((24, 24), jnp.int16)
SQUARE = jax.ShapeDtypeStruct((24, 24), jnp.float32)
CALLS = ("matmul", "dot", "vdot", "matvec", "vecmat", "ragged_dot", "sum", "transpose", "add")


def call(name):
    described, arrays = call_of(name)
    return lambda *xs: described.function(jtk, *xs), arrays


def lowered(function, *args, platform="cpu"):
    # A function of its own, of which JAX has kept nothing.
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def no_kernel_compiles(monkeypatch, tmp_path):
    """Every compilation fails; returns what was tried."""
    tried = []

    def compile(self, source, *, name, **rest):
        tried.append(name)
        raise nvrtc.CompileError(f"NVRTC_ERROR in {name} of its file:\nline 7: oops", "oops")

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile)
    monkeypatch.setattr(nvrtc, "nvrtc_identity", lambda: str(tmp_path))
    monkeypatch.setattr("jax_tilekern.compilation.compiler.nvrtc_identity", lambda: str(tmp_path))
    # Nothing that was planned before is planned again.
    monkeypatch.setattr(planned_kernel, "_plan_once", planned_kernel._plan_once.__wrapped__)
    return tried


@pytest.mark.parametrize("name", CALLS)
def test_xlas_policy_leaves_every_call_to_xla(name):
    function, args = call(name)
    with jtk.strict():
        assert "tilekern_cpu" in lowered(function, *args)
    with jtk.policy("xla"):
        assert "tilekern_cpu" not in lowered(function, *args)
        assert "custom_call" not in lowered(function, *args)
        (choice,) = jtk.explain(function, *args, platform="cpu")
        assert choice.kernel is None
        assert 'jax_tilekern.policy("xla")' in choice.reason


@pytest.mark.parametrize("name", ["matmul", "ragged_dot", "sum"])
def test_the_policy_is_part_of_jits_key(name):
    function, values = call(name)
    run = jax.jit(function)
    ours = run(*values)
    with jtk.policy("xla"):
        theirs = run(*values)
    assert run._cache_size() == 2
    # TF32 on a GPU.
    assert_close(ours, theirs, 1e-2 if on_gpu() else 1e-4)


def test_a_fallback_is_an_error_in_strict():
    lowered(jtk.matmul, INT16, INT16)
    message = re.escape(
        "mk,kn->mn falls back to XLA on cpu, which jax_tilekern.strict() forbids: "
        "no kernel for int16"
    )
    with jtk.strict(), pytest.raises(jtk.FallbackError, match=message):
        lowered(jtk.matmul, INT16, INT16)
    with jtk.strict(allow_fallbacks=True):
        lowered(jtk.matmul, INT16, INT16)


@pytest.mark.defaults
def test_calls_without_a_kernel_to_lose_are_no_error_in_strict():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    row, empty = x.update(shape=(1, 8)), x.update(shape=(0, 8))
    with jtk.strict():
        lowered(lambda x: jtk.top_k(x, 3), x)
        lowered(lambda x: jtk.top_k(x, 0), x, platform="cuda")
        for platform in ("cpu", "cuda"):
            lowered(jtk.matmul, empty, x, platform=platform)
            lowered(jtk.transpose, row, platform=platform)
            lowered(lambda x: jtk.einsum("i,j->ij", x, x), x.update(shape=(8,)), platform=platform)


def test_the_inner_policy_counts():
    with jtk.strict(), jtk.policy("xla"):
        lowered(jtk.matmul, INT16, INT16)
        with jtk.policy("kernels"):
            assert "tilekern_cpu" in lowered(jtk.matmul, SQUARE, SQUARE)


def test_a_failed_compilation_is_a_warning(no_kernel_compiles):
    message = r"(?s)leaves a call to XLA.*NVRTC_ERROR in tilekern::.* of its file \(inside"
    with outcomes.entered("DEFAULT"), gpu_target("sm_90"):
        with pytest.warns(RuntimeWarning, match=message):
            text = lowered(jtk.matmul, SQUARE, SQUARE, platform="cuda")
        assert "stablehlo.dot_general" in text
        assert "custom_call" not in text
        with pytest.warns(RuntimeWarning, match=message):
            (choice,) = jtk.explain(jtk.matmul, SQUARE, SQUARE, platform="cuda")
    assert choice.reason.startswith("its kernel failed: NVRTC_ERROR in tilekern::")
    assert "\n" not in choice.reason


@pytest.mark.parametrize("allow_fallbacks", [False, True])
def test_a_failed_compilation_is_an_error_in_strict(no_kernel_compiles, allow_fallbacks):
    strict = jtk.strict(allow_fallbacks=allow_fallbacks)
    with strict, gpu_target("sm_90"), pytest.raises(jtk.CompileError, match="line 7: oops"):
        lowered(jtk.matmul, SQUARE, SQUARE, platform="cuda")


def test_a_refused_plan_is_a_warning(monkeypatch):
    def refused(product, gpu):
        raise PlanError("plan wgmma: grid (0, 1, 1) has a dimension below 1")

    monkeypatch.setattr(contraction_lowering, "plan_matmul", refused)
    with outcomes.entered("DEFAULT"), gpu_target("sm_90"):
        with pytest.warns(RuntimeWarning, match=r"plan wgmma: grid \(0, 1, 1\)"):
            text = lowered(jtk.matmul, SQUARE, SQUARE, platform="cuda")
        assert "custom_call" not in text
    with gpu_target("sm_90"), pytest.raises(PlanError, match="plan wgmma"):
        lowered(jtk.matmul, SQUARE, SQUARE, platform="cuda")


def test_kernels_of_the_user(monkeypatch):
    source = "__global__ void twice(const float* x, float* y) { y[0] = 2 * x[0]; }"
    plain = jtk.cuda_kernel(source, out=lambda x: x, grid=(1,), block=(1,))
    with_reference = jtk.cuda_kernel(
        source, out=lambda x: x, grid=(1,), block=(1,), reference=lambda x: 2 * x
    )
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    with gpu_target("sm_90"):
        assert "custom_call" in lowered(with_reference, x, platform="cuda")
        with jtk.policy("xla"):
            assert "custom_call" not in lowered(with_reference, x, platform="cuda")
            with pytest.raises(NotImplementedError, match="twice has no reference="):
                lowered(plain, x, platform="cuda")


def test_fallbacks_are_logged(caplog):
    caplog.set_level(logging.INFO, "jax_tilekern")
    lowered(jtk.matmul, INT16, INT16)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "on cpu falls back to XLA: no kernel for int16" in record.getMessage()


@pytest.mark.skipif(len(jax.devices()) < 4, reason="takes four devices")
def test_modes_reach_calls_that_xla_partitions(rng):
    """They are planned while the program is compiled, perhaps on another thread."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d", None))
    x = jax.device_put(rng.standard_normal((8, 8)).astype(np.float32), rows)
    w = rng.standard_normal((8, 8)).astype(np.float32)
    run = jax.jit(lambda x, w: jtk.matmul(x, w))
    with jtk.strict():
        compiled = run.lower(x, w).compile()
    assert "jax_tilekern_" in compiled.as_text()
    with jtk.policy("xla"):
        assert "jax_tilekern_" not in run.lower(x, w).compile().as_text()
    assert_close(compiled(x, w), np.asarray(x) @ w)
    with jtk.strict(), pytest.raises(Exception, match="forbids: no kernel for int16"):
        jax.jit(jtk.matmul).lower(x.astype(np.int16), w.astype(np.int16)).compile()


def test_a_program_for_gpus_without_a_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr("jax_tilekern.plans.gpu._visible_gpu", lambda: "no NVIDIA driver")
    message = r'a program for GPUs to XLA: no NVIDIA driver; .* jax_tilekern\.gpu_target\("H100"\)'
    with pytest.warns(RuntimeWarning, match=message):
        assert "jax_tilekern" not in lowered(
            jtk.matmul, X, X.update(shape=(40, 8)), platform="cuda"
        )
    with pytest.warns(RuntimeWarning, match=message):
        jax.export.export(jax.jit(lambda x: jtk.sum(x)), platforms=["cuda"])(X)
    # Where a warning would say nothing new, or nothing true.
    jtk.explain(jtk.sum, X, platform="cuda")
    lowered(jtk.matmul, INT16, INT16, platform="cuda")
    lowered(jtk.sum, X)
    with jtk.policy("xla"):
        lowered(jtk.sum, X, platform="cuda")
    with jtk.strict(), pytest.raises(jtk.FallbackError, match="no NVIDIA driver"):
        lowered(jtk.sum, X, platform="cuda")
    with gpu_target("T4"):
        lowered(jtk.sum, X, platform="cuda")


def in_float64(function):
    """Return a function that computes in float64 where x64 is a context inside it."""

    def scoped(*xs):
        with jax.enable_x64(True):
            results = function(*(x.astype(np.float64) for x in xs))
            return jax.tree.map(lambda y: y.astype(np.float32), results)

    return scoped


def test_systems_in_float64_where_x64_is_off():
    with jax.enable_x64(True):
        a, b = jnp.array([[1, 0.9999], [1.0001, 1]]), jnp.ones(2)
    x = jtk.linalg.solve(a, b)
    assert x.dtype == np.float64
    np.testing.assert_allclose(x, [10000.00002762, -10000.00002762], rtol=1e-9)


def test_slogdet_of_more_matrices_than_rows():
    with jax.numpy_rank_promotion("raise"):
        sign, logarithm = jtk.linalg.slogdet(jnp.stack([3 * jnp.eye(4)] * 5))
    assert sign.tolist() == [1] * 5
    np.testing.assert_allclose(logarithm, 4.394449, rtol=1e-6)


def test_precision_is_that_of_the_call():
    """The context is over when a derivative is computed and when a call is lowered."""

    @jax.jit
    def product(x, w):
        with jax.default_matmul_precision("highest"):
            return jtk.linear(x, w, None, jnp.tanh)

    jaxpr = jax.make_jaxpr(jax.grad(lambda *xs: product(*xs).sum()))(
        jnp.ones((8, 4)), jnp.ones((4, 4))
    )
    text = str(jaxpr)
    assert text.count("precision=(Precision.HIGHEST, ") == text.count("precision=") >= 2


def test_a_reference_runs_in_the_modes_of_the_call():
    """The context is over when the call is lowered."""
    kernel = jtk.cuda_kernel(
        "__global__ void f(const float* x, float* y) {}",
        out=lambda x: x,
        grid=1,
        block=1,
        reference=lambda x: (x.astype(np.float64) + 1e-9 - x).astype(np.float32),
    )

    @jax.jit
    def difference(x):
        with jax.enable_x64(True):
            return kernel(x)

    with jtk.policy("xla"):
        np.testing.assert_allclose(difference(jnp.ones(3)), 1e-9, rtol=1e-6)


def test_functions_of_settings_run_in_the_modes_of_the_call():
    """The context is over when the call is lowered."""
    seen = []

    def grid(x):
        seen.append((jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion))
        return 1

    kernel = jtk.cuda_kernel(
        "__global__ void f(const float* x, float* y) {}",
        out=lambda x: x,
        grid=grid,
        block=1,
        reference=lambda x: x,
    )

    @jax.jit
    def function(x):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            return kernel(x)

    function(jnp.ones(3))
    assert set(seen) == {(True, "strict")}


def test_outputs_of_64_bits_of_a_kernel_in_a_scope():
    kernel = jtk.cuda_kernel(
        "__global__ void f(const double* x, double* y) {}",
        out=lambda x: x,
        grid=1,
        block=1,
        reference=lambda x: 2 * x,
    )
    kernel.deflinear(0, lambda cotangent, x: 2 * cotangent)
    x = jnp.ones((8, 4))
    derived = jax.jit(jax.grad(lambda x: in_float64(kernel)(x).sum()))(x)
    np.testing.assert_array_equal(derived, np.full(x.shape, 2, np.float32))
