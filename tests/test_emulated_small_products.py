"""Plans of small products, emulated: values without a GPU."""

import random

import emulated_plans
import numpy as np
import pytest
from small_products import ACROSS_K, SIZES, SIZES_ACROSS_K, SPECS, TYPES, bound, random_product

from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import known_gpu

pytestmark = pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")
# Types whose elements are packed to words.
PACKED = [types for types in TYPES if types[0] not in ("float32", "float64")]
# Emulation takes a millisecond and more for a CTA.
MOST_CTAS = 64


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.one_in(51)
def test_kernels_compute_the_product(types, sizes, rng):
    _check_product(types, sizes, rng, SPECS)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES_ACROSS_K, ids=str)
@pytest.mark.parametrize("types", PACKED, ids=str)
@pytest.mark.thorough
def test_kernels_pack_elements_across_k(types, sizes, rng):
    _check_product(types, sizes, rng, ACROSS_K)


def _check_product(types, sizes, rng, specs):
    numbers = random.Random(int(rng.integers(2**32)))
    # There are no tensor cores for 8-bit floats before sm_89.
    gpu = known_gpu("sm_90" if "float8" in types[0] else numbers.choice(("sm_80", "sm_90")))
    with gpu_target(gpu):
        product, operands, exact, scale = random_product(numbers, types, sizes, 3, specs)
    found = small_candidates(product, gpu)
    few = [candidate for candidate in found if candidate.instance.ctas <= MOST_CTAS]
    candidate = numbers.choice(few or sorted(found, key=lambda x: x.instance.ctas)[:1])
    with emulated_plans.record() as recorded:
        plan = candidate.plan(gpu)
    results = [(exact.shape, product.out_dtype)]
    # Copies of parts of a vector read nothing beyond an operand.
    (got,) = emulated_plans.run_plan(
        plan, recorded, operands, results, options=emulated_plans.SANITIZED
    )
    error = np.linalg.norm(got.astype(np.float64) - exact) / scale
    assert error <= bound(product), (candidate.key, product)
