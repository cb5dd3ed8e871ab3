"""On a GPU: each kernel of small products is right, at any alignment, in any major order."""

import random

import numpy as np
import pytest
from candidate_calls import jitted, run_twice
from numerics import poison
from nvrtc_mark import require_gpu
from small_products import SIZES, SIZES_ACROSS_K, TYPES, bound, random_product

from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import current_gpu

require_gpu()

# So many of the tiles of a product are tried.
TILES = 4


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES + SIZES_ACROSS_K, ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.one_in(2)
def test_every_kernel_computes_the_product(types, sizes, rng):
    numbers = random.Random(int(rng.integers(2**32)))
    product, operands, exact, scale = random_product(numbers, types, sizes, most_matrices=20)
    gpu = current_gpu()
    found = small_candidates(product, gpu)
    wrong = {}
    for candidate in numbers.sample(found, min(TILES, len(found))):
        call = jitted(candidate.plan(gpu), exact.shape, product.out_dtype)
        poison(exact.shape, product.out_dtype)
        got = run_twice(call, operands)
        error = np.linalg.norm(got - exact) / scale
        if not error <= bound(product):
            wrong[candidate.key] = error
    assert not wrong, product
