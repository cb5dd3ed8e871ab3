"""Two products of one lhs in one kernel: plans, what calls become, and results on a Hopper GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from candidate_calls import run
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator, needs_gpu, require_nvrtc
from products import BF16, F16, F32, H100, product_of

import jax_tilekern as jtk
from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu

require_nvrtc()


def gate(y, up):
    return jax.nn.silu(y) * up


def biased(y, up, row, matrix):
    return jax.nn.silu(y + row) * (up + matrix)


def pair_of(m, n, k, *, arithmetic="bf16", function=gate, out=None, batch=(), **layout):
    """A pair of row-major products; the function's operands are a row and a matrix."""
    lies = [(0, 1), (n, 1)] if function is biased else []
    types = {"bf16": BF16, "f16": F16}.get(arithmetic, F32)
    out = out or types
    dtypes = [types] * len(lies)
    text = cuda_text(trace_scalars(function, F32, out, [F32, *dtypes]).function)
    arrays = tuple(EpilogueArray(types, computed_type(types), (0,) * len(batch) + x) for x in lies)
    epilogue = Epilogue(
        text.statements, text.results, arrays, (), batch, text.instructions, products=2
    )
    plain = product_of(arithmetic, m, n, k, types=(types, types, out), batch=batch, **layout)
    return Product(plain.geometry, *plain.dtypes, arithmetic, epilogue, pair=True)


# Plans.

BESIDE_COLLECTIVES = dataclasses.replace(H100, beside_collectives=True)


@pytest.mark.parametrize("function", [gate, biased], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(8192, 4096, 4096), (8191, 4072, 4096)], ids=str)
@pytest.mark.one_in(4)
def test_no_register_is_spilled_and_no_mma_serialized(sizes, function):
    for gpu in (H100, BESIDE_COLLECTIVES):
        for candidate in wgmma_candidates(pair_of(*sizes, function=function), gpu):
            assert candidate.instance.dynamic == gpu.beside_collectives
            entry = candidate.plan(gpu).launches[-1].entry
            assert (candidate.key, entry.spill_bytes) == (candidate.key, 0)
            assert not entry.serialized


# What calls become.


def shapes(m, n, k, dtype=jnp.bfloat16):
    w = jax.ShapeDtypeStruct((k, n), dtype)
    return jax.ShapeDtypeStruct((m, k), dtype), w, w


def choices(function, *args, gpu="sm_90", platform="cuda"):
    with jtk.gpu_target(gpu):
        return jtk.explain(function, *args, platform=platform)


def test_a_call_is_one_kernel():
    (choice,) = choices(jtk.gated_linear, *shapes(2048, 14336, 4096))
    assert choice.call == "contract mk,kn,kn->mn, gate_silu(accumulator, accumulator)"
    assert choice.kernel == "wgmma_matmul_of_pair bf16"
    assert "both products in one kernel" in choice.reason


@pytest.mark.parametrize(
    ("function", "gpu", "platform", "reason"),
    [
        (jtk.gated_linear, "sm_80", "cuda", "takes sm_90a"),
        (jtk.gated_linear, "sm_90", "cpu", "Hopper"),
        (lambda *xs: jtk.gated_linear(*xs, jax.lax.bessel_i0e), "sm_90", "cuda", "bessel_i0e"),
    ],
)
def test_elsewhere_there_are_two_kernels(function, gpu, platform, reason):
    both, up, gated, *_ = choices(function, *shapes(1024, 1024, 512), gpu=gpu, platform=platform)
    assert both.kernel is None
    assert both.reason.startswith("a kernel for each: ")
    assert reason in both.reason
    assert up.call == "mk,kn->mn"
    assert gated.call.endswith("(accumulator, mn)")


def test_a_call_that_is_differentiated_is_two_products():
    def loss(x, w, up):
        return jtk.gated_linear(x, w, up).astype(jnp.float32).sum()

    arrays = shapes(8192, 14336, 4096)
    assert "pair=True" in str(jax.make_jaxpr(jtk.gated_linear)(*arrays))
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays))
    assert "pair=True" not in text
    # The two products, and two for each gradient.
    assert len(re.findall(r"= tilekern_contract", text)) == 6


# Meaning, on any platform.


def arrays_of(rng, m, n, k, dtype=np.float32, batch=()):
    shapes = ((*batch, m, k), (k, n), (k, n))
    return [jnp.asarray(rng.standard_normal(s) * 0.5, dtype) for s in shapes]


def unfused(x, w, up, activation=jax.nn.silu):
    product = jax.lax.Precision.HIGHEST
    return activation(jnp.matmul(x, w, precision=product)) * jnp.matmul(x, up, precision=product)


def gated(x, w, up, activation=jax.nn.silu):
    return jtk.gated_linear(x, w, up, activation, precision="highest")


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected
    )


def test_derivatives_of_scalars_that_are_closed_over(rng):
    arrays = arrays_of(rng, 5, 6, 7)

    def loss(f, beta):
        return f(*arrays, lambda y: y * jax.nn.sigmoid(beta * y)).sum()

    def terms(beta):
        return unfused(*arrays, lambda y: y * jax.nn.sigmoid(beta * y))

    # Sums of 35 terms may cancel, so their error is one of the terms: 64 roundings of each.
    roundoff = 64 * np.finfo(np.float32).eps / 2
    found, expected = (jax.grad(lambda b, f=f: loss(f, b))(1.5) for f in (gated, unfused))
    magnitude = np.abs(jax.jacfwd(terms)(1.5)).sum()
    np.testing.assert_allclose(found, expected, rtol=0, atol=roundoff * magnitude)
    betas = jnp.arange(3.0)
    over = [jax.vmap(lambda b, f=f: loss(f, b))(betas) for f in (gated, unfused)]
    magnitudes = np.abs(jax.vmap(terms)(betas)).sum((1, 2))
    assert (np.abs(over[0] - over[1]) <= roundoff * magnitudes).all()


def test_weights_of_other_types_and_shapes(rng):
    x, w, up = arrays_of(rng, 5, 6, 7)
    close(gated(x, w, up.astype(BF16)), unfused(x, w, up.astype(BF16)))
    close(gated(x, w[None], up), unfused(x, w[None], up))
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        gated(x, w[1:], up[1:])


def gated_and_sums(x, w, up):
    return jtk.gated_linear(x, w, up, epilogue=lambda y: (y, jtk.row_sum(y)))


def check_gated_and_sums(call, rng):
    x, w, up = (jnp.asarray(rng.normal(size=s), BF16) for s in ((136, 64), (64, 200), (64, 200)))
    gated, sums = jax.jit(call)(x, w, up)
    x, w, up = (np.asarray(a, np.float64) for a in (x, w, up))
    exact = x @ w / (1 + np.exp(-(x @ w))) * (x @ up)
    largest = np.abs(exact).max()
    assert (gated.dtype, sums.dtype) == (BF16, F32)
    np.testing.assert_allclose(np.asarray(gated, np.float64), exact, atol=2.0**-6 * largest)
    np.testing.assert_allclose(sums, exact.sum(-1), atol=2.0**-5 * largest)


def test_rows_are_reduced(rng):
    check_gated_and_sums(gated_and_sums, rng)


# Results of the kernels.


@needs_emulator
def test_the_kernel_of_both_reduces_rows(rng, monkeypatch):
    for limit in ("_cycles_of_two_kernels", "_cycles_of_xla"):
        monkeypatch.setattr(select, limit, lambda *_: np.inf)
    with emulated_gpu() as ran:
        check_gated_and_sums(gated_and_sums, rng)
    assert [plan.name for plan in ran] == ["wgmma_matmul_of_pair bf16"]


@needs_gpu
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("function", [gate, biased], ids=lambda f: f.__name__)
@pytest.mark.parametrize("out", [None, F32], ids=str)
@pytest.mark.parametrize("rhs_k_major", [False, True])
@pytest.mark.parametrize("sizes", [(256, 512, 256), (1000, 1056, 328), (77, 136, 1032)], ids=str)
def test_every_candidate_computes_both(rng, sizes, rhs_k_major, out, function, batch):
    m, n, k = sizes
    product = pair_of(*sizes, function=function, out=out, batch=batch, rhs_k_major=rhs_k_major)
    lhs = jnp.asarray(rng.standard_normal((*batch, m, k)), BF16)
    weights = [jnp.asarray(rng.standard_normal((*batch, k, n)) * k**-0.5, BF16) for _ in "ab"]
    operands = [jnp.asarray(rng.standard_normal(s), BF16) for s in ((n,), (m, n))]
    operands = operands if function is biased else []
    with jax.enable_x64(True):
        exact = [np.asarray(lhs, np.float64) @ np.asarray(w, np.float64) for w in weights]
        expected = np.asarray(
            function(*map(jnp.asarray, exact), *(x.astype(float) for x in operands))
        )
    read = [jnp.swapaxes(w, -1, -2) if rhs_k_major else w for w in weights]
    gpu = current_gpu()
    beside = dataclasses.replace(gpu, beside_collectives=True)
    wrong = {}
    for candidate in wgmma_candidates(product, gpu) + wgmma_candidates(product, beside):
        got = run(candidate.plan(gpu), (lhs, *read, *operands), (*batch, m, n), out or BF16)
        # The result's rounding, that of float32 accumulators, and of approximate exponentials.
        size = (1 + np.abs(exact[0])) * (1 + np.abs(exact[1]))
        bound = 2.0**-8 * np.abs(expected) + 4e-6 * k**0.5 * size
        if not (np.abs(got - expected) <= bound).all():
            wrong[candidate.key] = np.abs(got - expected).max()
    assert not wrong
