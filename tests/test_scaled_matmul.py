"""``scaled_matmul``: epilogues, transformations, errors, and the kernels, emulated."""

import contextlib
import functools

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import SMALL_H100, emulated_gpu, in_each_mode
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import F8E4, F8E5, UNIT_ROUNDOFF
from nvrtc_mark import needs_emulator, needs_nvrtc
from products import BF16, E4M3, E5M2, F32, H100, row_major
from scaled_products import TENSOR_CORES, dequantized, product_bounds, scales, values
from sharded import bytes_sent, collectives, devices

import jax_tilekern as jtk
from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates


def check(got, lhs, rhs, lhs_scales, rhs_scales, *, tensor_cores=TENSOR_CORES):
    """Compare with float64."""
    a, b = dequantized(lhs, lhs_scales), np.swapaxes(dequantized(rhs, rhs_scales), -1, -2)
    expected, bound = product_bounds(a, b, got.dtype, tensor_cores=tensor_cores)
    assert got.shape == expected.shape
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


def test_operands_have_no_derivative(rng):
    rhs, of_lhs, of_rhs = values(rng, 8, 128), scales(rng, 4, 1), scales(rng, 1, 1)

    def loss(x):
        return jtk.scaled_matmul(x.astype(F8E4), rhs, of_lhs, of_rhs).sum()

    with pytest.raises(TypeError, match=r"no derivative by lhs.*fp8_dot_general"):
        jax.grad(loss)(jnp.ones((4, 128)))
    # Where nothing flows, nothing is refused.
    x = jnp.ones((4, 128))
    assert jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) + x.sum())(x).sum() == x.size


def test_checkpoint_policies_see_a_product(rng):
    lhs, rhs, of_rhs = values(rng, 24, 200), values(rng, 40, 200), scales(rng, 1, 2)

    def loss(of_lhs):
        return jnp.tanh(jtk.scaled_matmul(lhs, rhs, of_lhs, of_rhs)).sum()

    computed = {}
    for name in ("dots_saveable", "nothing_saveable"):
        policy = getattr(jax.checkpoint_policies, name)
        gradient = jax.grad(jax.checkpoint(loss, policy=policy))
        jaxpr = jax.make_jaxpr(gradient)(scales(rng, 24, 2))
        names = [equation.primitive.name for equation in equations(jaxpr)]
        computed[name] = names.count("tilekern_scaled_matmul")
    assert computed == {"dots_saveable": 1, "nothing_saveable": 2}


ERRORS = [
    (TypeError, "lhs is float32", ((4, 256), F32), ((8, 256), F8E4), (4, 2), (8, 2)),
    (ValueError, "contracts the last", ((4, 256), F8E4), ((256, 8), F8E4), (4, 2), (8, 2)),
    (ValueError, r"leading dimensions.*\(2, 4", ((2, 4, 9), F8E4), ((3, 4, 9), F8E4), (), ()),
    (
        ValueError,
        r"lhs_scales of .* have shape \(4, 3\).*\(4, 2\) or \(4, 1\) or \(1, 2\) or \(1, 1\)",
        ((4, 256), F8E4), ((8, 256), F8E4), (4, 3), (8, 2),
    ),
    (
        ValueError,
        r"rhs_scales of .* have shape \(2, 300, 3\).*\(2, 300, 2\) or .*\(2, 3, 2\)",
        ((4, 256), F8E4), ((2, 300, 256), F8E4), (4, 2), (2, 300, 3),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "lhs", "rhs", "of_lhs", "of_rhs"), ERRORS)
def test_errors(error, message, lhs, rhs, of_lhs, of_rhs):
    with pytest.raises(error, match=message):
        jtk.scaled_matmul(*(jnp.ones(*x) for x in (lhs, rhs)), jnp.ones(of_lhs), jnp.ones(of_rhs))


def test_scales_are_float32():
    x = jnp.ones((4, 128), F8E4)
    with pytest.raises(TypeError, match="lhs_scales of scaled_matmul are float32, not bfloat16"):
        jtk.scaled_matmul(x, x, jnp.ones((4, 1), BF16), jnp.ones((4, 1)))
    with pytest.raises(TypeError, match=r"preferred_element_type.*int32"):
        jtk.scaled_matmul(x, x, jnp.ones((4, 1)), jnp.ones((4, 1)), np.int32)


# -- Several devices -------------------------------------------------------------------------------

# Shards of lhs, rhs and their scales, those of the result, and what is sent.
SHARDINGS = {
    "rows and columns": ((P("d"), P("m"), P("d"), P("m")), P("d", "m"), []),
    "k": (
        (P(None, ("d", "m")),) * 4, P(), ["all-reduce"],
    ),
    "rows and k": ((P("d", "m"), P(None, "m"), P("d", "m"), P(None, "m")), P("d"), ["all-reduce"]),
}  # fmt: skip


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("blocks", [(512, 4), (4, 512), (512, 512)])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.one_in(2)
def test_devices_have_whole_blocks(rng, name, blocks):
    specs, wanted, sent = SHARDINGS[name]
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    arrays = [
        *(values(rng, 512, 1024) for _ in range(2)),
        *(scales(rng, rows, 8) for rows in blocks),
    ]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    compiled = jax.jit(jtk.scaled_matmul).lower(*placed).compile()
    got = compiled(*placed)
    check(got, *arrays)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 2)
    assert [x.kind for x in collectives(compiled)] == sent or bytes_sent(compiled) == 0 == len(sent)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_a_partition_has_the_letters_of_the_subscripts(rng):
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    rows = NamedSharding(mesh, P("d", "m"))
    arrays = (
        jax.device_put(values(rng, 2, 512, 256), rows),
        values(rng, 128, 256),
        jax.device_put(scales(rng, 2, 512, 2), rows),
        scales(rng, 1, 2),
    )
    choice, *_ = jtk.explain(jax.vmap(jtk.scaled_matmul, (0, None, 0, None)), *arrays)
    assert choice.call == "scaled_matmul mpk,nk->mpn"
    assert choice.partition == "m in 2, p in 4"


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_explicit_axes(rng):
    arrays = values(rng, 16, 512), values(rng, 256, 512), scales(rng, 16, 4), scales(rng, 2, 4)
    with jax.set_mesh(jax.make_mesh((4, 2), ("d", "m"), devices=devices()[:8])):
        specs = P("d"), P("m"), P("d"), P("m")
        placed = [jax.device_put(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        got = jax.jit(jtk.scaled_matmul)(*placed)
        assert jax.typeof(got).sharding.spec == P("d", "m")
    check(got, *arrays)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("out", [P(None, None), P("m", "d")])
def test_split_contractions_need_out_sharding(rng, out):
    arrays = values(rng, 16, 512), values(rng, 256, 512), scales(rng, 16, 4), scales(rng, 2, 4)
    product = functools.partial(jtk.scaled_matmul, out_sharding=out)
    with jax.set_mesh(jax.make_mesh((4, 2), ("d", "m"), devices=devices()[:8])):
        placed = [jax.device_put(x, P(None, "d")) for x in arrays]
        got = jax.jit(product)(*placed)
        rows, of_rows = product(*placed, epilogue=lambda y: (2 * y, jtk.row_max(y)))
        total = jax.grad(lambda *of: (product(*placed[:2], *of) ** 2).sum(), (0, 1))
        gradients = jax.jit(total)(*placed[2:])
        assert [jax.typeof(x).sharding.spec for x in (got, rows)] == [out, out]
        assert [jax.typeof(x).sharding.spec for x in gradients] == [P(None, "d")] * 2
        with pytest.raises(compat.ShardingTypeError, match="out_sharding"):
            jtk.scaled_matmul(*placed)
    check(got, *arrays)
    check(rows / 2, *arrays)
    np.testing.assert_array_equal(of_rows, np.asarray(rows / 2).max(1))
    whole = jax.grad(lambda *of: (jtk.scaled_matmul(*arrays[:2], *of) ** 2).sum(), (0, 1))
    for x, y in zip(gradients, whole(*arrays[2:]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


# -- The kernels, emulated -------------------------------------------------------------------------


def product(m, n, k, of_lhs, of_rhs, out, batch=()):
    """A product whose scales have blocks of so many rows; those of rhs have columns adjacent."""
    k_blocks = -(-k // 128)

    def placed(rows, block, k_first):
        count = -(-rows // block)
        count += -count % 4 if k_first and block == 1 else 0
        strides = (1, count) if k_first else (k_blocks, 1)
        return Scales(block, tuple(count * k_blocks for _ in batch), *strides, padded=count > rows)

    return Product(
        row_major(m, n, k, batch, rhs_k_major=True), E4M3, E5M2, out, "fp8",
        scales=(placed(m, of_lhs, False), placed(n, of_rhs, True)),
    )  # fmt: skip


# Rows of blocks, the type of results, M, N, K, the tile, and the factor of split-K.
KERNELS = [
    (1, 128, F32, 300, 136, 400, "256x128", 1),
    (1, 128, BF16, 300, 136, 400, "256x128", 1),
    (1, 128, BF16, 140, 136, 400, "128x128", 1),
    (1, 1, F32, 300, 136, 528, "256x128", 1),
    (1, 1, BF16, 300, 255, 400, "256x128", 1),
    (1, 1, F32, 140, 136, 400, "128x128", 1),
    (1, 1, BF16, 140, 73, 400, "128x64", 1),
    (128, 1, BF16, 70, 72, 128, "64x64 by 1", 1),
    (128, 1, F32, 140, 136, 304, "128x128 swapped", 1),
    (1, 128, BF16, 40, 72, 2064, "64x128 by 1", 2),
    (1, 1, BF16, 40, 70, 2064, "64x128 by 1", 2),
]


@needs_emulator
@in_each_mode
@pytest.mark.parametrize(("of_lhs", "of_rhs", "out", "m", "n", "k", "tile", "splits"), KERNELS)
@pytest.mark.one_in(35)
def test_emulated_kernels(rng, of_lhs, of_rhs, out, m, n, k, tile, splits, how):
    batch = 2
    problem = product(m, n, k, of_lhs, of_rhs, out, (batch,))
    with emulated_plans.record() as recorded:
        found = {(x.tile_key, x.splits): x for x in wgmma_candidates(problem, SMALL_H100)}
        plan = found[tile, splits].plan(SMALL_H100)
    blocks = -(-k // 128)
    operands = values(rng, batch, m, k), values(rng, batch, n, k, dtype=F8E5)
    left, right = (
        scales(rng, batch, -(-m // of_lhs), blocks),
        scales(rng, batch, -(-n // of_rhs), blocks),
    )
    columns = np.swapaxes(right, -1, -2)
    if of_rhs == 1:
        columns = np.pad(columns, ((0, 0), (0, 0), (0, -n % 4)), constant_values=np.nan)
    buffers = [*operands, left, columns]
    (got,) = emulated_plans.run_plan(plan, recorded, buffers, [((batch, m, n), out)], **how)
    check(got, *operands, left, right)


@needs_emulator
@pytest.mark.thorough
def test_calls_state_their_product(rng):
    """Scales of columns are copied where they are not adjacent or unaligned; batches are rows."""
    with emulated_gpu() as ran:
        for rows in ((70, 2), (1, 1)):
            lhs, rhs = values(rng, 2, 70, 250), values(rng, 72, 250)
            of_lhs = scales(rng, 2, *rows)
            for of_rhs in (scales(rng, 1, 2), scales(rng, 72, 2), scales(rng, 2, 72).T):
                got = jax.jit(jtk.scaled_matmul)(lhs, rhs, of_lhs, of_rhs)
                check(got, lhs, rhs, of_lhs, of_rhs)
        transposed = scales(rng, 2, 72)
        got = jax.jit(lambda *x: jtk.scaled_matmul(*x[:3], x[3].T))(lhs, rhs, of_lhs, transposed)
        check(got, lhs, rhs, of_lhs, transposed.T)
        for blocks in (1, 2):
            odd, of_odd = values(rng, 71, 250), scales(rng, 71, blocks)
            check(jax.jit(jtk.scaled_matmul)(rhs, odd, of_rhs, of_odd), rhs, odd, of_rhs, of_odd)
    assert {plan.name for plan in ran} == {"scaled_wgmma_matmul fp8"}


def test_a_user_has_the_kernel_by_default(rng):
    operands = values(rng, 40, 256), values(rng, 24, 256), scales(rng, 40, 2), scales(rng, 24, 2)
    can_emulate = emulated_plans.COMPILER is not None
    gpu = emulated_gpu(policy="auto") if can_emulate else contextlib.nullcontext()
    with gpu as ran:
        check(jax.jit(jtk.scaled_matmul)(*operands), *operands)
    assert not can_emulate or any("scaled" in plan.name for plan in ran)


def _copied_first(m, n, k, transposed=False):
    blocks = -(-k // 128)

    def call(lhs, rhs, of_lhs, of_rhs):
        of_lhs = of_lhs.T if transposed else of_lhs
        return jtk.scaled_matmul(lhs, rhs, of_lhs, of_rhs, jnp.bfloat16)

    avals = [jax.ShapeDtypeStruct(shape, F8E4) for shape in ((m, k), (n, k))]
    of_rows = (blocks, m) if transposed else (m, blocks)
    avals += [jax.ShapeDtypeStruct(x, np.float32) for x in (of_rows, (-(-n // 128), blocks))]
    with jtk.gpu_target("H100"):
        reasons = [choice.reason for choice in jtk.explain(call, *avals, platform="cuda")]
    return any("copied first" in reason for reason in reasons)


def test_scales_of_rows_that_lie_apart_are_copied_first():
    assert _copied_first(8192, 8192, 8192)
    assert not _copied_first(8192, 8192, 8192, transposed=True)
    assert not _copied_first(4096, 7168, 2048)  # a line has those of several rows
    assert not _copied_first(64, 7168, 16384)  # a tile has few rows


@needs_emulator
def test_copied_scales(rng, monkeypatch):
    monkeypatch.setattr(select, "_L1_BYTES", 0)
    monkeypatch.setattr(select, "_SCATTERED_ROWS", 1e9)
    operands = values(rng, 2, 150, 400), values(rng, 136, 400)
    of_operands = scales(rng, 2, 150, 4), scales(rng, 2, 4)
    with emulated_gpu() as ran:
        call = jax.jit(jtk.scaled_matmul)
        check(call(*operands, *of_operands), *operands, *of_operands)
        text = call.lower(*operands, *of_operands).as_text()
    assert {plan.name for plan in ran} == {"scaled_wgmma_matmul fp8"}
    assert text.count("stablehlo.transpose") == 2


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
    product_of_layer = jtk.scaled_matmul(lhs, rhs, of_lhs, of_rhs)
    return epilogue(product_of_layer, *(x.astype(F32) for x in arrays))


def check_layer(got, given):
    """Compare with the function of the product_of_layer in float64, whose slope is at most 1.2."""
    lhs, rhs, of_lhs, of_rhs, *arrays = given
    a, b = dequantized(lhs, of_lhs), np.swapaxes(dequantized(rhs, of_rhs), -1, -2)
    product_of_layer, bound = product_bounds(a, b, F32, tensor_cores=TENSOR_CORES)
    expected = np.asarray(
        layer(jnp.asarray(product_of_layer, F32), *(x.astype(F32) for x in arrays))
    )
    rounding = 16 * UNIT_ROUNDOFF[np.dtype(F32)] + UNIT_ROUNDOFF[np.dtype(got.dtype)]
    allowed = 1.2 * bound + rounding * (np.abs(expected) + np.abs(product_of_layer) + 8)
    assert (np.abs(np.asarray(got, np.float64) - expected) <= allowed).all()


def test_results_are_nested_as_the_function_nests_them(rng):
    *factors, bias, _ = operands(rng)
    total, y = fused(*factors, bias, epilogue=lambda y, b: (jtk.row_sum(y + b), y))
    product_of_layer = jtk.scaled_matmul(*factors)
    np.testing.assert_array_equal(y, product_of_layer)
    np.testing.assert_allclose(total, (product_of_layer + bias).sum(-1), rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(fused(*factors, epilogue=lambda y: y), product_of_layer)


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


# Shards of lhs, rhs, their scales, the bias and the residual, and what is sent.
SHARDINGS_OF_LAYERS = {
    "rows and columns": (
        (P("d"), P("m"), P("d"), P("m"), P("m"), P("d", "m")), [],
    ),
    "k": ((P(None, "d"),) * 4 + (P(), P()), ["all-reduce"]),
}  # fmt: skip


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("name", SHARDINGS_OF_LAYERS)
def test_the_sum_is_completed_before_the_epilogue(rng, name):
    specs, sent = SHARDINGS_OF_LAYERS[name]
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    given = operands(rng, 256, 512, 512)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    compiled = jax.jit(fused).lower(*placed).compile()
    check_layer(compiled(*placed), given)
    assert [x.kind for x in collectives(compiled)] == sent


def test_operands_are_checked(rng):
    *factors, bias, _ = operands(rng)
    with pytest.raises(ValueError, match=r"operand 0 of the epilogue has shape \(7,\)"):
        fused(*factors, bias[:7], epilogue=jnp.add)
    with pytest.raises(TypeError, match="no epilogue= that reads them"):
        jtk.scaled_matmul(*factors, operands=(bias,))


# -- The kernels, emulated -------------------------------------------------------------------------


@needs_emulator
@in_each_mode
@pytest.mark.parametrize("of_rhs", [None, (136, 4)], ids=["128x128", "1x128"])
@pytest.mark.one_in(6)
def test_one_kernel_computes_both(rng, of_rhs, how):
    with emulated_gpu(**how) as ran:
        given = operands(rng, 136, 136, 400, of_rhs, batch=(2,))
        check_layer(jax.jit(fused)(*given), given)
    assert [plan.name for plan in ran] == ["scaled_wgmma_matmul fp8"]


@needs_emulator
@pytest.mark.thorough
def test_other_orders_and_results(rng):
    """Scales of columns that are transposed first, odd sizes, results of rows, split-K."""
    with emulated_gpu() as ran:
        given = operands(rng, 70, 73, 250, (73, 2))
        check_layer(jax.jit(fused)(*given), given)
        *factors, bias, _ = operands(rng, 140, 136, 400)
        y, top = jax.jit(lambda *x: fused(*x, epilogue=lambda y, b: (y + b, jtk.row_max(y))))(
            *factors, bias
        )
        given = operands(rng, 40, 72, 2064)
        check_layer(jax.jit(fused)(*given), given)
    product_of_layer = dequantized(*factors[::2]) @ dequantized(*factors[1::2]).T
    np.testing.assert_allclose(y, product_of_layer + np.asarray(bias), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(top, product_of_layer.max(-1), rtol=1e-4, atol=1e-3)
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
    product_of_layer = Product(
        row_major(m, n, k, (), rhs_k_major=True), E4M3, E4M3, out, "fp8", epilogue,
        scales=(Scales(1, (), 1, m), right),
    )  # fmt: skip
    entry = plan_matmul(product_of_layer, H100).launches[0].entry
    assert entry.spill_bytes == 0
    assert not entry.serialized
