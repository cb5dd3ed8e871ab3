"""``scaled_ragged_dot``: values, transformations, errors, devices, and the kernels, emulated."""

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import SMALL_H100, emulated_gpu, in_each_mode
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import F8E4, F8E5
from nvrtc_mark import needs_emulator
from products import BF16, E4M3, E5M2, F32
from ragged import spans
from scaled_products import TENSOR_CORES, dequantized, product_bounds, scales, values
from sharded import bytes_sent, devices

import jax_tilekern as jtk
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.grouped_gemm.sm90.candidates import grouped_wgmma_candidates


def check(got, lhs, rhs, sizes, lhs_scales, rhs_scales, tensor_cores=TENSOR_CORES):
    """Compare each group's rows with float64."""
    a, b = dequantized(lhs, lhs_scales), np.swapaxes(dequantized(rhs, rhs_scales), -1, -2)
    expected, bound = np.zeros((2, a.shape[0], b.shape[2]))
    for g, (begin, end) in enumerate(spans(sizes, len(a))):
        rows = slice(begin, end)
        expected[rows], bound[rows] = product_bounds(
            a[rows], b[g], got.dtype, tensor_cores=tensor_cores
        )
    assert got.shape == expected.shape
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


def operands(rng, m, n, k, groups, of_lhs=None, of_rhs=None):
    """Values of both operands, and scales of 1x128 and of 128x128 blocks, or as given."""
    blocks = -(-k // 128)
    return (
        values(rng, m, k),
        values(rng, groups, n, k, dtype=F8E5),
        scales(rng, *(of_lhs or (m, blocks))),
        scales(rng, groups, *(of_rhs or (-(-n // 128), blocks))),
    )


def product(lhs, rhs, lhs_scales, rhs_scales, sizes, **options):
    return jtk.scaled_ragged_dot(lhs, rhs, sizes, lhs_scales, rhs_scales, **options)


def test_not_numbers_stay_in_their_rows_and_groups(rng):
    lhs, rhs, of_lhs, of_rhs = operands(rng, 12, 8, 256, 3)
    sizes = np.array([3, 4, 3])
    lhs = lhs.at[1, 5].set(np.nan)
    of_lhs = of_lhs.at[11, 0].set(np.inf)
    of_rhs = of_rhs.at[1, 0, 1].set(np.nan)
    got = np.isnan(product(lhs, rhs, of_lhs, of_rhs, sizes)).all(1)
    np.testing.assert_array_equal(np.flatnonzero(got), [1, 3, 4, 5, 6])


def test_derivatives_of_not_numbers_that_no_product_reads(rng):
    """Rows of no group, and matrices of groups without rows."""
    lhs, rhs, *of = operands(rng, 12, 8, 256, 3)
    sizes = np.array([3, 0, 6])
    dead = lhs.at[10].set(np.nan), rhs.at[1, 2].set(np.nan)

    def gradients(lhs, rhs):
        def loss(a, b):
            return (product(lhs, rhs, a, b, sizes) ** 2).sum()

        return jax.grad(loss, (0, 1))(*of), jax.hessian(loss)(*of)

    jax.tree.map(np.testing.assert_array_equal, gradients(*dead), gradients(lhs, rhs))
    # The second of two groupings reads both.
    both = np.array([[3, 0, 6], [4, 4, 4]])

    def two_products(lhs, rhs, a, b):
        return jax.vmap(product, (None, None, None, None, 0))(lhs, rhs, a, b, both)

    first = jax.grad(lambda a: two_products(*dead, a, of[1])[0].sum())(of[0])
    assert np.flatnonzero(np.isnan(first).any(1)).tolist() == [4, 5, 6, 7, 10]


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_derivatives_of_unused_rows_on_devices(rng, kind):
    lhs, rhs, *of = operands(rng, 16, 8, 512, 3)
    sizes = np.array([3, 0, 6])
    dead = lhs.at[10].set(np.nan), rhs.at[1, 2].set(np.nan)

    def gradients(lhs, rhs, *of):
        return jax.grad(lambda *s: (product(lhs, rhs, *s, sizes) ** 2).sum(), (0, 1))(*of)

    mesh = jax.make_mesh((4, 2), ("d", "m"), (kind,) * 2, devices=devices()[:8])
    specs = P(None, "d"), P(None, None, "d"), P(None, "d"), P(None, None, "d")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((*dead, *of), specs, strict=True)
        ]
        found = jax.jit(gradients)(*placed)
    # A GPU rounds products in other places.
    on_one = jax.device_put((lhs, rhs, *of), devices()[0])
    for x, y in zip(found, gradients(*on_one), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_groups_from_an_offset(rng):
    arrays = operands(rng, 40, 24, 144, 2)
    sizes = np.array([5, 10, 15, 10])
    got = product(*arrays, sizes, group_offset=jnp.array([1]))
    check(got[5:], arrays[0][5:], arrays[1], sizes[1:3], arrays[2][5:], arrays[3])
    assert not np.asarray(got[:5]).any()


def test_operands_have_no_derivative(rng):
    _, rhs, *of = operands(rng, 24, 40, 200, 3)
    sizes = np.array([5, 0, 16])
    with pytest.raises(TypeError, match=r"no derivative by lhs.*fp8_dot_general"):
        jax.grad(lambda x: product(x.astype(F8E4), rhs, *of, sizes).sum())(jnp.ones((24, 200)))


def test_errors(rng):
    lhs, rhs, of_lhs, of_rhs = operands(rng, 4, 300, 256, 2)
    call, sizes = jtk.scaled_ragged_dot, np.array([1, 3])
    for error, message, given in (
        (TypeError, "lhs is float32", (lhs.astype(F32), rhs, sizes, of_lhs, of_rhs)),
        (ValueError, r"takes lhs \(M, K\), rhs .*N, K", (lhs, rhs[0], sizes, of_lhs, of_rhs)),
        (ValueError, "contracts the last", (lhs[:, :8], rhs, sizes, of_lhs, of_rhs)),
        (ValueError, r"each group: group_sizes \(1,\)", (lhs, rhs, sizes[:1], of_lhs, of_rhs)),
        (TypeError, "integers, not float32", (lhs, rhs, np.ones(2, F32), of_lhs, of_rhs)),
        (
            ValueError,
            r"lhs_scales of .* have shape \(1, 3\).*\(4, 2\) or \(4, 1\) or \(1, 2\) or \(1, 1\)",
            (lhs, rhs, sizes, jnp.ones((1, 3)), of_rhs),
        ),
        (
            ValueError,
            r"rhs_scales of .* have shape \(3, 2\).*\(2, 300, 2\) or .*\(2, 3, 2\)",
            (lhs, rhs, sizes, of_lhs, of_rhs[0]),
        ),
        (TypeError, "rhs_scales .* not bfloat16", (lhs, rhs, sizes, of_lhs, of_rhs.astype(BF16))),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(*given)
    with pytest.raises(TypeError, match=r"group_offset .* not float32"):
        call(lhs, rhs, sizes, of_lhs, of_rhs, group_offset=jnp.ones(1))


# -- Several devices -------------------------------------------------------------------------------

# Shards of lhs, rhs and their scales, and of the result.
SHARDINGS = {
    "rows": ((P("d"), P(), P("d"), P()), P("d")),
    "columns": ((P(), P(None, "d"), P(), P(None, "d")), P(None, "d")),
    "groups": ((P(), P("d"), P(), P("d")), P()),
    "k": ((P(None, "d"), P(None, None, "d"), P(None, "d"), P(None, None, "d")), P()),
}


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(3)
def test_devices_share_the_work(rng, name, axes):
    specs, wanted = SHARDINGS[name]
    mesh = jax.make_mesh((4,), ("d",), (axes,), devices=devices()[:4])
    arrays = operands(rng, 64, 512, 512, 4)
    sizes = np.array([20, 0, 31, 10])
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(product).lower(*placed, sizes).compile()
        got = compiled(*placed, sizes)
    check(got, *arrays[:2], sizes, *arrays[2:])
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 2)
    assert (bytes_sent(compiled) > 0) == (name in ("groups", "k"))


# -- The kernels, emulated -------------------------------------------------------------------------


def stated(m, n, k, groups, out, by_row=True, block=128):
    """A product whose lhs has scales of rows, which are adjacent, or one for each 128 of k."""
    blocks, rows = -(-k // 128), -(-n // block)
    geometry = MatmulGeometry((groups,), m, n, k, (0, k, 1), (n * k, 1, k), (0, n, 1))
    of_lhs = Scales(1, (0,), 1, m) if by_row else Scales(1, (0,), 0, 1)
    of_rhs = Scales(block, (rows * blocks,), blocks, int(blocks > 1))
    grouped = GroupedGeometry.of(geometry, "m", ())
    return Product(grouped, E4M3, E5M2, out, "fp8", scales=(of_lhs, of_rhs))


# The type of results, sizes of groups, rows, N, K, and the tile.
KERNELS = [
    (F32, (100, 0, 7, 61), 190, 136, 272, "128x128 swapped"),
    (BF16, (130, 1, 0, 20), 160, 264, 144, "128x128 clusters of 2 swapped"),
    (BF16, (3, 40, 64), 131, 73, 128, "64x64 by 1 swapped"),
    (F32, (60, 0, 7, 261), 340, 136, 144, "256x128"),
    (BF16, (257, 1, 0, 20), 290, 136, 272, "256x128"),
    (BF16, (130, 1, 0, 20), 160, 136, 272, "128x128 clusters of 2"),
    (BF16, (130, 1, 0, 20), 153, 136, 144, "128x128"),
    (BF16, (3, 40, 64), 131, 73, 144, "64x64 by 1"),
    (F32, (60, 0, 7, 261), 340, 136, 128, "256x128"),
    (BF16, (130, 1, 0, 20), 160, 136, 128, "128x128 clusters of 2"),
    (BF16, (3, 40, 64), 131, 72, 128, "64x64 by 1"),
]
# Rows of groups are columns of a tile where they have one scale.
BY_ROW = [(*x, by_row) for x in KERNELS for by_row in (False, "swapped" not in x[-1])]


@needs_emulator
@in_each_mode
@pytest.mark.parametrize(("out", "sizes", "m", "n", "k", "tile", "by_row"), dict.fromkeys(BY_ROW))
@pytest.mark.one_in(45)
def test_emulated_kernels(rng, out, sizes, m, n, k, tile, by_row, how):
    groups = len(sizes)
    # One block of k: scales of columns are adjacent.
    block = 1 if k == 128 else 128
    problem = stated(m, n, k, groups, out, by_row, block)
    with emulated_plans.record() as recorded:
        found = {x.tile_key: x for x in grouped_wgmma_candidates(problem, SMALL_H100)}
        plan = found[tile].plan(SMALL_H100)
    blocks = -(-k // 128)
    arrays = operands(
        rng, m, n, k, groups, None if by_row else (1, blocks), (-(-n // block), blocks)
    )
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    buffers = [*arrays[:2], bounds, np.swapaxes(arrays[2], 0, 1), arrays[3]]
    (got,) = emulated_plans.run_plan(plan, recorded, buffers, [((m, n), out)], **how)
    check(got, *arrays[:2], np.array(sizes), *arrays[2:], tensor_cores=False)


@needs_emulator
@pytest.mark.thorough
def test_calls_state_their_product(rng):
    """Scales of rows are transposed where they are not adjacent; batches have groups."""
    sizes = np.array([30, 0, 33])
    arrays = operands(rng, 70, 72, 256, 3)
    with emulated_gpu() as ran:
        got = jax.jit(product)(*arrays, sizes)
        check(got, *arrays[:2], sizes, *arrays[2:], tensor_cores=False)
        call = jax.jit(lambda a, b, s, t, sizes: product(a, b, s.T, t, sizes))
        got = call(*arrays[:2], arrays[2].T, arrays[3], sizes)
        check(got, *arrays[:2], sizes, *arrays[2:], tensor_cores=False)
        both = np.stack([sizes, sizes[::-1]])
        mapped = jax.vmap(product, (0, None, None, None, 0))
        lhs = jnp.stack([arrays[0], arrays[0][::-1]])
        got = jax.jit(mapped)(lhs, *arrays[1:], both)
        for i in range(2):
            check(got[i], lhs[i], arrays[1], both[i], *arrays[2:], tensor_cores=False)
    assert {plan.name for plan in ran} == {"scaled_ragged_wgmma_matmul fp8"}
    assert len(ran) == 3


@needs_emulator
@pytest.mark.thorough
def test_without_a_kernel_operands_are_dequantised(rng):
    """Rows of 130 bytes have no tensor map."""
    sizes = np.array([7, 0, 9])
    arrays = operands(rng, 20, 24, 130, 3)
    with emulated_gpu() as ran:
        check(jax.jit(product)(*arrays, sizes), *arrays[:2], sizes, *arrays[2:])
    assert not any("scaled" in plan.name for plan in ran)


@needs_emulator
@pytest.mark.thorough
@pytest.mark.parametrize(("n", "k"), [(24, 256), (27, 256), (27, 128)])
def test_scales_of_columns_are_copied_where_they_are_not_adjacent(rng, n, k):
    sizes = np.array([[7, 0, 9], [0, 20, 0]])
    arrays = operands(rng, 20, n, k, 3, of_rhs=(n, k // 128))
    with emulated_gpu() as ran:
        got = jax.jit(product)(*arrays, sizes[0])
        check(got, *arrays[:2], sizes[0], *arrays[2:], tensor_cores=False)
        mapped = jax.vmap(product, (None, None, None, 0, None))
        of_rhs = jnp.stack([arrays[3], arrays[3][::-1]])
        got = jax.jit(mapped)(*arrays[:3], of_rhs, sizes[1])
        for scales, found in zip(of_rhs, got, strict=True):
            check(found, *arrays[:2], sizes[1], arrays[2], scales, tensor_cores=False)
    assert [plan.name for plan in ran] == ["scaled_ragged_wgmma_matmul fp8"] * 2
