"""Two grouped GEMMs of one lhs in one kernel, with a function of both."""

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import HOWS, SMALL_H100, emulated_gpu
from nvrtc_mark import needs_emulator, needs_nvrtc
from products import BF16, F16, F32, H100, ragged_product_of

import jax_tilekern as jtk
from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.grouped_gemm.sm90.candidates import grouped_wgmma_candidates

BOUNDS = {
    "some": [0, 40, 40, 181, 300],
    "all of one": [0, 0, 0, 300, 300],
    "gaps": [7, 90, 90, 91, 222],
    "none": [150] * 5,
}
ROWS, N, K, GROUPS = 300, 328, 200, 4


def value(gate, up, weight, bias):
    return jax.nn.silu(gate + bias) * up * weight


def pair(arithmetic="bf16", rows=ROWS, n=N, k=K, groups=GROUPS, **layout):
    """Products whose function reads a number of each row, and a row of each group."""
    dtype = {"bf16": BF16, "f16": F16}[arithmetic]
    plain = ragged_product_of(arithmetic, "m", groups, rows, n, k, types=(dtype,) * 3, **layout)
    text = cuda_text(trace_scalars(value, F32, dtype, [F32, dtype, dtype]).function)
    arrays = tuple(
        EpilogueArray(dtype, computed_type(dtype), strides) for strides in ((0, 1, 0), (n, 0, 1))
    )
    epilogue = Epilogue(
        text.statements, text.results, arrays, (), (groups,), text.instructions, "rows", products=2
    )
    return Product(plain.geometry, *plain.dtypes, arithmetic, epilogue, pair=True)


PAIR_KEYS = (
    "256x128", "256x128 clusters of 2", "128x192 ping-pong", "128x128 ping-pong clusters of 2",
    "128x64 by 1",
)  # fmt: skip


def emulated(product, key, arrays, **how):
    found = grouped_wgmma_candidates(product, SMALL_H100)
    candidate = next(x for x in found if x.key == f"ragged wgmma {key} swapped")
    with emulated_plans.record() as recorded:
        plan = candidate.plan(SMALL_H100)
    (out,) = emulated_plans.run_plan(plan, recorded, arrays, [((ROWS, N), arrays[0].dtype)], **how)
    return out


def products_of(lhs, rhs, bounds):
    """The products in float64, and the magnitudes that bound their errors."""
    results = np.zeros((2, ROWS, N))
    for group, matrix in enumerate(rhs.astype(np.float64)):
        own = slice(bounds[group], bounds[group + 1])
        rows = lhs[own].astype(np.float64)
        results[:, own] = rows @ matrix, np.abs(rows) @ np.abs(matrix)
    return results


def operands(dtype, count):
    generator = np.random.default_rng(count)

    def normal(*shape):
        return (generator.normal(size=shape) / np.sqrt(K)).astype(dtype)

    return [(normal(ROWS, K) * 4).astype(dtype) for _ in range(count)], [
        normal(GROUPS, K, N) * np.asarray(4, dtype) for _ in range(2)
    ]


def cases(keys):
    """Every kernel and every kind of bounds, with orders of the matrices and types in turn."""
    return [
        (key, name, bool((i + j) % 2), ("bf16", "f16")[(i + j) // 2 % 2])
        for i, key in enumerate(keys)
        for j, name in enumerate(BOUNDS)
    ]


@needs_emulator
@pytest.mark.parametrize(("key", "bounds", "k_major", "arithmetic"), cases(PAIR_KEYS))
@pytest.mark.one_in(20)
def test_a_function_of_two_products(key, bounds, k_major, arithmetic):
    product = pair(arithmetic, rhs_k_major=k_major)
    dtype, limits = product.lhs_dtype, BOUNDS[bounds]
    (lhs,), (gate, up) = operands(dtype, 1)
    generator = np.random.default_rng(0)
    weight, bias = (generator.normal(size=s).astype(dtype) for s in ((ROWS,), (GROUPS, N)))
    laid = [np.ascontiguousarray(w.swapaxes(1, 2)) if k_major else w for w in (gate, up)]
    arrays = [lhs, laid[0], np.asarray(limits, np.int32), laid[1], weight, bias]
    out, *others = (emulated(product, key, arrays, **how) for how in HOWS)
    for other in others:
        np.testing.assert_array_equal(out, other)
    both = [products_of(lhs, w, limits) for w in (gate, up)]
    group_of = np.searchsorted(limits[1:], np.arange(ROWS), "right").clip(0, GROUPS - 1)
    wide = (weight.astype(np.float64)[:, None], bias.astype(np.float64)[group_of])
    with jax.enable_x64(True):
        wanted = np.asarray(value(both[0][0], both[1][0], *wide))
    inside = (limits[0] <= np.arange(ROWS)) & (np.arange(ROWS) < limits[-1])
    wanted = np.where(inside[:, None], wanted, 0)
    error = np.abs(out.astype(np.float64) - wanted)
    assert (error <= 2**-8 * np.abs(wanted) + 2**-9).all()
    assert not out[~inside].any()


@needs_nvrtc
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("k_major", [False, True])
@pytest.mark.one_in(8)
def test_kernels_compile_to_what_the_plan_assumes(k_major, part):
    sizes = {"rows": 65536, "n": 1280, "k": 2560, "groups": 64, "rhs_k_major": k_major}
    found = list(grouped_wgmma_candidates(pair(**sizes), H100))
    for candidate in found[part::4]:
        entry = candidate.plan(H100).launches[-1].entry
        assert not entry.serialized, candidate.key
        # Wide tiles have as many accumulators as registers beside them.
        assert entry.spill_bytes <= 128, candidate.key


@needs_emulator
@pytest.mark.parametrize("case", ["some", "one expert", "dropped", "one token"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.thorough
def test_a_layer_of_experts(case, biases):
    """A layer that is not differentiated has one kernel for both first products."""
    tokens, features, hidden, experts, chosen = 90, 64, 72, 4, 2
    tokens = 1 if case == "one token" else tokens
    rng = np.random.default_rng(0)
    shapes = [(experts, features, hidden)] * 2 + [(experts, hidden, features)]
    if biases:
        shapes += [(experts, hidden)] * 2
    x, *matrices = (
        jnp.asarray(rng.normal(size=s) / 4, BF16) for s in ((tokens, features), *shapes)
    )
    indices = rng.integers(1, experts + 1, (tokens, chosen)).astype(np.int32)
    indices = {"one expert": indices * 0 + 2, "dropped": indices * 0 - 1}.get(case, indices)
    weights = jnp.asarray(rng.random((tokens, chosen)), BF16)

    def layer(x, up, gate, down, *biases):
        b_up, b_gate = biases or (None, None)
        return jtk.moe(
            x, up, down, weights, indices, w_gate=gate, b_up=b_up, b_gate=b_gate, group_offset=1
        )

    wanted = np.asarray(jax.jit(layer)(x, *matrices), np.float64)
    for how in HOWS[1:]:
        with emulated_gpu(**how) as ran:
            found = jax.jit(layer)(x, *matrices)
        launches = {plan.name: len(plan.launches) for plan in ran}
        # No tile is claimed where every CTA has one at most.
        assert launches["ragged_wgmma_matmul of a pair bf16"] == (1 if tokens == 1 else 2)
        error = np.abs(np.asarray(found, np.float64) - wanted)
        assert error.max() <= 2**-6 * max(1, np.abs(wanted).max())
    with emulated_gpu(policy="auto") as ran:
        jax.jit(layer).lower(x, *matrices)
    assert not any("pair" in plan.name for plan in ran)
