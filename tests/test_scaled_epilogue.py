"""Epilogues of ``scaled_matmul``: values, derivatives, transformations, and the kernels."""

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import UNIT_ROUNDOFF
from nvrtc_mark import needs_nvrtc
from products import BF16, E4M3, F32, H100, row_major
from scaled_products import TENSOR_CORES, dequantized, product_bounds, scales, values
from sharded import collectives, devices

import jax_tilekern as jtk
from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.select import plan_matmul


def layer(y, bias, residual):
    return jax.nn.gelu(y + bias) + residual


def operands(rng, m=72, n=136, k=200, of_rhs=None, batch=()):
    """Factors, their scales, a bias, and a residual."""
    blocks = -(-k // 128)
    return (
        values(rng, *batch, m, k), values(rng, n, k),
        scales(rng, *batch, m, blocks), scales(rng, *(of_rhs or (-(-n // 128), blocks))),
        jnp.asarray(rng.normal(size=n), F32), jnp.asarray(rng.normal(size=(*batch, m, n)), BF16),
    )  # fmt: skip


def fused(lhs, rhs, of_lhs, of_rhs, *arrays, out=F32, epilogue=layer):
    return jtk.scaled_matmul(lhs, rhs, of_lhs, of_rhs, out, epilogue=epilogue, operands=arrays)


def unfused(lhs, rhs, of_lhs, of_rhs, *arrays, epilogue=layer):
    product = jtk.scaled_matmul(lhs, rhs, of_lhs, of_rhs)
    return epilogue(product, *(x.astype(F32) for x in arrays))


def check(got, given):
    """Compare with the function of the product in float64, whose slope is at most 1.2."""
    lhs, rhs, of_lhs, of_rhs, *arrays = given
    a, b = dequantized(lhs, of_lhs), np.swapaxes(dequantized(rhs, of_rhs), -1, -2)
    product, bound = product_bounds(a, b, F32, tensor_cores=TENSOR_CORES)
    expected = np.asarray(layer(jnp.asarray(product, F32), *(x.astype(F32) for x in arrays)))
    rounding = 16 * UNIT_ROUNDOFF[np.dtype(F32)] + UNIT_ROUNDOFF[np.dtype(got.dtype)]
    allowed = 1.2 * bound + rounding * (np.abs(expected) + np.abs(product) + 8)
    assert (np.abs(np.asarray(got, np.float64) - expected) <= allowed).all()


@pytest.mark.parametrize("out", [F32, BF16])
def test_values(rng, out):
    given = operands(rng)
    got = fused(*given, out=out)
    assert got.dtype == out
    check(got, given)


def test_results_are_nested_as_the_function_nests_them(rng):
    *factors, bias, _ = operands(rng)
    total, y = fused(*factors, bias, epilogue=lambda y, b: (jtk.row_sum(y + b), y))
    product = jtk.scaled_matmul(*factors)
    np.testing.assert_array_equal(y, product)
    np.testing.assert_allclose(total, (product + bias).sum(-1), rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(fused(*factors, epilogue=lambda y: y), product)


def test_derivatives(rng):
    lhs, rhs, *others = operands(rng, 24, 40, 200)
    weights = jnp.asarray(rng.normal(size=(24, 40)), F32)
    found = [
        jax.grad(lambda *x, f=f: (f(lhs, rhs, *x) * weights).sum(), (0, 1, 2, 3))(*others)
        for f in (fused, unfused)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(jnp.abs(theirs.astype(F32)).max())
        np.testing.assert_allclose(
            ours.astype(F32), theirs.astype(F32), rtol=1e-3, atol=1e-3 * scale
        )
    with pytest.raises(TypeError, match="no derivative by lhs"):
        jax.grad(lambda x: fused(x.astype(E4M3), rhs, *others).sum())(jnp.ones((24, 200)))


def test_checkpoint_policies_save_the_product(rng):
    lhs, rhs, *others = operands(rng, 24, 40, 200)
    computed = {}
    for name in ("dots_saveable", "nothing_saveable"):
        policy = getattr(jax.checkpoint_policies, name)

        def loss(*x, policy=policy):
            return jax.checkpoint(lambda *x: fused(lhs, rhs, *x).sum(), policy=policy)(*x)

        jaxpr = jax.make_jaxpr(jax.grad(loss))(*others)
        names = [equation.primitive.name for equation in equations(jaxpr)]
        computed[name] = names.count("tilekern_scaled_matmul")
        np.testing.assert_allclose(
            jax.grad(loss)(*others),
            jax.grad(lambda *x: unfused(lhs, rhs, *x).sum())(*others),
            rtol=1e-3,
            atol=0.1,
        )
    # The backward pass has one more, by the tangent of the scales.
    assert computed["nothing_saveable"] == computed["dots_saveable"] + 1


@pytest.mark.parametrize("epilogue", [None, layer])
def test_products_are_offloaded_to_host_memory(rng, epilogue):
    lhs, rhs, *others = operands(rng, 24, 40, 200)
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    arrays = others if epilogue else others[:2]

    def loss(*x):
        return jnp.tanh(fused(lhs, rhs, *x, epilogue=epilogue)).sum()

    value, pullback = jax.vjp(jax.checkpoint(loss, policy=policy), *arrays)
    spaces = [jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(pullback)]
    assert jax.memory.Space.Host in spaces
    gradients = jax.grad(loss, tuple(range(len(arrays))))(*arrays)
    for x, y in zip(pullback(jnp.ones_like(value)), gradients, strict=True):
        np.testing.assert_allclose(x.astype(F32), y.astype(F32), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "axes", [(0, None, 0, None, None, 0), (None, 1, None, 2, 0, None), (None,) * 5 + (1,)]
)
def test_vmap(rng, axes):
    given = operands(rng, 24, 40, 200)
    stacks = [
        x if axis is None else jnp.stack([x, 2 * x.astype(F32).astype(x.dtype), x[::-1]], axis)
        for x, axis in zip(given, axes, strict=True)
    ]
    got = jax.vmap(fused, axes)(*stacks)
    for i in range(3):
        one = [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(stacks, axes, strict=True)
        ]
        check(got[i], one)


# Shards of lhs, rhs, their scales, the bias and the residual, and what is sent.
SHARDINGS = {
    "rows and columns": (
        (P("d"), P("m"), P("d"), P("m"), P("m"), P("d", "m")), [],
    ),
    "k": ((P(None, "d"),) * 4 + (P(), P()), ["all-reduce"]),
}  # fmt: skip


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("name", SHARDINGS)
def test_the_sum_is_completed_before_the_epilogue(rng, name):
    specs, sent = SHARDINGS[name]
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    given = operands(rng, 256, 512, 512)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    compiled = jax.jit(fused).lower(*placed).compile()
    check(compiled(*placed), given)
    assert [x.kind for x in collectives(compiled)] == sent


def test_operands_are_checked(rng):
    *factors, bias, _ = operands(rng)
    with pytest.raises(ValueError, match=r"operand 0 of the epilogue has shape \(7,\)"):
        fused(*factors, bias[:7], epilogue=jnp.add)
    with pytest.raises(TypeError, match="no epilogue= that reads them"):
        jtk.scaled_matmul(*factors, operands=(bias,))


# -- The kernels, emulated -------------------------------------------------------------------------

emulated = pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")
HOW = [
    {"late": ["reads"], "backwards": True},
    {"late": ["writes"]},
    {"options": emulated_plans.SANITIZED},
]


@emulated
@pytest.mark.parametrize("how", HOW, ids=["late reads", "late writes", "sanitized"])
@pytest.mark.parametrize("of_rhs", [None, (136, 4)], ids=["128x128", "1x128"])
@pytest.mark.one_in(6)
def test_one_kernel_computes_both(rng, of_rhs, how):
    with emulated_gpu(**how) as ran:
        given = operands(rng, 136, 136, 400, of_rhs, batch=(2,))
        check(jax.jit(fused)(*given), given)
    assert [plan.name for plan in ran] == ["scaled_wgmma_matmul fp8"]


@emulated
@pytest.mark.thorough
def test_other_orders_and_results(rng):
    """Scales of columns that are transposed first, odd sizes, results of rows, split-K."""
    with emulated_gpu() as ran:
        given = operands(rng, 70, 73, 250, (73, 2))
        check(jax.jit(fused)(*given), given)
        *factors, bias, _ = operands(rng, 140, 136, 400)
        y, top = jax.jit(lambda *x: fused(*x, epilogue=lambda y, b: (y + b, jtk.row_max(y))))(
            *factors, bias
        )
        given = operands(rng, 40, 72, 2064)
        check(jax.jit(fused)(*given), given)
    product = dequantized(*factors[::2]) @ dequantized(*factors[1::2]).T
    np.testing.assert_allclose(y, product + np.asarray(bias), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(top, product.max(-1), rtol=1e-4, atol=1e-3)
    assert {plan.name for plan in ran} == {"scaled_wgmma_matmul fp8"}


@needs_nvrtc
@pytest.mark.parametrize("of_rhs", [128, 1])
@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.one_in(2)
def test_no_register_is_spilled_and_no_mma_serialized(out, of_rhs):
    m = n = k = 4096
    text = cuda_text(trace_scalars(layer, F32, out, [F32, out]).function)
    arrays = [(F32, (0, 1)), (out, (n, 1))]
    epilogue = Epilogue(
        text.statements,
        text.results,
        tuple(EpilogueArray(dtype, computed_type(dtype), lies) for dtype, lies in arrays),
        (), (), text.instructions,
    )  # fmt: skip
    right = Scales(128, (), 32, 1) if of_rhs == 128 else Scales(1, (), 1, n)
    product = Product(
        row_major(m, n, k, (), rhs_k_major=True), E4M3, E4M3, out, "fp8", epilogue,
        scales=(Scales(1, (), 1, m), right),
    )  # fmt: skip
    entry = plan_matmul(product, H100).launches[0].entry
    assert entry.spill_bytes == 0
    assert not entry.serialized
